"""PrefillBudget: how many prompt tokens a step computes."""

from __future__ import annotations

from dataclasses import dataclass

from asyncllm.engine.schedule.sequence import Sequence
from asyncllm.protocol import Limits

__all__ = ["PrefillBudget"]

_MIN_ROUNDED_TILES = 3
"""Steps of fewer tiles are not rounded: one tile less would be much less."""


@dataclass(frozen=True)
class PrefillBudget:
    """Bounds on the prompt tokens of a step."""

    most: int
    """Bound for any step: `max_prefill_token_num`."""
    limits: Limits

    def beside(self, decoding: list[Sequence]) -> int:
        """Return the most prompt tokens of a step in which these sequences decode.

        Streamed answers would pause for a long step. Without any, small budgets only make answers later, as prompts
        then begin and end one after another, and steps have fewer rows.
        """
        whole = self.limits.tokens_beside_decode
        if whole is None or not any(sequence.request.delivery.streaming for sequence in decoding):
            return self.most
        # Prompts progress however many rows decode.
        return min(self.most, max(whole - len(decoding), -(-whole // 4)))

    def whole_tiles(self, chunks: list[tuple[Sequence, int]], num_decode: int) -> list[tuple[Sequence, int]]:
        """Return the chunks, at least one, with the last one cut so that the step's tokens fill whole tiles.

        This is for steps that others wait for, decoding or queued: the cut prompt ends a step later, the others gain.
        """
        tile = self.limits.token_tile
        total = num_decode + sum(length for _, length in chunks)
        excess = total % tile
        if total < _MIN_ROUNDED_TILES * tile or not excess:
            return chunks
        sequence, length = chunks[-1]
        shorter = sequence.uncut(length - excess, length - excess)
        return [*chunks[:-1], (sequence, shorter)] if shorter > 0 else chunks
