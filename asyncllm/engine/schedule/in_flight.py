"""StepInFlight: what the scheduler remembers of a step until it has been read."""

from __future__ import annotations

from asyncllm.engine.schedule.sequence import Sequence, SequenceState
from asyncllm.protocol import PrefillRow, SwapPlan

__all__ = ["StepInFlight"]


class StepInFlight:
    """A submitted step that has not been read. Written once, when it is scheduled."""

    __slots__ = ("prefill", "sampled", "step", "swaps")

    def __init__(
        self, step: int, sampled: list[Sequence], prefill: list[tuple[Sequence, PrefillRow]], swaps: SwapPlan
    ) -> None:
        self.step = step
        self.sampled = sampled
        """Sequences that sample in this step, in batch order."""
        self.prefill = prefill
        self.swaps = swaps

    def take_back_tokens(self) -> None:
        """The step gives none."""
        for sequence in self.sampled:
            sequence.pending -= 1
            if sequence.ahead:
                sequence.ahead -= 1
            else:
                sequence.remaining += 1

    def live_rows(self) -> list[Sequence]:
        """Return the sequences with a row in this step that have not ended since."""
        rows = dict.fromkeys([*self.sampled, *(sequence for sequence, _ in self.prefill)])
        return [sequence for sequence in rows if sequence.state is not SequenceState.FINISHED]
