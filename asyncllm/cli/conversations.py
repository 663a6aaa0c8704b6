"""Terminal conversations with a model in this process, or with a server."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from PIL.Image import Image

    from asyncllm.config import GenerationConfig
    from asyncllm.http_client.api_client import APIClient
    from asyncllm.pipeline import Pipeline
    from asyncllm.types import Chunk

__all__ = ["ClientConversation", "LocalConversation", "SessionConversation"]


class _Piece(NamedTuple):
    text: str
    finish_reason: str | None


class LocalConversation:
    """A conversation with a model in this process."""

    def __init__(self, pipe: Pipeline, generation: GenerationConfig, adapter_name: str | None = None) -> None:
        self._pipe = pipe
        self._adapter_name = adapter_name
        self._generation = generation
        self._session = pipe.session()
        self._images: list[Image] = []
        """Images for the next message."""

    def answer(self, text: str) -> Generator[Chunk, None, None]:
        images, self._images = self._images, []
        answer: Generator[Chunk, None, None] = self._session.chat(
            (text, images) if images else text,
            self._generation,
            adapter_name=self._adapter_name,
            stream_response=True,
            separate_reasoning=False,
        )
        return answer

    def attach(self, image: str) -> None:
        from asyncllm.vl import load_image

        self._images.append(load_image(image))

    def forget(self) -> None:
        self._images = []
        self._session.close()
        self._session = self._pipe.session()


class ClientConversation:
    """Keeps the messages here and sends all of them with every turn, so it works with any server of OpenAI's API."""

    def __init__(self, client: APIClient, model: str) -> None:
        self._client = client
        self._model = model
        self._messages: list[dict[str, Any]] = []
        """The conversation so far, including the part of a stopped answer that had arrived."""
        self._parts: list[dict[str, Any]] = []
        """Images for the next message."""

    def answer(self, text: str) -> Generator[_Piece, None, None]:
        parts, self._parts = self._parts, []
        content = [*parts, {"type": "text", "text": text}] if parts else text
        asked = [*self._messages, {"role": "user", "content": content}]
        answer = ""
        try:
            # None: the server's own sampling defaults.
            for item in self._client.chat_completions_v1(self._model, asked, temperature=None, top_p=None, stream=True):
                for choice in item["choices"]:
                    piece = choice["delta"].get("content") or ""
                    answer += piece
                    yield _Piece(piece, choice["finish_reason"])
        finally:
            if answer:
                self._messages = [*asked, {"role": "assistant", "content": answer}]

    def attach(self, image: str) -> None:
        self._parts.append({"type": "image_url", "image_url": {"url": _url(image)}})

    def forget(self) -> None:
        self._messages, self._parts = [], []


class SessionConversation:
    """The server keeps the conversation, through LMDeploy's interactive route; a later client can resume it by its
    session id."""

    def __init__(self, client: APIClient, session_id: int) -> None:
        self._client = client
        self._session_id = session_id
        self._images: list[str] = []
        """URLs of images for the next message."""

    def attach(self, image: str) -> None:
        self._images.append(_url(image))

    def answer(self, text: str) -> Generator[_Piece, None, None]:
        images, self._images = self._images, []
        turn = self._client.chat_interactive_v1(
            text, images or None, session_id=self._session_id, interactive_mode=True, stream=True
        )
        try:
            for item in turn:
                yield _Piece(item["text"], item["finish_reason"])
        except (GeneratorExit, KeyboardInterrupt):
            # The server may notice a closed connection only after the next turn arrives.
            list(self._client.chat_interactive_v1("", session_id=self._session_id, cancel=True))
            raise

    def forget(self) -> None:
        self._images = []
        self._client.end_session(self._session_id)


def _url(image: str) -> str:
    """Return an image as a data: URL. Files are read here, because the server reads none."""
    from asyncllm.vl import encode_image_base64

    return f"data:image/png;base64,{encode_image_base64(image)}"
