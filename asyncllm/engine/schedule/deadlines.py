"""Deadlines: how long answers have taken lately, so that a row is not spent on one that cannot be there in time."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection

from asyncllm.engine.schedule.sequence import Request, Sequence
from asyncllm.errors import DeadlineExceeded

__all__ = ["Deadlines"]

REMEMBERED = 64
"""Answers."""
SURE = 0.95
"""Share of them that an expectation covers. Too much costs little, as another takes the row; too little costs the row's
time."""


class Deadlines:
    """What to expect of the next answer. Written by the engine loop, as requests end."""

    def __init__(self) -> None:
        self._first: deque[float] = deque(maxlen=REMEMBERED)
        """Seconds from a row in the batch to the first token."""
        self._following: deque[float] = deque(maxlen=REMEMBERED)
        """Seconds per token after it."""
        self._lengths: deque[float] = deque(maxlen=REMEMBERED)
        """Tokens of an answer that nothing cuts short."""
        self._expected: tuple[float, float, float] | None = None
        """What is expected of each; None: to be found anew."""

    def ended(self, request: Request, error: Exception | None) -> None:
        """Learn from a request that has ended just now: one that is whole, or that its deadline cut short."""
        times, longest = request.times, max(request.sequences, key=lambda sequence: sequence.num_generated)
        cut_short = longest.finish_reason == "abort" or not isinstance(error, DeadlineExceeded | None)
        if cut_short or times.admitted is None or times.prefilled is None or not longest.num_generated:
            return
        first, following = times.prefilled - times.admitted, time.monotonic() - times.prefilled
        self.learn(first, following, longest.num_generated, stopped=longest.finish_reason in ("stop", "tool_calls"))

    def learn(self, first: float, following: float, tokens: int, *, stopped: bool) -> None:
        """An answer has ended with so many tokens, so many seconds after it got its row and after its first token.

        Only one that stopped of its own accord tells how long answers are. Of any other, by its limit or its deadline,
        the whole could have had any length: were it remembered by what it had, short ones alone would count."""
        self._first.append(first)
        if tokens > 1:
            self._following.append(following / (tokens - 1))
        self._lengths.append(tokens if stopped else math.inf)
        self._expected = None

    def _expectation(self) -> tuple[float, float, float]:
        if self._expected is None:
            self._expected = _most(self._first), _most(self._following), _most(self._lengths)
        return self._expected

    def seconds(self, sequence: Sequence) -> float:
        """Return how long a waiting sequence will take once it has its row; 0 while nothing is known."""
        first, following, length = self._expectation()
        tokens = min(sequence.remaining, max(1, length - sequence.num_generated))
        return first + following * max(0, tokens - 1)


def _most(values: Collection[float]) -> float:
    return sorted(values)[int(SURE * len(values))] if values else 0.0
