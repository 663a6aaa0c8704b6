"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Set
from itertools import groupby

from aiohttp import web

from asyncllm.engine.requests.generation import Generation
from asyncllm.server.http.errors import ApiError
from asyncllm.server.http.responses import built_response, encode, encoded_alone
from asyncllm.server.openai.answers import AnswerIdentity, Tail, UsageCount, chat_logprobs, prompt_logprobs_of, size_of
from asyncllm.server.openai.requests import ChatRequest
from asyncllm.server.openai.responses import (
    CalledCustomTool,
    CalledFunction,
    ChatChoice,
    ChatResponse,
    MessageCustomToolCall,
    MessageToolCall,
    ResponseMessage,
)
from asyncllm.server.request.arguments import (
    budget_options,
    chat_config,
    image_options,
    label_of,
    request_options,
    template_options,
    tool_options,
)
from asyncllm.server.request.custom_tools import InputText, custom_names_among, input_of
from asyncllm.server.request.decode import read_request
from asyncllm.server.request.history import normalised
from asyncllm.server.service import Service, service_of
from asyncllm.server.sse import stream
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.types import Chunk, Message, Response, ToolCallPiece

__all__ = ["chat_completions"]


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    service = service_of(request)
    body = await read_request(request, ChatRequest)
    identity = AnswerIdentity("chatcmpl-", body.model or service.engine.model_name, body.request_id or body.rid)
    generation = service.engine.generate(
        await _asked(request, body),
        chat_config(body, service.config, service.defaults),
        session_id=label_of(request, body.session_id, body.request_id or body.rid),
        do_preprocess=body.do_preprocess is not False and body.input_ids is None,
        input_ids=body.input_ids,
        stream_response=bool(body.stream),
        adapter_name=service.adapter_of(body.model),
        **(
            request_options(request, body)
            | template_options(body, service.template_for(body.model), body.reasoning_effort)
            | image_options(body)
            | tool_options(body)
            | budget_options(body)
        ),
    )
    await generation.start()
    if body.stream:
        return await stream(request, service, [generation], _ChatEvents(identity, body, generation, service))
    try:
        response = await generation.response()
    finally:
        generation.cancel()
    size = sum(map(size_of, response.choices or (response,)))
    return await built_response(service.engine, lambda: _whole(identity, body, generation, response, service), size)


async def _asked(request: web.Request, body: ChatRequest) -> list[Message] | str | None:
    """Return the conversation, or None if the body has `input_ids` instead. Raises ApiError."""
    if body.input_ids is None:
        return await normalised(request, body.messages)
    if body.messages:
        message = "Send either messages or input_ids: with token ids, messages is an empty list."
        raise ApiError(400, message, code="invalid_value", param="input_ids")
    return None


def _whole(
    identity: AnswerIdentity, body: ChatRequest, generation: Generation, response: Response, service: Service
) -> ChatResponse:
    count = UsageCount()
    count.add_response(response, 0)
    custom_names = custom_names_among(body.tools) if body.tools else frozenset()
    choices = []
    for index, answer in enumerate(response.choices or (response,)):
        message = message_of(answer, custom_names, thinks=body.include_reasoning is not False)
        choice = ChatChoice(index=index, message=message, finish_reason=answer.finish_reason)
        if answer.logprobs is not None:
            choice.logprobs = chat_logprobs(
                service.engine.tokenizer,
                answer.logprobs,
                body.top_logprobs or 0,
                as_ids=body.return_tokens_as_token_ids,
            )
        if answer.stop_reason is not None:
            choice.stop_reason = answer.stop_reason
        if body.return_token_ids:
            choice.token_ids = choice.output_ids = answer.token_ids
        choices.append(encoded_alone(choice))
    whole = ChatResponse(
        id=identity.id, created=identity.created, model=identity.model, choices=choices, usage=count.usage()
    )
    if response.prompt_logprobs is not None:
        tokenizer = service.engine.tokenizer
        whole.prompt_logprobs = prompt_logprobs_of(tokenizer, response.prompt_logprobs, body.prompt_logprobs or 0)
    if body.return_token_ids:
        whole.prompt_token_ids = generation.prompt_token_ids
    return whole


def message_of(answer: Response, custom_names: Set[str], *, thinks: bool) -> ResponseMessage:
    """Return the assistant's message, with its reasoning if it `thinks`. `custom_names`: names of tools whose calls
    have a text instead of arguments."""
    message = ResponseMessage(content=answer.text)
    if answer.reasoning and thinks:
        message.reasoning_content = message.reasoning = answer.reasoning
    if answer.tool_calls:
        message.tool_calls = [
            MessageCustomToolCall(id=call.id, custom=CalledCustomTool(name=call.name, input=input_of(call.arguments)))
            if call.name in custom_names
            else MessageToolCall(id=call.id, function=CalledFunction(name=call.name, arguments=call.arguments))
            for call in answer.tool_calls
        ]
    if not answer.text and (answer.tool_calls or answer.reasoning):
        message.content = None
    return message


class _CallDeltas:
    """The deltas of calls in a stream. One without an id continues its call; clients join the pieces."""

    def __init__(self, custom_names: Set[str]) -> None:
        self._custom_names = custom_names
        self._open: dict[int, tuple[int, InputText]] = {}
        """Choice -> index and text of its last call, if that is of a custom tool."""

    def of(self, chunk: Chunk) -> Iterator[bytes]:
        """Yield the deltas of a chunk."""
        for (index, name), pieces in groupby(chunk.tool_calls, lambda piece: (piece.index, piece.name)):
            group = list(pieces)
            arguments = "".join(piece.arguments for piece in group)
            if name is not None:
                yield from self._rest(chunk.choice)
                if name in self._custom_names:
                    self._open[chunk.choice] = index, InputText()
            opened = self._open.get(chunk.choice)
            if opened is not None:
                yield from self._custom(index, opened[1].read(arguments), group[0])
            elif name is None:
                yield b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (index, encode(arguments))
            else:
                form = b'{"tool_calls":[{"index":%d,"id":%b,"type":"function","function":{"name":%b,"arguments":%b}}]}'
                yield form % (index, encode(group[0].id), encode(name), encode(arguments))
        if chunk.finish_reason is not None:
            yield from self._rest(chunk.choice)

    def _custom(self, index: int, text: str, piece: ToolCallPiece) -> Iterator[bytes]:
        if piece.name is not None:
            form = b'{"tool_calls":[{"index":%d,"id":%b,"type":"custom","custom":{"name":%b,"input":%b}}]}'
            yield form % (index, encode(piece.id), encode(piece.name), encode(text))
        elif text:
            yield b'{"tool_calls":[{"index":%d,"custom":{"input":%b}}]}' % (index, encode(text))

    def _rest(self, choice: int) -> Iterator[bytes]:
        """Yield what ends the open call of a choice."""
        opened = self._open.pop(choice, None)
        if opened is not None and (text := opened[1].rest()):
            yield b'{"tool_calls":[{"index":%d,"custom":{"input":%b}}]}' % (opened[0], encode(text))


def _deltas(chunk: Chunk, calls: _CallDeltas, *, thinks: bool) -> Iterator[bytes]:
    """Yield the deltas of a chunk, each of one kind."""
    if chunk.reasoning and thinks:
        text = encode(chunk.reasoning)
        yield b'{"reasoning_content":%b,"reasoning":%b}' % (text, text)
    if chunk.text:
        yield b'{"content":%b}' % encode(chunk.text)
    yield from calls.of(chunk)


class _ChatEvents:
    """`chat.completion.chunk` events: first the role, then the text as it arrives, then the finish reason."""

    def __init__(self, identity: AnswerIdentity, body: ChatRequest, generation: Generation, service: Service) -> None:
        self._head = identity.head("chat.completion.chunk")
        self._tail = Tail(body)
        self._body = body
        self._tokenizer: Tokenizer = service.engine.tokenizer
        self._prompt_token_ids = generation.prompt_token_ids if body.return_token_ids else None
        self._count = UsageCount()
        self._begun: dict[int, bytes] = {}
        """Choice whose role has been sent -> the beginning of its plain events, up to the text."""
        self._splits = generation.splits
        self._thinks = body.include_reasoning is not False
        self._calls = _CallDeltas(custom_names_among(body.tools) if body.tools else frozenset())
        self._plain = not (body.return_token_ids or body.logprobs or self._tail.continuous or self._splits)
        self._plain_end = b'},"logprobs":null,"finish_reason":null}' + self._tail.plain

    def chunk(self, chunk: Chunk) -> bytes:
        """Return the events of one chunk."""
        begun = self._begun.get(chunk.choice)
        if begun is not None and self._plain and chunk.finish_reason is None:
            return begun + encode(chunk.text) + self._plain_end
        head = b'%b{"index":%d,"delta":' % (self._head, chunk.choice)
        events = b""
        if begun is None:
            self._begun[chunk.choice] = head + b'{"content":'
            self._count.begin(chunk)
            content = b"null" if self._splits and not chunk.text else b'""'
            events = head + b'{"role":"assistant","content":' + content + b'},"finish_reason":null}'
            of_prompt = b""
            if self._prompt_token_ids is not None:
                of_prompt += b',"prompt_token_ids":' + encode(self._prompt_token_ids)
            if chunk.prompt_logprobs is not None:
                found = prompt_logprobs_of(self._tokenizer, chunk.prompt_logprobs, self._body.prompt_logprobs or 0)
                of_prompt += b',"prompt_logprobs":' + encode(found)
            events += b"]" + of_prompt + self._end()[1:]
        self._count.add(chunk)
        tail = self._end()
        if self._splits:
            deltas = list(_deltas(chunk, self._calls, thinks=self._thinks))
            if not deltas and (chunk.logprobs or self._body.return_token_ids):
                deltas = [b"{}"]
        elif chunk.text or chunk.finish_reason is None or chunk.logprobs or self._body.return_token_ids:
            deltas = [b'{"content":' + encode(chunk.text) + b"}"]
        else:
            deltas = []
        for place, delta in enumerate(deltas):
            # The chunk's token ids and log-probabilities are sent only once.
            events += head + delta + b',"logprobs":' + (b"null" if place else self._logprobs(chunk))
            if self._body.return_token_ids and not place:
                ids = encode(chunk.token_ids)
                events += b',"token_ids":%b,"output_ids":%b' % (ids, ids)
            events += b',"finish_reason":null}' + tail
        if chunk.finish_reason is not None:
            end = b"{}" if self._splits else b'{"content":""}'
            events += head + end + b',"logprobs":null,"finish_reason":' + encode(chunk.finish_reason)
            if chunk.stop_reason is not None:
                events += b',"stop_reason":' + encode(chunk.stop_reason)
            events += b"}" + tail
        return events

    def _end(self) -> bytes:
        """Return the end of an event."""
        return self._tail.of(self._count.usage()) if self._tail.continuous else self._tail.plain

    def _logprobs(self, chunk: Chunk) -> bytes:
        if chunk.logprobs is None:
            return b"null"
        count, as_ids = self._body.top_logprobs or 0, self._body.return_tokens_as_token_ids
        return encode(chat_logprobs(self._tokenizer, chunk.logprobs, count, as_ids=as_ids))

    def size(self, chunk: Chunk) -> int:
        return size_of(chunk)

    def closing(self) -> bytes:
        """Return the usage, if requested, as an event without choices."""
        return self._head + self._tail.of(self._count.usage()) if self._tail.includes_usage else b""
