"""SchedulerCounts: what an engine's scheduler has done since its start."""

from __future__ import annotations

__all__ = ["SchedulerCounts"]


class SchedulerCounts:
    """Totals since start. Written by the scheduler, read by `stats()`."""

    __slots__ = (
        "cached_tokens",
        "decode_tokens",
        "failed_steps",
        "preemptions",
        "prefill_tokens",
        "prompt_tokens",
        "sampled_tokens",
        "steps",
    )

    def __init__(self) -> None:
        self.steps = 0
        self.failed_steps = 0
        """Those that raised, and whose rows ended by it."""
        self.prefill_tokens = 0
        """Tokens computed in prefill rows, recomputed ones included."""
        self.decode_tokens = 0
        self.sampled_tokens = 0
        """Tokens of answers."""
        self.prompt_tokens = 0
        """Known tokens of admitted sequences, computed or found in the prefix cache."""
        self.cached_tokens = 0
        """Those found in the prefix cache."""
        self.preemptions = 0
