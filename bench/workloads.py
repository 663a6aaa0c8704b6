"""What every engine is timed on: token ids in and out, so that no tokenizer is measured."""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["Work", "static"]


@dataclass(frozen=True)
class Work:
    """Requests that are all there at the start. Lengths in tokens; every answer runs to its full length."""

    name: str
    prompts: list[list[int]]
    new_tokens: int

    @property
    def num_new(self) -> int:
        return len(self.prompts) * self.new_tokens


def static(batch: int, prompt_len: int, new_tokens: int, vocab_size: int, seed: int = 0) -> Work:
    """`batch` random prompts of one length; named b1, b16, ..."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(64, vocab_size) for _ in range(prompt_len)] for _ in range(batch)]
    return Work(f"b{batch}", prompts, new_tokens)
