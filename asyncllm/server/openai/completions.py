"""POST /v1/completions: continue prompts without a chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from asyncllm.engine.requests.generation import Generation
from asyncllm.server.http.errors import ApiError
from asyncllm.server.http.responses import built_response, encode, encoded_alone
from asyncllm.server.openai.answers import (
    AnswerIdentity,
    Tail,
    TextPosition,
    UsageCount,
    completion_logprobs,
    prompt_logprobs_of,
)
from asyncllm.server.openai.inputs import kept_tokens, prompts_of, truncated
from asyncllm.server.openai.prompt_embeds import prompt_embeds_of
from asyncllm.server.openai.requests import CompletionRequest
from asyncllm.server.openai.responses import CompletionChoice, CompletionLogprobs, CompletionResponse, PromptLogprob
from asyncllm.server.request.arguments import completion_config, label_of, request_options
from asyncllm.server.request.decode import read_request
from asyncllm.server.request.fill_in import filled_in
from asyncllm.server.service import service_of
from asyncllm.server.sse import stream
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.types import Chunk, Response

__all__ = ["completions"]


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue one or several prompts. Choice `prompt * n + k` is the k-th answer to a prompt."""
    service = service_of(request)
    body = await read_request(request, CompletionRequest)
    config = completion_config(body, service.config, service.defaults)
    embeds = await prompt_embeds_of(service, body)
    prompts = prompts_of(body.prompt, service.config, "prompt") if body.prompt or not embeds else []
    inputs: Any = prompts
    if body.suffix:
        if body.echo:
            raise ApiError(
                400, "echo and suffix cannot be combined. Send one of them.", code="invalid_value", param="suffix"
            )
        inputs, config = filled_in(prompts, body.suffix, config, service.engine.tokenizer)
    kept = kept_tokens(body, service.engine.session_len - (config.max_new_tokens or 1))
    if body.add_special_tokens is False or kept is not None:
        add_bos = body.add_special_tokens is not False
        inputs = await service.engine.encode(inputs, do_preprocess=False, add_bos=add_bos, bounded=kept is None)
    if kept is not None:
        inputs = prompts = [truncated(body, ids, kept) for ids in inputs]
    options = request_options(request, body)
    identity = AnswerIdentity("cmpl-", body.model or service.engine.model_name, body.request_id or body.rid)
    generations = []
    prompts = [*([] for _ in embeds), *prompts]
    for index, prompt in enumerate([*embeds, *inputs]):
        generation = service.engine.generate(
            prompt if isinstance(prompt, str) else None,
            config,
            do_preprocess=False,
            input_ids=prompt if isinstance(prompt, list) else None,
            input_embeddings=prompt if index < len(embeds) else None,
            session_id=label_of(request, body.session_id, body.request_id or body.rid),
            stream_response=bool(body.stream),
            adapter_name=service.adapter_of(body.model),
            **options,
        )
        generation.index = index
        generations.append(generation)
    try:
        for generation in generations:
            await generation.start()
            await asyncio.sleep(0)  # so that many prompts do not delay the event loop
        pieces = _Pieces(body, prompts, generations, service.engine.tokenizer)
        if body.stream:
            return await stream(request, service, generations, _CompletionEvents(identity, body, pieces))
        responses = [await generation.response() for generation in generations]
    finally:
        for generation in generations:
            generation.cancel()
    size = sum(pieces.size(index, answer) for index, each in enumerate(responses) for answer in each.choices or (each,))
    return await built_response(service.engine, lambda: _whole(identity, body, pieces, responses), size)


class _Pieces:
    """Adapts the engine's answer to the request: prepends an echoed prompt, and drops the token generated for a request
    that asked for none."""

    def __init__(
        self,
        body: CompletionRequest,
        prompts: Sequence[str | list[int]],
        generations: Sequence[Generation],
        tokenizer: Tokenizer,
    ) -> None:
        self.body = body
        self.prompt_token_ids = [generation.prompt_token_ids for generation in generations]
        self.choices_per_prompt = body.n or 1
        self.generates = (body.max_completion_tokens or body.max_tokens) != 0
        """False if the answer only echoes the prompt."""
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._hidden = frozenset() if body.skip_special_tokens is False else tokenizer.special_token_ids
        self._echoes = [
            prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=False)
            for prompt in (prompts if body.echo else ())
        ]
        self._prompt_logprobs: dict[int, list[dict[int, float] | None]] = {}
        """Log-probabilities of each prompt, which the engine sends with the first choice."""
        self._positions: dict[tuple[int, int], TextPosition] = {}
        """(prompt, choice) that has begun -> the end of its text so far."""

    def take(self, prompt: int, piece: Chunk | Response, choice: int) -> tuple[str, CompletionLogprobs | None]:
        """Return the text and log-probabilities of the next piece of a choice."""
        if piece.prompt_logprobs is not None:
            self._prompt_logprobs[prompt] = piece.prompt_logprobs
        text = piece.text if self.generates else ""
        ids = piece.token_ids if self.generates else []
        entries: list[dict[int, float] | None] = list(piece.logprobs or ()) if self.generates else []
        first = not self.begun(prompt, choice)
        position = self._positions.setdefault((prompt, choice), TextPosition(self._tokenizer))
        echoed = self.prompt_token_ids[prompt] if first and self._echoes else []
        if first and self._echoes:
            text = self._echoes[prompt] + text
            entries = [*self._prompt_logprobs.get(prompt, ()), *entries]
        if self.body.logprobs is None:
            return text, None
        # A text prompt lacks the tokens that the tokenizer puts before it.
        added = self._tokenizer.model.prefix if isinstance(self._prompts[prompt], str) else ()
        before = echoed[: len(added)] if tuple(echoed[: len(added)]) == tuple(added) else []
        positions = [
            *position.pass_over(before, before),
            *position.pass_over(echoed[len(before) :]),
            *position.pass_over(ids, self._hidden),
        ]
        as_ids = self.body.return_tokens_as_token_ids
        return text, completion_logprobs(
            self._tokenizer, [*echoed, *ids], entries, self.body.logprobs, positions, as_ids=as_ids
        )

    def prompt_logprobs(self, piece: Chunk | Response) -> list[dict[int, PromptLogprob] | None] | None:
        """Return the prompt's log-probabilities if they were requested and the piece has them."""
        if self.body.prompt_logprobs is None or piece.prompt_logprobs is None:
            return None
        return prompt_logprobs_of(self._tokenizer, piece.prompt_logprobs, self.body.prompt_logprobs)

    def size(self, prompt: int, piece: Chunk | Response, choice: int | None = None) -> int:
        """Return the number of tokens and log-probabilities in the next piece of a choice."""
        echoed = len(self.prompt_token_ids[prompt]) if self._echoes and not self.begun(prompt, choice) else 0
        tokens = len(piece.token_ids) + max(echoed, len(piece.prompt_logprobs or ()))
        return tokens * (1 + max(self.body.logprobs or 0, self.body.prompt_logprobs or 0))

    def begun(self, prompt: int, choice: int | None) -> bool:
        """Return whether a piece of the choice has been taken."""
        return (prompt, choice) in self._positions


def _whole(
    identity: AnswerIdentity, body: CompletionRequest, pieces: _Pieces, responses: Sequence[Response]
) -> CompletionResponse:
    count = UsageCount()
    choices: list[CompletionChoice] = []
    for prompt, response in enumerate(responses):
        count.add_response(response, prompt)
        for index, answer in enumerate(response.choices or (response,)):
            text, logprobs = pieces.take(prompt, answer, index)
            choice = CompletionChoice(
                index=len(choices), text=text, logprobs=logprobs, finish_reason=answer.finish_reason
            )
            if answer.stop_reason is not None:
                choice.stop_reason = answer.stop_reason
            if (of_prompt := pieces.prompt_logprobs(response)) is not None:
                choice.prompt_logprobs = of_prompt
            if body.return_token_ids:
                choice.token_ids = answer.token_ids if pieces.generates else []
                choice.prompt_token_ids = pieces.prompt_token_ids[prompt]
            choices.append(encoded_alone(choice))
    return CompletionResponse(
        id=identity.id,
        created=identity.created,
        model=identity.model,
        choices=choices,
        usage=count.usage(generated=pieces.generates),
    )


class _CompletionEvents:
    """`text_completion` events: one for each piece of a choice, then one without text that has the finish reason."""

    def __init__(self, identity: AnswerIdentity, body: CompletionRequest, pieces: _Pieces) -> None:
        self._head = identity.head("text_completion")
        self._tail = Tail(body)
        self._body = body
        self._pieces = pieces
        self._count = UsageCount()
        self._plain = pieces.generates and not (
            body.return_token_ids or body.logprobs is not None or self._tail.continuous
        )
        """Whether all events of a choice except its first and last contain only text."""
        self._heads: dict[tuple[int, int], bytes] = {}
        """(prompt, choice) that has begun -> the beginning of its plain events, up to the text."""
        self._plain_end = b',"logprobs":null,"finish_reason":null}' + self._tail.plain

    def chunk(self, chunk: Chunk) -> bytes:
        """Return the events of one chunk."""
        head = self._heads.get((chunk.index, chunk.choice))
        if head is not None and chunk.finish_reason is None:
            return head + encode(chunk.text) + self._plain_end
        pieces = self._pieces
        first = not pieces.begun(chunk.index, chunk.choice)
        self._count.add(chunk)
        tail = self._tail.plain
        if self._tail.continuous:
            tail = self._tail.of(self._count.usage(generated=pieces.generates))
        text, logprobs = pieces.take(chunk.index, chunk, chunk.choice)
        head = b'%b{"index":%d,"text":' % (self._head, chunk.index * pieces.choices_per_prompt + chunk.choice)
        if self._plain:
            self._heads[chunk.index, chunk.choice] = head
        events = b""
        if text or first or chunk.finish_reason is None or not self._plain:
            events += head + encode(text) + b',"logprobs":'
            events += encode(logprobs) if logprobs is not None else b"null"
            events += b',"finish_reason":null'
            if (of_prompt := pieces.prompt_logprobs(chunk)) is not None:
                events += b',"prompt_logprobs":' + encode(of_prompt)
            if self._body.return_token_ids:
                events += b',"token_ids":' + encode(chunk.token_ids if pieces.generates else [])
                if first:
                    events += b',"prompt_token_ids":' + encode(pieces.prompt_token_ids[chunk.index])
            events += b"}" + tail
        if chunk.finish_reason is not None:
            events += head + b'"","logprobs":null,"finish_reason":' + encode(chunk.finish_reason)
            if chunk.stop_reason is not None:
                events += b',"stop_reason":' + encode(chunk.stop_reason)
            events += b"}" + tail
        return events

    def size(self, chunk: Chunk) -> int:
        if (chunk.index, chunk.choice) in self._heads:
            return len(chunk.token_ids)
        return self._pieces.size(chunk.index, chunk, chunk.choice)

    def closing(self) -> bytes:
        """Return the usage, if requested, as an event without choices."""
        if not self._tail.includes_usage:
            return b""
        return self._head + self._tail.of(self._count.usage(generated=self._pieces.generates))
