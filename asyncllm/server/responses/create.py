"""POST /v1/responses: the request, and the response built from the engine's chunks.

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

from asyncllm.config import RequestKeywords
from asyncllm.engine.requests.generation import Generation
from asyncllm.server.http.access import KEY
from asyncllm.server.http.errors import ApiError
from asyncllm.server.http.responses import built_response, encode, json_response
from asyncllm.server.openai.answers import chat_logprobs, size_of
from asyncllm.server.openai.responses import TokenLogprob
from asyncllm.server.request.arguments import image_options, request_options, sampled_config, thinking_options
from asyncllm.server.request.decode import IGNORED, read_request
from asyncllm.server.request.media import with_images
from asyncllm.server.responses.background import BackgroundResponse
from asyncllm.server.responses.event_log import EventLog
from asyncllm.server.responses.items import messages_of
from asyncllm.server.responses.output import Event, OutputItems
from asyncllm.server.responses.requests import (
    InputTokensRequest,
    ResponsesRequest,
    callable_among,
    check_included,
    custom_names_of,
    format_of,
    logprobs_of,
    tools_of,
)
from asyncllm.server.responses.store import StoredResponse
from asyncllm.server.responses.stored import follow
from asyncllm.server.service import Service, service_of
from asyncllm.server.sse import SSE, stream
from asyncllm.types import Chunk, Logprobs, Message

__all__ = ["InputTokens", "ResponseObject", "count_input_tokens", "create_response"]

FRAMING = replace(SSE, done=b"")
"""The last event is the response itself."""

ENDS = {"length": "incomplete", "abort": "cancelled", "error": "failed"}
"""Finish reason -> status, for incomplete answers."""


CONTINUABLE = ("completed", "incomplete")
"""Statuses of responses that can be continued."""


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


async def _conversation(request: web.Request, body: ResponsesRequest | InputTokensRequest) -> list[Message]:
    """Return the messages to answer, without instructions. References in `body.input` are replaced by their items.
    Raises ApiError."""
    service, before = service_of(request), list[Message]()
    if body.previous_response_id is not None:
        service.background.check_over(request[KEY], body.previous_response_id, "previous_response_id")
        before = _continued_messages(
            service.responses.get(request[KEY], body.previous_response_id, "previous_response_id")
        )
    body.input = service.responses.resolved(request[KEY], body.input)
    return [*before, *await with_images(request, messages_of(body.input))]


def _instructed(body: ResponsesRequest | InputTokensRequest, conversation: list[Message]) -> list[Message]:
    return (
        conversation if body.instructions is None else [{"role": "system", "content": body.instructions}, *conversation]
    )


def _options(request: web.Request, body: ResponsesRequest | InputTokensRequest) -> RequestKeywords:
    """Return the tools, the reasoning effort and the image preparation as keyword arguments of the engine. Raises
    ApiError."""
    service = service_of(request)
    if service.config.unknown_fields == "ignore":
        body.tools, left_out = callable_among(body.tools)
        request[IGNORED] = [*request.get(IGNORED, ()), *(f"tools.{kind}" for kind in left_out)]
    effort = None if body.reasoning is None else body.reasoning.effort
    template = service.template_for(body.model)
    thinking = thinking_options(template, effort, body.chat_template_kwargs, "reasoning")
    return thinking | tools_of(body) | image_options(body)


class InputTokens(msgspec.Struct, kw_only=True):
    """The answer of POST /v1/responses/input_tokens."""

    input_tokens: int
    object: str = "response.input_tokens"


async def count_input_tokens(request: web.Request) -> web.StreamResponse:
    """Count the tokens of the prompt that POST /v1/responses would build."""
    service = service_of(request)
    body = await read_request(request, InputTokensRequest)
    messages: Any = _instructed(body, await _conversation(request, body))
    encoded: Any = await service.engine.encode(
        [messages], bounded=True, adapter_name=service.adapter_of(body.model), **_options(request, body)
    )
    return json_response(InputTokens(input_tokens=len(encoded[0])))


async def create_response(request: web.Request) -> web.StreamResponse:
    """Answer as OpenAI's Responses API does."""
    service = service_of(request)
    body = await read_request(request, ResponsesRequest)
    check_included(body)
    if body.background:
        if body.store is False:
            raise ApiError(
                400,
                "A background response is kept until it is asked for. Leave store out, or background.",
                code="invalid_value",
                param="background",
            )
        service.background.check_room()
    conversation = await _conversation(request, body)
    config = sampled_config(
        body,
        service.defaults,
        max_new_tokens=body.max_output_tokens,
        response_format=format_of(body),
        logprobs=logprobs_of(body),
    )
    generation = service.engine.generate(
        _instructed(body, conversation),
        config,
        stream_response=bool(body.stream),
        adapter_name=service.adapter_of(body.model),
        **(request_options(request, body) | _options(request, body)),
    )
    await generation.start()
    answer = _Answer(request[KEY], service, body, conversation)
    answer.object.temperature, answer.object.top_p = config.temperature, config.top_p
    if body.background:
        return await _begin_in_background(request, answer, generation)
    if body.stream:
        return await stream(request, service, [generation], answer, FRAMING, answer.failed)
    try:
        async for chunk in generation:
            answer.take(chunk)
    finally:
        generation.cancel()
    answer.end()
    return await built_response(service.engine, lambda: answer.object, answer.num_tokens)


async def _begin_in_background(request: web.Request, answer: _Answer, generation: Generation) -> web.StreamResponse:
    """Compute a response that is queued in the engine, and reply with its initial state or its events."""
    service, log = service_of(request), answer.log
    try:
        job = BackgroundResponse(answer, log, answer.input_items)
        service.background.begin(request[KEY], job, generation, service.state.more_work())
    except BaseException:
        generation.cancel()
        raise
    if log is not None:
        return await follow(request, log, 0)
    return web.Response(body=encode(job.body), content_type="application/json")


def _continued_messages(kept: StoredResponse) -> list[Message]:
    """Return the conversation that a response ends. Raises ApiError 400 if the response was cancelled or failed."""
    if kept.body["status"] not in CONTINUABLE:
        raise ApiError(
            400,
            f"The response has the status {kept.body['status']!r}, and cannot be continued. Continue the response "
            f"before it.",
            code="response_not_completed",
            param="previous_response_id",
        )
    return kept.messages


def _with_ids(items: str | Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return input items in the form in which they are listed."""
    if isinstance(items, str):
        items = [{"role": "user", "content": [{"type": "input_text", "text": items}]}]
    return [{"type": "message", "id": f"msg_{uuid.uuid4().hex}", **item} for item in items]


class _Answer:
    """The response and its events, both built from the same items."""

    def __init__(self, key: int, service: Service, body: ResponsesRequest, messages: list[Message]) -> None:
        self._key = key
        self._service = service
        self._body = body
        self._messages = messages
        scored = None if logprobs_of(body) is None else self._scored
        self._output = OutputItems(scored, custom_names_of(body))
        self._number = 0
        """Number of the next event."""
        self._finish_reason: str | None = None
        self.input_items = _with_ids(body.input)
        self.log = EventLog() if body.background and body.stream else None
        """Events of a background response that is streamed."""
        self.num_tokens = 0
        """Generated tokens."""
        self.object = ResponseObject(
            id=f"resp_{uuid.uuid4().hex}",
            created_at=int(time.time()),
            status="queued" if body.background else "in_progress",
            background=bool(body.background),
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
        """Add a chunk and return its events."""
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
        """Finish the response, store it if requested, and return its last events."""
        status = ENDS.get(self._finish_reason or "", "completed")
        events = list(self._output.end(complete=status == "completed"))
        self.object.status = status
        if status == "incomplete":
            self.object.incomplete_details = {"reason": "max_output_tokens"}
        else:
            self.object.completed_at = int(time.time())
        if self.object.store and (status in CONTINUABLE or self.object.background):
            self._keep()
        return [*events, (f"response.{'completed' if status == 'cancelled' else status}", {"response": self.object})]

    def _keep(self) -> None:
        # A cancelled or failed response can be read but not continued.
        answered = self.object.status in CONTINUABLE
        messages = [*self._messages, *messages_of(self._output.items)] if answered else []
        body = self.body()
        size = len(encode(messages)) + len(encode(self.input_items)) + len(encode(body))
        if self.log is not None:
            size += self.log.size
        self._service.responses.put(self._key, StoredResponse(body, self.input_items, messages, size, self.log))

    def body(self) -> dict[str, Any]:
        """Return the response in its current state."""
        shown = _begun_only(self.object) if self.object.status in ("queued", "in_progress") else self.object
        body: dict[str, Any] = msgspec.to_builtins(shown)
        return body

    def began(self) -> list[bytes]:
        """Return the events of a queued response."""
        return self._numbered([(f"response.{name}", {"response": self.body()}) for name in ("created", "queued")])

    def _in_progress(self) -> list[bytes]:
        if self.object.status != "queued":
            return []
        self.object.status = "in_progress"
        return self._numbered([("response.in_progress", {"response": self.body()})])

    def took(self, chunk: Chunk) -> list[bytes]:
        """Return the events of a chunk."""
        return [*self._in_progress(), *self._numbered(self.take(chunk))]

    def ended(self) -> list[bytes]:
        """Finish the response, keep it, and return its last events."""
        return [*self._in_progress(), *self._numbered(self.end())]

    def cancelled(self) -> list[bytes]:
        """Finish a cancelled response, keep it, and return its last events."""
        return self._broken("cancelled", "response.cancelled")

    def broke(self, error: ApiError) -> list[bytes]:
        """Finish a failed response, keep it, and return its last events."""
        self.object.error = {"code": error.code or "server_error", "message": error.message}
        return self._broken("failed", "response.failed")

    def _broken(self, status: str, event: str) -> list[bytes]:
        list(self._output.end(complete=False))
        self.object.status = status
        self._keep()
        return self._numbered([(event, {"response": self.object})])

    def chunk(self, chunk: Chunk) -> bytes:
        """Return the events of one chunk."""
        return self._begun() + self._written(self.take(chunk))

    def size(self, chunk: Chunk) -> int:
        return size_of(chunk)

    def closing(self) -> bytes:
        """Return the last events."""
        return self._begun() + self._written(self.end())

    def failed(self, error: ApiError) -> bytes:
        """Return the event of an error that ends the answer."""
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
        return b"".join(self._numbered(events))

    def _numbered(self, events: Iterable[Event]) -> list[bytes]:
        written = []
        for kind, fields in events:
            data = encode({"type": kind, "sequence_number": self._number, **fields})
            written.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))
            self._number += 1
        return written


def _begun_only(response: ResponseObject) -> ResponseObject:
    """Return a copy of the response as it is at its beginning or while it is queued."""
    status = "queued" if response.status == "queued" else "in_progress"
    return msgspec.structs.replace(response, status=status, output=[], error=None, usage=None)
