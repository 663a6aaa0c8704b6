"""PrefillBudget: how many prompt tokens a step takes in."""

from __future__ import annotations

from dataclasses import dataclass

from asyncllm.batch import Limits
from asyncllm.engine.sequence import Sequence

__all__ = ["PrefillBudget"]

_MIN_ROUNDED_TILES = 3
"""Steps of fewer tiles are never cut: one tile less would be much less."""


@dataclass(frozen=True)
class PrefillBudget:
    """The bounds of one engine. All count tokens."""

    most: int
    """Of any step: `max_prefill_token_num`."""
    limits: Limits

    def beside(self, num_decode: int) -> int:
        """Most prompt tokens of a step with so many decode rows, each of which waits for it with its next token."""
        if not num_decode or self.limits.tokens_beside_decode is None:
            return self.most
        whole = self.limits.tokens_beside_decode
        # However many rows there are, prompts get on.
        return min(self.most, max(whole - num_decode, -(-whole // 4)))

    def whole_tiles(self, chunks: list[tuple[Sequence, int]], num_decode: int) -> list[tuple[Sequence, int]]:
        """The chunks without their last tokens, if then the tokens of the step come in whole tiles. Nobody loses by it
        who would not wait anyway, as long as prompts wait for a row, so that the device is busy throughout."""
        tile = self.limits.token_tile
        total = num_decode + sum(length for _, length in chunks)
        excess = total % tile
        if total < _MIN_ROUNDED_TILES * tile or not excess:
            return chunks
        sequence, length = chunks[-1]
        return [*chunks[:-1], (sequence, length - excess)] if length > excess else chunks
