"""Tally: the tokens that a call has used, summed over its prompts and choices."""

from __future__ import annotations

from asyncllm.server.responses import PromptTokensDetails, Usage
from asyncllm.types import Chunk, Response

__all__ = ["Tally"]


class Tally:
    """Fed with every chunk, or with whole responses; a prompt counts once, whatever its number of answers."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        """By prompt: its tokens, and those of them that were cached."""
        self._generated: dict[tuple[int, int], int] = {}
        """By prompt and choice."""

    def add(self, chunk: Chunk) -> None:
        """Take in a chunk; the newest of a choice holds its sum."""
        self._prompts[chunk.index] = (chunk.history_token_len + chunk.input_token_len, chunk.cached_token_len)
        self._generated[chunk.index, chunk.choice] = chunk.generate_token_len

    def add_response(self, response: Response, prompt: int) -> None:
        """Take in a whole answer with all of its choices."""
        self._prompts[prompt] = (response.history_token_len + response.input_token_len, response.cached_token_len)
        for choice, answer in enumerate(response.choices or (response,)):
            self._generated[prompt, choice] = answer.generate_token_len

    def usage(self, *, generated: bool = True) -> Usage:
        """The sums so far. `generated=False`: what was computed for an echo is not the caller's."""
        prompt = sum(tokens for tokens, _ in self._prompts.values())
        completion = sum(self._generated.values()) if generated else 0
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=sum(cached for _, cached in self._prompts.values())
            ),
        )
