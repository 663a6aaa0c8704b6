"""Response bodies of Ollama's routes: one object, or JSON lines, the last of which counts tokens and time."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from asyncllm.engine.requests.generation import Generation
from asyncllm.server.http.errors import ApiError, fields_of
from asyncllm.server.http.responses import encode
from asyncllm.server.openai.answers import arguments_of, chat_logprobs, size_of
from asyncllm.server.openai.responses import TokenLogprob
from asyncllm.server.sse import NDJSON
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.types import Chunk, Logprobs, Response

__all__ = ["AnswerWriter", "OllamaAnswer", "OllamaChatAnswer", "OllamaGenerateAnswer", "OllamaLines", "loaded", "now"]


class OllamaAnswer(msgspec.Struct, kw_only=True):
    """The fields shared by answers to chats and prompts. Counts are in the last line of a stream, or in the only
    object."""

    model: str
    created_at: str
    done: bool
    done_reason: str | UnsetType = UNSET
    """stop, length, or load if there was nothing to answer."""
    total_duration: int | UnsetType = UNSET
    """In nanoseconds, like all durations."""
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    """All tokens of the prompt, including cached ones."""
    prompt_eval_duration: int | UnsetType = UNSET
    """From the request's arrival to its first token, including the time in the queue."""
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class OllamaChatAnswer(OllamaAnswer, kw_only=True):
    """An answer of /api/chat."""

    message: dict[str, Any]


class OllamaGenerateAnswer(OllamaAnswer, kw_only=True):
    """An answer of /api/generate."""

    response: str
    thinking: str | UnsetType = UNSET


def now(seconds: float | None = None) -> str:
    """Return a time as RFC 3339: now, or `seconds` after 1970."""
    when = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return when.isoformat().replace("+00:00", "Z")


def loaded(model: str, *, chats: bool) -> OllamaAnswer:
    """Return the answer to a request without a prompt, which asks to load the model."""
    fields: dict[str, Any] = {"model": model, "created_at": now(), "done": True, "done_reason": "load"}
    if chats:
        return OllamaChatAnswer(message={"role": "assistant", "content": ""}, **fields)
    return OllamaGenerateAnswer(response="", **fields)


class AnswerWriter:
    """Writes the pieces of one answer."""

    def __init__(self, model: str, *, chats: bool, tokenizer: Tokenizer, top_logprobs: int) -> None:
        self._model = model
        self._chats = chats
        self._tokenizer = tokenizer
        self._top_logprobs = top_logprobs

    def piece(
        self, text: str, thinking: str, calls: list[dict[str, Any]], logprobs: Logprobs | None, **end: Any
    ) -> OllamaAnswer:
        """Return one line, or the whole answer. `end`: fields of the last line."""
        fields: dict[str, Any] = {"model": self._model, "created_at": now(), "done": False, **end}
        if logprobs:
            fields["logprobs"] = chat_logprobs(self._tokenizer, logprobs, self._top_logprobs).content
        if not self._chats:
            return OllamaGenerateAnswer(response=text, thinking=thinking or UNSET, **fields)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        return OllamaChatAnswer(message=message, **fields)

    def whole(self, generation: Generation, response: Response) -> OllamaAnswer:
        """Return an answer that is sent in one piece."""
        calls = [_call(index, call.name, call.arguments) for index, call in enumerate(response.tool_calls)]
        return self.piece(response.text, response.reasoning, calls, response.logprobs, **_end(generation, response))


def _call(index: int, name: str, arguments: str) -> dict[str, Any]:
    return {"function": {"index": index, "name": name, "arguments": arguments_of(arguments)}}


def _end(generation: Generation, last: Chunk | Response) -> dict[str, Any]:
    """Return the last line's fields other than the text."""
    arrived, prefilled, ended = generation.arrived, generation.prefilled, time.monotonic()
    begun = ended if prefilled is None else prefilled
    return {
        "done": True,
        "done_reason": "length" if last.finish_reason == "length" else "stop",
        "total_duration": round((ended - arrived) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": last.history_token_len + last.input_token_len,
        "prompt_eval_duration": round((begun - arrived) * 1e9),
        "eval_count": last.generate_token_len,
        "eval_duration": round((ended - begun) * 1e9),
    }


class OllamaLines:
    """An answer as lines. A call is sent in one line, once all its arguments have arrived."""

    def __init__(self, writer: AnswerWriter, generation: Generation) -> None:
        self._writer = writer
        self._generation = generation
        self._calls: list[tuple[str, list[str]]] = []
        """Name and pieces of the arguments of each call so far."""
        self._num_sent = 0
        self._last = Chunk()

    def chunk(self, chunk: Chunk) -> bytes:
        """Return the line of one chunk, empty if there is nothing to show yet."""
        self._last = chunk
        for piece in chunk.tool_calls:
            if piece.name is not None:
                self._calls.append((piece.name, []))
            self._calls[-1][1].append(piece.arguments)
        # The newest call may still continue.
        complete = len(self._calls) - (chunk.finish_reason is None)
        calls = [
            _call(index, name, "".join(self._calls[index][1]))
            for index, (name, _) in enumerate(self._calls[: max(complete, 0)])
            if index >= self._num_sent
        ]
        self._num_sent += len(calls)
        if not (chunk.text or chunk.reasoning or calls or chunk.logprobs):
            return b""
        return NDJSON.frame(encode(self._writer.piece(chunk.text, chunk.reasoning, calls, chunk.logprobs)))

    def size(self, chunk: Chunk) -> int:
        return size_of(chunk)

    def closing(self) -> bytes:
        """Return the last line."""
        return NDJSON.frame(encode(self._writer.piece("", "", [], None, **_end(self._generation, self._last))))

    @staticmethod
    def failed(error: ApiError) -> bytes:
        """Return the line of an error that ends the answer."""
        return NDJSON.frame(encode(fields_of(error, "ollama")))
