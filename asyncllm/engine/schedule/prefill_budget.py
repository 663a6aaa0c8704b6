"""PrefillBudget: how many prompt tokens a step takes in."""

from __future__ import annotations

from dataclasses import dataclass

from asyncllm.engine.schedule.sequence import Sequence
from asyncllm.protocol import Limits

__all__ = ["PrefillBudget"]

_MIN_ROUNDED_TILES = 3
"""Steps of fewer tiles are never cut: one tile less would be much less."""


@dataclass(frozen=True)
class PrefillBudget:
    """The bounds of one engine. All count tokens."""

    most: int
    """Of any step: `max_prefill_token_num`."""
    limits: Limits

    def beside(self, decoding: list[Sequence]) -> int:
        """Most prompt tokens of a step in which these decode. A stream among them would pause for a long one. Whole
        answers alone are there later by short ones: they begin and end one after another, and steps have fewer rows."""
        whole = self.limits.tokens_beside_decode
        if whole is None or not any(sequence.request.delivery.streaming for sequence in decoding):
            return self.most
        # However many rows there are, prompts get on.
        return min(self.most, max(whole - len(decoding), -(-whole // 4)))

    def whole_tiles(self, chunks: list[tuple[Sequence, int]], num_decode: int) -> list[tuple[Sequence, int]]:
        """Return the chunks, at least one, cut at their end so that the step's tokens come in whole tiles. For a step
        that others wait for, decoding or queued: the prompt that is cut ends a step later, theirs come sooner."""
        tile = self.limits.token_tile
        total = num_decode + sum(length for _, length in chunks)
        excess = total % tile
        if total < _MIN_ROUNDED_TILES * tile or not excess:
            return chunks
        sequence, length = chunks[-1]
        shorter = sequence.uncut(length - excess, length - excess)
        return [*chunks[:-1], (sequence, shorter)] if shorter > 0 else chunks
