"""Log-probabilities of tokens in OpenAI's two formats."""

from __future__ import annotations

from collections.abc import Sequence

from asyncllm.server.responses import ChoiceLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.types import Logprobs

__all__ = ["chat_logprobs", "completion_logprobs"]


def _ranked(entry: dict[int, float], count: int) -> list[tuple[int, float]]:
    """The `count` most likely of a token's entries, most likely first."""
    return sorted(entry.items(), key=lambda item: item[1], reverse=True)[:count]


def chat_logprobs(tokenizer: Tokenizer, logprobs: Logprobs, count: int) -> ChoiceLogprobs:
    """Each entry's chosen token, with the `count` most likely ones."""

    def spelled(token: int) -> tuple[str, list[int]]:
        piece = tokenizer.token_bytes(token)
        return piece.decode("utf-8", "replace"), list(piece)

    content = []
    for entry in logprobs:
        chosen = next(iter(entry))
        text, piece = spelled(chosen)
        top = []
        for token, value in _ranked(entry, count):
            other, other_piece = spelled(token)
            top.append(TopLogprob(token=other, logprob=value, bytes=other_piece))
        content.append(TokenLogprob(token=text, logprob=entry[chosen], bytes=piece, top_logprobs=top))
    return ChoiceLogprobs(content=content)


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[dict[int, float] | None],
    count: int,
    offset: int,
) -> CompletionLogprobs:
    """The tokens with the `count` most likely ones each. `offset`: characters of the text before the first."""
    result = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for token, entry in zip(token_ids, logprobs, strict=True):
        text = tokenizer.token_text(token)
        result.tokens.append(text)
        result.text_offset.append(offset)
        offset += len(text)
        if entry is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
        else:
            result.token_logprobs.append(entry[token])
            result.top_logprobs.append({tokenizer.token_text(id_): value for id_, value in _ranked(entry, count)})
    return result
