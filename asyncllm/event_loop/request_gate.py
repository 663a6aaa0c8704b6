"""RequestGate: how many requests may begin between two turns of the event loop.

Before its first await a request takes some 0.3 ms for its body and prompt. Of a thousand at once the last
would begin before the engine has had its turn with the first: no step on the device, no token to any reader.
Beside threads that hold the interpreter lock a request takes 10 ms, as it gives the lock away to encode its prompt and
waits to get it back; so fewer begin where turns are long.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

__all__ = ["PER_TURN", "RequestGate"]

PER_TURN = 16
"""Some 5 ms of work."""
LONG = 0.01
"""Seconds of a turn: behind a longer one half as many requests may begin, behind a shorter one one more."""


class RequestGate:
    """Lets requests begin in the order in which they come. Used in one event loop."""

    def __init__(self, per_turn: int = PER_TURN) -> None:
        self._per_turn = per_turn
        """Most that may pass in a turn."""
        self._allowed = self._left = per_turn
        """How many may pass in this turn, and how many more."""
        self._begun = 0.0
        """When this turn began, by `time.perf_counter`."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        """One for each request that came too late for it."""
        self._turning = False
        """Whether `_turn` will be called in the loop's next turn."""

    @property
    def in_use(self) -> bool:
        """Whether requests pass in this turn of the event loop or the next."""
        return self._turning

    async def enter(self) -> None:
        """Pass now, or in a later turn of the event loop."""
        loop = asyncio.get_running_loop()
        if not self._turning:
            self._turning = True
            self._begun = time.perf_counter()
            loop.call_soon(self._turn, loop)
        if self._left and time.perf_counter() - self._begun < LONG:
            self._left -= 1
            return
        place = loop.create_future()
        self._waiting.append(place)
        await place

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        now = time.perf_counter()
        was_long, self._begun = now - self._begun > LONG, now
        self._allowed = max(1, self._allowed // 2) if was_long else min(self._per_turn, self._allowed + 1)
        self._left = self._allowed
        while self._left and self._waiting:
            place = self._waiting.popleft()
            if not place.done():  # else its request has left
                place.set_result(None)
                self._left -= 1
        self._turning = self._left < self._allowed
        if self._turning:
            loop.call_soon(self._turn, loop)
