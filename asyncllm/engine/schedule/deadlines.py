"""Deadlines: predicts how long answers take from recent ones, so that no row is spent on an answer that would be
late."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection

from asyncllm.engine.schedule.sequence import Request, Sequence
from asyncllm.errors import DeadlineExceeded

__all__ = ["Deadlines"]

REMEMBERED = 64
"""Number of recent answers that predictions are based on."""
QUANTILE = 0.95
"""Quantile of these answers that is predicted. A prediction that is too high costs little, because another request
takes the row; one that is too low wastes the row's time."""


class Deadlines:
    """Predicted times and lengths of answers. Written by the engine loop as requests end."""

    def __init__(self) -> None:
        self._first: deque[float] = deque(maxlen=REMEMBERED)
        """Seconds from admission to the first token."""
        self._following: deque[float] = deque(maxlen=REMEMBERED)
        """Seconds per token after the first."""
        self._lengths: deque[float] = deque(maxlen=REMEMBERED)
        """Lengths in tokens of answers that ended by themselves."""
        self._expected: tuple[float, float, float] | None = None
        """Prediction for each of the three; None after a change."""

    def ended(self, request: Request, error: Exception | None) -> None:
        """Learn from a request that has just ended, complete or at its deadline."""
        times, longest = request.times, max(request.sequences, key=lambda sequence: sequence.num_generated)
        cut_short = longest.finish_reason == "abort" or not isinstance(error, DeadlineExceeded | None)
        if cut_short or times.admitted is None or times.prefilled is None or not longest.num_generated:
            return
        first, following = times.prefilled - times.admitted, time.monotonic() - times.prefilled
        self.learn(first, following, longest.num_generated, stopped=longest.finish_reason in ("stop", "tool_calls"))

    def learn(self, first: float, following: float, tokens: int, *, stopped: bool) -> None:
        """Learn from an answer: `first` seconds from admission to its first token, then `following` seconds for the
        rest.

        Only an answer that `stopped` by itself shows how long answers are. An answer cut by its limit or deadline could
        have become arbitrarily long, and counts as infinite."""
        self._first.append(first)
        if tokens > 1:
            self._following.append(following / (tokens - 1))
        self._lengths.append(tokens if stopped else math.inf)
        self._expected = None

    def seconds(self, sequence: Sequence) -> float:
        """Return how many seconds a waiting sequence is predicted to take once it has a row; 0 without a prediction."""
        if self._expected is None:
            self._expected = _quantile(self._first), _quantile(self._following), _quantile(self._lengths)
        first, following, length = self._expected
        tokens = min(sequence.remaining, max(1, length - sequence.num_generated))
        return first + following * max(0, tokens - 1)


def _quantile(values: Collection[float]) -> float:
    return sorted(values)[int(QUANTILE * len(values))] if values else 0.0
