"""POST /v1/responses, and GET, DELETE and GET input_items of what is kept.

Documented at https://platform.openai.com/docs/api-reference/responses.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from aiohttp import web

from asyncllm.server.http.access import KEY
from asyncllm.server.http.errors import ApiError
from asyncllm.server.http.responses import built_response, encode, json_response
from asyncllm.server.openai.answers import chat_logprobs, size_of
from asyncllm.server.openai.responses import TokenLogprob
from asyncllm.server.request.arguments import image_options, request_options, sampled_config, thinking_options
from asyncllm.server.request.decode import read_request
from asyncllm.server.request.media import with_images
from asyncllm.server.responses.items import messages_of
from asyncllm.server.responses.output import Event, OutputItems
from asyncllm.server.responses.requests import ResponsesRequest, check_included, format_of, logprobs_of, tools_of
from asyncllm.server.responses.store import Kept
from asyncllm.server.service import Service, service_of
from asyncllm.server.sse import SSE, stream
from asyncllm.types import Chunk, Logprobs, Message

__all__ = [
    "DeletedResponse",
    "InputItems",
    "ResponseObject",
    "create_response",
    "delete_response",
    "list_input_items",
    "show_response",
]

FRAMING = replace(SSE, done=b"")
"""The last event is the response itself."""

ENDS = {"length": "incomplete", "abort": "cancelled", "error": "failed"}
"""Statuses by the reason of the end, where that is none of a complete answer."""


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response."""

    id: str
    created_at: int
    status: str
    model: str
    output: list[dict[str, Any]]
    object: str = "response"
    background: bool = False
    completed_at: int | None = None
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, Any] = {}
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: dict[str, Any] = {}
    store: bool = True
    temperature: float | None = None
    text: dict[str, Any] = msgspec.field(default_factory=lambda: {"format": {"type": "text"}})
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = []
    top_p: float | None = None
    truncation: str = "disabled"
    usage: dict[str, Any] | None = None
    user: str | None = None


class InputItems(msgspec.Struct, kw_only=True):
    """The items that a request brought."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    object: str = "list"
    has_more: bool = False


class DeletedResponse(msgspec.Struct, kw_only=True):
    """What was deleted."""

    id: str
    object: str = "response"
    deleted: bool = True


async def create_response(request: web.Request) -> web.StreamResponse:
    """Answer as OpenAI's Responses API does."""
    service = service_of(request)
    body = await read_request(request, ResponsesRequest)
    check_included(body)
    before: list[Message] = []
    if body.previous_response_id is not None:
        before = service.responses.get(request[KEY], body.previous_response_id, "previous_response_id").messages
    body.input = service.responses.resolved(request[KEY], body.input)
    said = await with_images(request, messages_of(body.input))
    front: list[Message] = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    effort = None if body.reasoning is None else body.reasoning.effort
    config = sampled_config(
        body,
        service.defaults,
        max_new_tokens=body.max_output_tokens,
        response_format=format_of(body),
        logprobs=logprobs_of(body),
    )
    generation = service.engine.generate(
        [*front, *before, *said],
        config,
        stream_response=bool(body.stream),
        adapter_name=service.adapter_of(body.model),
        **(
            request_options(request, body)
            | thinking_options(service.engine.chat_template, effort, body.chat_template_kwargs, "reasoning")
            | tools_of(body)
            | image_options(body)
        ),
    )
    await generation.start()
    answer = _Answer(request[KEY], service, body, [*before, *said])
    answer.object.temperature, answer.object.top_p = config.temperature, config.top_p
    if body.stream:
        return await stream(request, service, [generation], answer, FRAMING, answer.failed)
    try:
        async for chunk in generation:
            answer.take(chunk)
    finally:
        generation.cancel()
    answer.end()
    return await built_response(service.engine, lambda: answer.object, answer.num_tokens)


async def show_response(request: web.Request) -> web.StreamResponse:
    """Return a response that is kept."""
    kept = service_of(request).responses.get(request[KEY], request.match_info["response_id"])
    return web.Response(body=encode(kept.body), content_type="application/json")


async def delete_response(request: web.Request) -> web.StreamResponse:
    """Forget a response."""
    response_id = request.match_info["response_id"]
    service_of(request).responses.delete(request[KEY], response_id)
    return json_response(DeletedResponse(id=response_id))


async def list_input_items(request: web.Request) -> web.StreamResponse:
    """List what a kept response answered, newest first, without what came before it."""
    items = service_of(request).responses.get(request[KEY], request.match_info["response_id"]).input_items[::-1]
    ids = [item["id"] for item in items]
    return json_response(InputItems(data=items, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None))


def _with_ids(items: str | Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return input items as they are listed."""
    if isinstance(items, str):
        items = [{"role": "user", "content": [{"type": "input_text", "text": items}]}]
    return [{"type": "message", "id": f"msg_{uuid.uuid4().hex}", **item} for item in items]


class _Answer:
    """The response that chunks make, and its events. Events and the whole are written from the same items."""

    def __init__(self, key: int, service: Service, body: ResponsesRequest, messages: list[Message]) -> None:
        self._key = key
        self._service = service
        self._body = body
        self._messages = messages
        self._output = OutputItems(None if logprobs_of(body) is None else self._scored)
        self._number = 0
        """Of the next event."""
        self._finish_reason: str | None = None
        self.num_tokens = 0
        """Of the answer."""
        self.object = ResponseObject(
            id=f"resp_{uuid.uuid4().hex}",
            created_at=int(time.time()),
            status="in_progress",
            model=body.model or service.engine.model_name,
            output=self._output.items,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            store=body.store is not False,
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
        )
        if body.reasoning is not None:
            self.object.reasoning = {"effort": body.reasoning.effort, "summary": None}
        if body.text is not None and body.text.format is not None:
            self.object.text = {"format": body.text.format}

    def _scored(self, logprobs: Logprobs) -> list[TokenLogprob]:
        return chat_logprobs(self._service.engine.tokenizer, logprobs, self._body.top_logprobs or 0).content

    def take(self, chunk: Chunk) -> list[Event]:
        """Take a chunk in, and return its events."""
        self._finish_reason = chunk.finish_reason
        prompt, done = chunk.history_token_len + chunk.input_token_len, chunk.generate_token_len
        self.num_tokens = done
        self.object.usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": chunk.cached_token_len, "cache_write_tokens": 0},
            "output_tokens": done,
            "output_tokens_details": {"reasoning_tokens": chunk.reasoning_token_len},
            "total_tokens": prompt + done,
        }
        return list(self._output.add(chunk))

    def end(self) -> list[Event]:
        """Finish the response, keep it if it shall be kept, and return its last events."""
        status = ENDS.get(self._finish_reason or "", "completed")
        events = list(self._output.end(complete=status == "completed"))
        self.object.status = status
        if status == "incomplete":
            self.object.incomplete_details = {"reason": "max_output_tokens"}
        else:
            self.object.completed_at = int(time.time())
        if self.object.store and status in ("completed", "incomplete"):
            self._keep()
        return [*events, (f"response.{'completed' if status == 'cancelled' else status}", {"response": self.object})]

    def _keep(self) -> None:
        messages = [*self._messages, *messages_of(self._output.items)]
        items = _with_ids(self._body.input)
        body = msgspec.to_builtins(self.object)
        size = len(encode(messages)) + len(encode(items)) + len(encode(body))
        self._service.responses.put(self._key, Kept(body, items, messages, size))

    def chunk(self, chunk: Chunk) -> bytes:
        """Return the events of one chunk."""
        return self._begun() + self._written(self.take(chunk))

    def size(self, chunk: Chunk) -> int:
        return size_of(chunk)

    def closing(self) -> bytes:
        """Return the last events."""
        return self._begun() + self._written(self.end())

    def failed(self, error: ApiError) -> bytes:
        """Return the event of an error that breaks the answer off."""
        list(self._output.end(complete=False))
        self.object.status = "failed"
        self.object.error = {"code": error.code or "server_error", "message": error.message}
        return self._begun() + self._written([("response.failed", {"response": self.object})])

    def _begun(self) -> bytes:
        if self._number:
            return b""
        begin = [(f"response.{name}", {"response": _begun_only(self.object)}) for name in ("created", "in_progress")]
        return self._written(begin)

    def _written(self, events: Iterable[Event]) -> bytes:
        written = b""
        for kind, fields in events:
            data = encode({"type": kind, "sequence_number": self._number, **fields})
            written += b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
            self._number += 1
        return written


def _begun_only(response: ResponseObject) -> ResponseObject:
    """Return a response that has only begun."""
    return msgspec.structs.replace(response, status="in_progress", output=[], error=None, usage=None)
