"""Oracles: the tokens and hidden states that a fake device computes."""

from __future__ import annotations

import random
import zlib
from array import array
from collections.abc import Callable, Sequence

from asyncllm.protocol import SlotStart

__all__ = ["Oracle", "hash_hidden", "hash_oracle", "script_oracle"]

Oracle = Callable[[list[int], SlotStart], int]
"""(all tokens of the row so far, how its slot started) -> the next token."""


def hash_oracle(vocab_size: int) -> Oracle:
    """Return an oracle whose next token is a hash of the row's whole history, its adapter, and its seed unless sampling
    is greedy."""

    def next_token(history: list[int], start: SlotStart) -> int:
        seed = 0 if start.params.greedy else start.params.seed
        return zlib.crc32(array("q", history).tobytes(), (seed ^ start.adapter) & 0xFFFFFFFF) % vocab_size

    return next_token


def hash_hidden(tokens: Sequence[int], hidden_size: int, first: int = 0) -> list[list[float]]:
    """Return fake hidden states of the tokens from `first` on. Each depends on all tokens up to its own."""
    hidden = []
    key = 0
    for position, token in enumerate(tokens):
        key = zlib.crc32(token.to_bytes(8, "little"), key)
        if position >= first:
            dice = random.Random(key)
            hidden.append([dice.uniform(-1, 1) for _ in range(hidden_size)])
    return hidden


def script_oracle(answer: Callable[[list[int]], Sequence[int]], eos_token_id: int) -> Oracle:
    """Return an oracle that gives `answer(prompt ids)` token by token, then `eos_token_id` forever."""

    def next_token(history: list[int], start: SlotStart) -> int:
        script = answer(history[: start.num_prompt])
        said = len(history) - start.num_prompt
        return script[said] if said < len(script) else eos_token_id

    return next_token
