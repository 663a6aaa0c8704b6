"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from asyncllm.engine.generation import Generation
from asyncllm.server.chunks import Answering, Tail
from asyncllm.server.decode import read_request
from asyncllm.server.encode import encode, json_response
from asyncllm.server.logprobs import chat_logprobs
from asyncllm.server.options import label_of, request_options, template_options
from asyncllm.server.requests import ChatRequest
from asyncllm.server.responses import ChatChoice, ChatResponse, ResponseMessage
from asyncllm.server.sampling import chat_config
from asyncllm.server.service import Service, service_of
from asyncllm.server.sse import stream
from asyncllm.server.tally import Tally
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.types import Chunk, Message, Response

__all__ = ["chat_completions", "normalised"]

NOT_SAID = ("refusal", "annotations", "audio", "function_call")
"""Keys of an assistant's message as OpenAI's client hands it back, which say nothing when they are empty."""


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    service = service_of(request)
    body = await read_request(request, ChatRequest)
    generation = service.engine.generate(
        normalised(body.messages),
        chat_config(body, service.config, service.defaults),
        session_id=label_of(request, body.session_id),
        do_preprocess=body.do_preprocess is not False,
        stream_response=bool(body.stream),
        **(request_options(request, body) | template_options(body)),
    )
    await generation.start()
    answering = Answering("chatcmpl-", service.engine.model_name, body.request_id)
    if body.stream:
        return await stream(request, service, [generation], _ChatEvents(answering, body, generation, service))
    try:
        response = await generation.response()
    finally:
        generation.cancel()
    return json_response(_whole(answering, body, generation, response, service))


def normalised(messages: list[dict[str, Any]] | str) -> list[Message] | str:
    """The messages as the chat template takes them: `developer` is OpenAI's newer name of `system`."""
    if isinstance(messages, str):
        return messages
    result = []
    for message in messages:
        kept = {key: value for key, value in message.items() if value or key not in NOT_SAID}
        if kept.get("role") == "developer":
            kept["role"] = "system"
        result.append(kept)
    return result


def _whole(
    answering: Answering, body: ChatRequest, generation: Generation, response: Response, service: Service
) -> ChatResponse:
    tally = Tally()
    tally.add_response(response, 0)
    choices = []
    for index, answer in enumerate(response.choices or (response,)):
        choice = ChatChoice(
            index=index, message=ResponseMessage(content=answer.text), finish_reason=answer.finish_reason
        )
        if answer.logprobs is not None:
            choice.logprobs = chat_logprobs(service.engine.tokenizer, answer.logprobs, body.top_logprobs or 0)
        if answer.stop_reason is not None:
            choice.stop_reason = answer.stop_reason
        if body.return_token_ids:
            choice.token_ids = answer.token_ids
        choices.append(choice)
    whole = ChatResponse(
        id=answering.id, created=answering.created, model=answering.model, choices=choices, usage=tally.usage()
    )
    if response.prompt_logprobs is not None:
        whole.prompt_logprobs = response.prompt_logprobs
    if body.return_token_ids:
        whole.prompt_token_ids = generation.prompt_token_ids
    return whole


class _ChatEvents:
    """`chat.completion.chunk` events: the role first, then text as it comes, then the reason of the end."""

    def __init__(self, answering: Answering, body: ChatRequest, generation: Generation, service: Service) -> None:
        self._head = answering.head("chat.completion.chunk")
        self._tail = Tail(body)
        self._body = body
        self._tokenizer: Tokenizer = service.engine.tokenizer
        self._prompt_token_ids = generation.prompt_token_ids if body.return_token_ids else None
        self._tally = Tally()
        self._begun: dict[int, bytes] = {}
        """Choices whose role has been sent: the beginning of their plain events, up to the text."""
        self._plain = not (body.return_token_ids or body.logprobs or self._tail.continuous)
        self._plain_end = b'},"logprobs":null,"finish_reason":null}' + self._tail.plain

    def chunk(self, chunk: Chunk) -> bytes:
        """The events of one chunk."""
        begun = self._begun.get(chunk.choice)
        if begun is not None and self._plain and chunk.finish_reason is None:
            return begun + encode(chunk.text) + self._plain_end
        self._tally.add(chunk)
        tail = self._tail.of(self._tally.usage()) if self._tail.continuous else self._tail.plain
        head = b'%b{"index":%d,"delta":' % (self._head, chunk.choice)
        events = b""
        if begun is None:
            self._begun[chunk.choice] = head + b'{"content":'
            events = head + b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
            if self._prompt_token_ids is not None:
                events += b'],"prompt_token_ids":' + encode(self._prompt_token_ids) + tail[1:]
            else:
                events += tail
        if chunk.text or chunk.finish_reason is None or chunk.logprobs or self._body.return_token_ids:
            events += head + b'{"content":' + encode(chunk.text) + b'},"logprobs":' + self._logprobs(chunk)
            if self._body.return_token_ids:
                events += b',"token_ids":' + encode(chunk.token_ids)
            events += b',"finish_reason":null}' + tail
        if chunk.finish_reason is not None:
            events += head + b'{},"logprobs":null,"finish_reason":' + encode(chunk.finish_reason)
            if chunk.stop_reason is not None:
                events += b',"stop_reason":' + encode(chunk.stop_reason)
            events += b"}" + tail
        return events

    def _logprobs(self, chunk: Chunk) -> bytes:
        if chunk.logprobs is None:
            return b"null"
        return encode(chat_logprobs(self._tokenizer, chunk.logprobs, self._body.top_logprobs or 0))

    def closing(self) -> bytes:
        """The usage, if asked for: an event without choices."""
        return self._head + self._tail.of(self._tally.usage()) if self._tail.includes_usage else b""
