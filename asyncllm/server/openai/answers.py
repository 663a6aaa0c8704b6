"""Parts shared by the answers of chat and plain completions: ids, event templates, usage, and log-probabilities in
OpenAI's two formats.

The part that all chunks of an answer share is encoded once, so that a token costs one string.
"""

from __future__ import annotations

import codecs
import json
import time
import uuid
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, TypeVar

from asyncllm.server.http.responses import encode
from asyncllm.server.openai.requests import OpenAIFields
from asyncllm.server.openai.responses import (
    ChoiceLogprobs,
    CompletionLogprobs,
    CompletionTokensDetails,
    PromptLogprob,
    PromptTokensDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.types import Chunk, Logprobs, Response, ToolCall, ToolCallPiece

__all__ = [
    "AnswerIdentity",
    "Tail",
    "TextPosition",
    "UsageCount",
    "arguments_of",
    "chat_logprobs",
    "completion_logprobs",
    "in_order",
    "prompt_logprobs_of",
    "ranked",
    "size_of",
]

Call = TypeVar("Call", ToolCall, ToolCallPiece)


class AnswerIdentity:
    """The id, time and model of the answer to a request."""

    def __init__(self, prefix: str, model: str, request_id: str | None) -> None:
        self.id = prefix + (request_id or uuid.uuid4().hex)
        self.created = int(time.time())
        """Seconds since 1970."""
        self.model = model

    def head(self, kind: str) -> bytes:
        """Return the beginning of every event of a stream, up to the list of choices."""
        fields = encode({"id": self.id, "object": kind, "created": self.created, "model": self.model})
        return b"data: " + fields[:-1] + b',"choices":['


class Tail:
    """The end of every event, with the usage if `stream_options` asks for it."""

    def __init__(self, body: OpenAIFields) -> None:
        options = body.stream_options
        self.includes_usage = bool(options and options.include_usage)
        self.continuous = self.includes_usage and bool(options and options.continuous_usage_stats)
        self.plain = b'],"usage":null}\n\n' if self.includes_usage else b"]}\n\n"

    def of(self, usage: Usage) -> bytes:
        """Return the end of an event that carries the usage."""
        return b'],"usage":' + encode(usage) + b"}\n\n"


class UsageCount:
    """The tokens that a call has used, summed over its prompts and choices.

    It takes either every chunk or whole responses. A prompt counts once, however many answers it has.
    """

    def __init__(self) -> None:
        self._prompts: dict[int, Chunk | Response] = {}
        """Prompt -> a chunk of one of its answers, which has the prompt's length."""
        self._generated: dict[tuple[int, int], int] = {}
        """(prompt, choice) -> generated tokens."""
        self._reasoning: dict[tuple[int, int], int] = {}
        """(prompt, choice) -> reasoning tokens among them, if any."""

    def begin(self, chunk: Chunk) -> None:
        """Count the prompt of a choice's first chunk, before any of its tokens."""
        self._prompts[chunk.index] = chunk

    def add(self, chunk: Chunk) -> None:
        """Count a chunk. The newest chunk of a choice holds the choice's total."""
        self.begin(chunk)
        self._generated[chunk.index, chunk.choice] = chunk.generate_token_len
        if chunk.reasoning_token_len:
            self._reasoning[chunk.index, chunk.choice] = chunk.reasoning_token_len

    def add_response(self, response: Response, prompt: int) -> None:
        """Count a whole answer with all of its choices."""
        self._prompts[prompt] = response
        for choice, answer in enumerate(response.choices or (response,)):
            self._generated[prompt, choice] = answer.generate_token_len
            if answer.reasoning_token_len:
                self._reasoning[prompt, choice] = answer.reasoning_token_len

    def usage(self, *, generated: bool = True) -> Usage:
        """Return the totals so far. `generated=False` leaves out the token that was computed for an echo."""
        prompts = self._prompts.values()
        prompt = sum(piece.history_token_len + piece.input_token_len for piece in prompts)
        completion = sum(self._generated.values()) if generated else 0
        usage = Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(piece.cached_token_len for piece in prompts)),
        )
        if images := sum(piece.num_images for piece in prompts):
            usage.prompt_tokens_details.images = images
            usage.prompt_tokens_details.image_tokens = sum(piece.image_token_len for piece in prompts)
        if self._reasoning:
            usage.completion_tokens_details = CompletionTokensDetails(reasoning_tokens=sum(self._reasoning.values()))
        return usage


def size_of(piece: Chunk | Response) -> int:
    """Return the number of tokens and log-probabilities in a piece of an answer."""
    listed = (piece.logprobs, piece.prompt_logprobs)
    # All entries of a list have about the same size.
    return len(piece.token_ids) + sum(len(each) * (1 + len(each[-1] or ())) for each in listed if each)


def in_order(text: str, start: int, calls: Sequence[Call]) -> Iterator[str | Call]:
    """Yield a text, in parts, and the calls, as the model wrote them. `start`: position of `text` in the answer's."""
    for call in calls:
        if call.text_position > start:
            before = call.text_position - start
            yield text[:before]
            text, start = text[before:], call.text_position
        yield call
    if text:
        yield text


def arguments_of(text: str) -> dict[str, Any]:
    """Return the arguments of a call as an object. Truncated text, or text that is not a JSON object, goes under one
    key."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": text}


def ranked(entry: dict[int, float], count: int) -> list[tuple[int, float]]:
    """Return the `count` most likely of a token's entries, most likely first."""
    return sorted(entry.items(), key=lambda item: item[1], reverse=True)[:count]


def spelled_as(tokenizer: Tokenizer, *, as_ids: bool | None) -> Callable[[int], str]:
    """Return the function that writes a token in lists of log-probabilities: as its text, or as vLLM's `token_id:N`,
    which is unique."""
    return (lambda token: f"token_id:{token}") if as_ids else tokenizer.token_text


def prompt_logprobs_of(
    tokenizer: Tokenizer, entries: Sequence[dict[int, float] | None], count: int
) -> list[dict[int, PromptLogprob] | None]:
    """Return a prompt's log-probabilities in vLLM's format. The rank of a token beyond the `count` most likely is
    unknown."""

    def shown(entry: dict[int, float]) -> dict[int, PromptLogprob]:
        chosen = next(iter(entry))
        ranks = {token: rank for rank, (token, _) in enumerate(ranked(entry, count), 1)}
        if len(entry) > count:
            ranks.pop(chosen, None)
        return {
            token: PromptLogprob(logprob=value, rank=ranks.get(token), decoded_token=tokenizer.token_text(token))
            for token, value in entry.items()
        }

    return [None if entry is None else shown(entry) for entry in entries]


def chat_logprobs(
    tokenizer: Tokenizer, logprobs: Logprobs, count: int, *, as_ids: bool | None = None
) -> ChoiceLogprobs:
    """Return each generated token with its `count` most likely alternatives. `as_ids`: see `spelled_as`."""

    def spelled(token: int) -> tuple[str, list[int]]:
        piece = tokenizer.token_bytes(token)
        return f"token_id:{token}" if as_ids else piece.decode("utf-8", "replace"), list(piece)

    content = []
    for entry in logprobs:
        chosen = next(iter(entry))
        text, piece = spelled(chosen)
        top = []
        for token, value in ranked(entry, count):
            other, other_piece = spelled(token)
            top.append(TopLogprob(token=other, logprob=value, bytes=other_piece))
        content.append(TokenLogprob(token=text, logprob=entry[chosen], bytes=piece, top_logprobs=top))
    return ChoiceLogprobs(content=content)


class TextPosition:
    """The position of the next token in a choice's text, in characters. All parts of a character have its position."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._position = 0

    def pass_over(self, token_ids: Sequence[int], hidden: Container[int] = ()) -> list[int]:
        """Return the position of each token, and move behind them. `hidden`: tokens that the text leaves out."""
        positions = []
        for token in token_ids:
            positions.append(self._position)
            if token not in hidden:
                self._position += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return positions


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[dict[int, float] | None],
    count: int,
    positions: list[int],
    *,
    as_ids: bool | None = None,
) -> CompletionLogprobs:
    """Return the tokens, each with the `count` most likely ones and itself. `positions`: of the tokens in the text.
    `as_ids`: see `spelled_as`."""
    spelled = spelled_as(tokenizer, as_ids=as_ids)
    result = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=positions)
    for token, entry in zip(token_ids, logprobs, strict=True):
        text = spelled(token)
        result.tokens.append(text)
        if entry is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
        else:
            result.token_logprobs.append(entry[token])
            top = {spelled(id_): value for id_, value in ranked(entry, count)}
            # As in OpenAI's API, the chosen token is always among them.
            top.setdefault(text, entry[token])
            result.top_logprobs.append(top)
    return result
