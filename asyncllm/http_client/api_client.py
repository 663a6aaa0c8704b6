"""APIClient: LMDeploy's client of a server, for synchronous programs. Uses only the standard library."""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec

from asyncllm.config import DEFAULT_URL
from asyncllm.errors import InvalidParameter, ServerError, ServerUnreachable, short

__all__ = ["APIClient"]

DONE = b"[DONE]"

Messages = str | list[dict[str, Any]]
Words = str | list[str] | None


class APIClient:
    """Calls a server. Methods that answer are generators: of one dict, or with `stream=True` of one dict per piece.

    Usable from several threads; each call opens its own connection. Closing a generator before its end, or interrupting
    it, closes its connection, and the server then ends the answer. Any call raises ServerError for an error reported by
    the server, and ServerUnreachable if it does not answer.
    """

    def __init__(
        self,
        api_server_url: str = DEFAULT_URL,
        api_key: str | None = None,
        *,
        timeout: float | None = 600.0,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """`timeout`: seconds to wait for the next byte; None: no limit. Raises InvalidParameter for an invalid
        address."""
        address = urlsplit(api_server_url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise InvalidParameter(
                f"api_server_url is {short(api_server_url)}, which is not an address. Write it as http://host:port.",
                "api_server_url",
            )
        self.api_server_url = api_server_url.rstrip("/").removesuffix("/v1")
        self._path = urlsplit(self.api_server_url).path
        self._host, self._port = address.hostname, address.port
        self._tls = (ssl_context or ssl.create_default_context()) if address.scheme == "https" else None
        self._timeout = timeout
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._open: set[http.client.HTTPConnection] = set()
        """Connections of the running calls."""
        self.on_close: Callable[[], object] | None = None
        """Called once by `close`, after the calls have ended."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the running calls, and the server if `asyncllm.serve` started it for this client. Idempotent."""
        for connection in list(self._open):
            socket_ = connection.sock
            if socket_ is not None:
                # Wakes a thread that waits on the connection, which closing alone does not.
                with suppress(OSError):
                    socket_.shutdown(socket.SHUT_RDWR)
        on_close, self.on_close = self.on_close, None
        if on_close is not None:
            on_close()

    @property
    def available_models(self) -> list[str]:
        """The names of the served models."""
        return [model["id"] for model in self._get("/v1/models")["data"]]

    def encode(
        self, input: str | list[str], do_preprocess: bool = False, add_bos: bool = True
    ) -> tuple[list[int] | list[list[int]], int | list[int]]:
        """Return the token ids of a text, or of each of several texts, and their number. `do_preprocess` applies the
        chat template."""
        body = {"input": input, "do_preprocess": do_preprocess, "add_bos": add_bos}
        (answer,) = self._answers("/v1/encode", body)
        return answer["input_ids"], answer["length"]

    def chat_completions_v1(
        self,
        model: str,
        messages: Messages,
        temperature: float | None = 0.7,
        top_p: float | None = 1.0,
        logprobs: bool | None = False,
        top_logprobs: int | None = None,
        n: int | None = 1,
        max_tokens: int | None = None,
        stop: Words = None,
        stream: bool = False,
        presence_penalty: float | None = 0.0,
        frequency_penalty: float | None = 0.0,
        user: str | None = None,
        repetition_penalty: float | None = 1.0,
        session_id: int | None = -1,
        ignore_eos: bool | None = False,
        skip_special_tokens: bool | None = True,
        **fields: Any,
    ) -> Iterator[dict[str, Any]]:
        """Answer a conversation. None leaves a field to the server's default; `fields` are other fields of the
        request."""
        return self._call("/v1/chat/completions", locals())

    def completions_v1(
        self,
        model: str,
        prompt: str | list[Any],
        suffix: str | None = None,
        temperature: float | None = 0.7,
        n: int | None = 1,
        max_tokens: int | None = 16,
        stream: bool = False,
        stop: Words = None,
        top_p: float | None = 1.0,
        repetition_penalty: float | None = 1.0,
        user: str | None = None,
        ignore_eos: bool | None = False,
        session_id: int | None = -1,
        **fields: Any,
    ) -> Iterator[dict[str, Any]]:
        """Continue one prompt or several, in the manner of `chat_completions_v1`."""
        return self._call("/v1/completions", locals())

    def chat_interactive_v1(
        self,
        prompt: Messages,
        image_url: str | list[str] | None = None,
        session_id: int = -1,
        interactive_mode: bool = False,
        stream: bool = False,
        stop: Words = None,
        request_output_len: int | None = None,
        top_p: float | None = 0.8,
        top_k: int | None = 40,
        temperature: float | None = 0.8,
        repetition_penalty: float | None = 1.0,
        ignore_eos: bool | None = False,
        skip_special_tokens: bool | None = True,
        adapter_name: str | None = None,
        **fields: Any,
    ) -> Iterator[dict[str, Any]]:
        """Yield the next turn of a conversation that the server stores under `session_id`, with
        `interactive_mode=True`."""
        return self._call("/v1/chat/interactive", locals())

    def chat(
        self,
        prompt: str,
        session_id: int,
        image_url: str | list[str] | None = None,
        request_output_len: int = 512,
        stream: bool = False,
        **fields: Any,
    ) -> Iterator[tuple[str, int, str | None]]:
        """Yield a turn of the server's conversation `session_id`: text, number of tokens, and the reason if it has
        ended."""
        for item in self.chat_interactive_v1(
            prompt,
            image_url,
            session_id,
            interactive_mode=True,
            stream=stream,
            request_output_len=request_output_len,
            **fields,
        ):
            yield item["text"], item["tokens"], item["finish_reason"]

    def end_session(self, session_id: int) -> None:
        """Make the server forget a conversation."""
        list(self.chat_interactive_v1("", session_id=session_id, interactive_mode=False))

    def _call(self, path: str, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Call a route. `arguments`: those of the calling method, by name."""
        body = {**arguments, **arguments["fields"]}
        for name in ("self", "fields"):
            del body[name]
        return self._answers(path, {name: value for name, value in body.items() if value is not None})

    def _answers(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self._response("POST", path, body) as response:
            if body.get("stream"):
                yield from _items(response)
            else:
                yield _decoded(response.read())

    def _get(self, path: str) -> dict[str, Any]:
        with self._response("GET", path) as response:
            return _decoded(response.read())

    @contextmanager
    def _response(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Open the response to a request, if its status is 2xx; its connection is closed at the end of the block."""
        if self._tls is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        else:
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout, context=self._tls)
        self._open.add(connection)
        try:
            encoded = msgspec.json.encode(body) if body is not None else None
            connection.request(method, self._path + path, encoded, self._headers)
            with connection.getresponse() as response:
                if response.status >= 300:
                    raise _refusal(response.status, response.headers.get("Retry-After"), response.read())
                yield response
        except (OSError, http.client.HTTPException) as error:
            raise ServerUnreachable(
                f"{self.api_server_url} does not answer, or has stopped to ({type(error).__name__}: {error}). "
                f"Check the address, and whether the server runs."
            ) from error
        finally:
            self._open.discard(connection)
            connection.close()


def _items(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the JSON of each line of a stream of server-sent events or of plain lines."""
    ended = False
    while (line := response.readline()).endswith(b"\n"):
        data = line.strip().removeprefix(b"data:").strip()
        if data == DONE:
            return
        if data and not data.startswith(b":"):
            item = _decoded(data)
            ended = item.get("finish_reason") is not None
            yield item
    if not ended:
        raise http.client.IncompleteRead(b"")


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        item = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.MsgspecError:
        raise ServerError(f"The server did not send a JSON object: {short(data[:80])}. Check the address.") from None
    if "error" in item:
        raise _refusal(None, None, data)
    return item


def _refusal(status: int | None, retry_after: str | None, data: bytes) -> ServerError:
    """Return the error in a body `{"error": {...}}`, or in LMDeploy's flat form; for any other body, its first line."""
    found: dict[str, Any] = {}
    try:
        body = msgspec.json.decode(data, type=dict[str, Any])
        found = body["error"] if isinstance(body.get("error"), dict) else body
        message = str(found["message"])
    except (msgspec.MsgspecError, KeyError):
        message = f"The server answered with status {status}: {short(data[:200].decode('utf-8', 'replace'))}"
    return ServerError(
        message,
        status=status,
        type=found.get("type"),
        code=found["code"] if isinstance(found.get("code"), str) else None,
        param=found.get("param"),
        retry_after=float(retry_after) if retry_after and retry_after.isdecimal() else None,
    )
