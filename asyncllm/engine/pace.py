"""Pace: how long answers have taken lately, so that a row is not spent on one that cannot be there in time."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import TypeVar

from asyncllm.engine.sequence import Sequence

__all__ = ["Pace"]

REMEMBERED = 64
"""Answers."""
SURE = 0.95
"""Share of them that an expectation covers. Too much costs little, as another takes the row; too little costs the row's
time."""

Number = TypeVar("Number", int, float)


class Pace:
    """What to expect of the next answer. Written by the engine loop, as requests end."""

    def __init__(self) -> None:
        self._first: deque[float] = deque(maxlen=REMEMBERED)
        """Seconds from a row in the batch to the first token."""
        self._following: deque[float] = deque(maxlen=REMEMBERED)
        """Seconds per token after it."""
        self._lengths: deque[int] = deque(maxlen=REMEMBERED)
        """Tokens of an answer."""
        self._expected: tuple[float, float, int] | None = None
        """What is expected of each; None: to be found anew."""

    def learn(self, first: float, following: float, tokens: int, length: int | None) -> None:
        """An answer has ended with so many tokens, so many seconds after it got its row and after its first token.

        `length`: what to expect of others, which is the most that it could have had if its deadline cut it short, or
        else only short answers would be remembered; None: nothing, as its reader left."""
        self._first.append(first)
        if tokens > 1:
            self._following.append(following / (tokens - 1))
        if length is not None:
            self._lengths.append(length)
        self._expected = None

    def _expectation(self) -> tuple[float, float, int]:
        if self._expected is None:
            self._expected = _most(self._first, 0.0), _most(self._following, 0.0), _most(self._lengths, 0)
        return self._expected

    def seconds(self, sequence: Sequence) -> float:
        """How long a waiting sequence will take once it has its row; 0 while nothing is known."""
        first, following, length = self._expectation()
        return first + following * (min(sequence.remaining, max(1, length - sequence.num_generated)) - 1)


def _most(values: Collection[Number], default: Number) -> Number:
    return sorted(values)[int(SURE * len(values))] if values else default
