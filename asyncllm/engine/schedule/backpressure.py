"""Backpressure: refuses requests when too many wait, and says when to try again."""

from __future__ import annotations

from collections import deque

from asyncllm.errors import QueueFull

__all__ = ["Backpressure"]

ENDS_REMEMBERED = 64
"""How many recent ends of requests the rate is computed from."""
MIN_RETRY_S = 1.0
MAX_RETRY_S = 120.0
"""Clients give up when told to wait longer."""


class Backpressure:
    """Bounds on waiting requests and tokens. Written by the engine loop as requests end."""

    def __init__(self, max_requests: int = 0, max_tokens: int = 0) -> None:
        """Set the bounds. 0 means none."""
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._ends: deque[float] = deque(maxlen=ENDS_REMEMBERED)
        """Times at which recent requests ended."""
        self.num_refused = 0

    @property
    def bounded(self) -> bool:
        """Whether there is a bound. Without one, waiting requests need not be counted."""
        return bool(self._max_requests or self._max_tokens)

    def request_ended(self, now: float) -> None:
        """Note that a request has ended."""
        self._ends.append(now)

    def has_room(self, part: float, requests: int, tokens: int, new_tokens: int) -> bool:
        """Return whether a user's `part` (0 to 1) of the queue, in which `requests` with `tokens` wait, has space for a
        request of `new_tokens` tokens."""
        return (not self._max_requests or requests < part * self._max_requests) and (
            not self._max_tokens or tokens + new_tokens <= part * self._max_tokens
        )

    def check(self, requests: int, tokens: int, new_tokens: int, now: float) -> None:
        """Raise QueueFull if a queue of `requests` with `tokens` has no space for a request of `new_tokens` tokens. An
        empty queue accepts any request, so that none is refused forever."""
        if not requests:
            return
        excess_requests = requests + 1 - self._max_requests if self._max_requests else 0
        excess_tokens = tokens + new_tokens - self._max_tokens if self._max_tokens else 0
        if excess_requests <= 0 and excess_tokens <= 0:
            return
        self.num_refused += 1
        ends_needed = max(excess_requests, excess_tokens * requests / max(tokens, 1))
        retry_after = self._seconds_until(ends_needed, now)
        raise QueueFull(
            f"The queue is full: {requests} requests with {tokens} tokens wait, and this one brings {new_tokens}; the "
            f"bounds are max_queued_requests={self._max_requests} and max_queued_tokens={self._max_tokens} (0: none). "
            f"Try again in {retry_after:.0f} s.",
            retry_after,
        )

    def _seconds_until(self, ends: float, now: float) -> float:
        """Return how long it takes until `ends` requests have ended, at the recent rate."""
        if not self._ends:
            return MIN_RETRY_S
        seconds_per_end = (now - self._ends[0]) / len(self._ends)
        return min(max(ends * seconds_per_end, MIN_RETRY_S), MAX_RETRY_S)
