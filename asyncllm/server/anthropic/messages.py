"""POST /v1/messages and /v1/messages/count_tokens.

Documented at https://docs.anthropic.com/en/api/messages and /messages-streaming.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
from aiohttp import web

from asyncllm.server.anthropic.blocks import messages_of
from asyncllm.server.anthropic.requests import CountTokensRequest, MessagesRequest, options_of
from asyncllm.server.http.errors import ApiError, fields_of
from asyncllm.server.http.responses import built_response, encode, json_response
from asyncllm.server.openai.answers import arguments_of, in_order, size_of
from asyncllm.server.request.arguments import request_options, sampled_config
from asyncllm.server.request.decode import read_request
from asyncllm.server.request.media import with_images
from asyncllm.server.request.structure import only_format
from asyncllm.server.service import service_of
from asyncllm.server.sse import SSE, event, stream
from asyncllm.types import Chunk, Response

__all__ = ["MessageObject", "TokenCount", "count_tokens", "create_message"]

REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
"""The engine's finish reason -> stop reason, if it is not end_turn or stop_sequence."""


def _named(name: bytes, data: bytes) -> bytes:
    return b"event: %b\n" % name + event(data)


FRAMING = replace(SSE, ping=_named(b"ping", b'{"type":"ping"}'), done=b"")


class MessageUsage(msgspec.Struct, kw_only=True):
    """Token counts."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    """Not reported: `input_tokens` counts the whole prompt."""


class MessageObject(msgspec.Struct, kw_only=True):
    """An answer."""

    id: str
    model: str
    content: list[dict[str, Any]]
    usage: MessageUsage
    type: str = "message"
    role: str = "assistant"
    stop_reason: str | None = None
    stop_sequence: str | None = None


class TokenCount(msgspec.Struct, kw_only=True):
    """The tokens of a prompt."""

    input_tokens: int


async def create_message(request: web.Request) -> web.StreamResponse:
    """Answer as Anthropic's Messages API does."""
    service = service_of(request)
    body = await read_request(request, MessagesRequest)
    form = None if body.output_config is None else body.output_config.format
    fields: dict[str, Any] = {"max_new_tokens": body.max_tokens}
    fields["response_format"] = only_format(None, ("output_config", form), ("output_format", body.output_format))
    if body.stop_sequences:
        fields["stop_words"] = body.stop_sequences
    generation = service.engine.generate(
        await with_images(request, messages_of(body.system, body.messages)),
        sampled_config(body, service.defaults, **fields),
        stream_response=bool(body.stream),
        adapter_name=service.adapter_of(body.model),
        **(request_options(request, body) | options_of(body, service.template_for(body.model))),
    )
    await generation.start()
    model, message_id = body.model or service.engine.model_name, f"msg_{uuid.uuid4().hex}"
    if body.stream:
        begun = MessageObject(id=message_id, model=model, content=[], usage=_usage(len(generation.prompt_token_ids), 0))
        events = _MessageEvents(begun)
        return await stream(request, service, [generation], events, FRAMING, events.failed)
    try:
        response = await generation.response()
    finally:
        generation.cancel()
    return await built_response(service.engine, lambda: _whole(message_id, model, response), size_of(response))


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """Count the tokens of the prompt that POST /v1/messages would build."""
    service = service_of(request)
    body = await read_request(request, CountTokensRequest)
    encoded: Any = await service.engine.encode(
        [await with_images(request, messages_of(body.system, body.messages))],
        bounded=True,
        adapter_name=service.adapter_of(body.model),
        **options_of(body, service.template_for(body.model)),
    )
    return json_response(TokenCount(input_tokens=len(encoded[0])))


def _usage(prompt: int, generated: int) -> MessageUsage:
    return MessageUsage(input_tokens=prompt, output_tokens=generated)


def _whole(message_id: str, model: str, response: Response) -> MessageObject:
    content: list[dict[str, Any]] = []
    if response.reasoning:
        content.append({"type": "thinking", "thinking": response.reasoning, "signature": SIGNATURE})
    for part in in_order(response.text, 0, response.tool_calls):
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        else:
            given = arguments_of(part.arguments)
            content.append({"type": "tool_use", "id": part.id, "name": part.name, "input": given})
    content = content or [{"type": "text", "text": ""}]
    return MessageObject(
        id=message_id,
        model=model,
        content=content,
        usage=_usage(response.history_token_len + response.input_token_len, response.generate_token_len),
        **_stop(response),
    )


SIGNATURE = "asyncllm"
"""The signature of reasoning. Clients send it back; nothing checks it."""


def _stop(answer: Chunk | Response) -> dict[str, Any]:
    """Return the stop reason of an answer."""
    if isinstance(answer.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_reason}
    return {"stop_reason": REASONS.get(answer.finish_reason or "", "end_turn"), "stop_sequence": None}


class _MessageEvents:
    """The events of a message: each block begins, grows and ends before the next."""

    def __init__(self, begun: MessageObject) -> None:
        self._begun: MessageObject | None = begun
        """The content of `message_start`; None once it has been sent."""
        self._index = -1
        """Index of the newest block."""
        self._open: str | None = None
        """The kind of the open block."""
        self._last: Chunk | None = None
        self._num_said = 0
        """Characters of text so far."""

    def chunk(self, chunk: Chunk) -> bytes:
        """Return the events of one chunk."""
        self._last = chunk
        return self._start() + b"".join(self._grow(chunk))

    def size(self, chunk: Chunk) -> int:
        return size_of(chunk)

    def closing(self) -> bytes:
        """Return the last events."""
        events = self._start()
        if self._index < 0:
            events += self._begin("text", {"type": "text", "text": ""})
        events += self._close()
        last = self._last or Chunk()
        usage = {"output_tokens": last.generate_token_len}
        return (
            events
            + _event({"type": "message_delta", "delta": _stop(last), "usage": usage})
            + _event({"type": "message_stop"})
        )

    def failed(self, error: ApiError) -> bytes:
        """Return the event of an error that ends the answer."""
        return _event(fields_of(error, "anthropic"))

    def _start(self) -> bytes:
        if self._begun is None:
            return b""
        begun, self._begun = self._begun, None
        return _event({"type": "message_start", "message": begun})

    def _grow(self, chunk: Chunk) -> Iterator[bytes]:
        if chunk.reasoning:
            if self._open != "thinking":
                yield self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": chunk.reasoning})
        for part in in_order(chunk.text, self._num_said, chunk.tool_calls):
            if isinstance(part, str):
                if self._open != "text":
                    yield self._begin("text", {"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": part})
                continue
            if part.name is not None:
                yield self._begin("tool_use", {"type": "tool_use", "id": part.id, "name": part.name, "input": {}})
            if part.arguments:
                yield self._delta({"type": "input_json_delta", "partial_json": part.arguments})
        self._num_said += len(chunk.text)

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        closed = self._close()
        self._open = kind
        self._index += 1
        return closed + _event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> bytes:
        kind, self._open = self._open, None
        if kind is None:
            return b""
        signed = b""
        if kind == "thinking":
            signed = self._delta({"type": "signature_delta", "signature": SIGNATURE})
        return signed + _event({"type": "content_block_stop", "index": self._index})


def _event(fields: dict[str, Any]) -> bytes:
    return _named(fields["type"].encode(), encode(fields))
