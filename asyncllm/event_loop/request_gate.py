"""RequestGate: limits the number of requests that begin between two iterations of the event loop.

Before its first await a request takes about 0.3 ms for its body and prompt. If a thousand arrive at once, the last
would begin before the engine could run the first step, and no reader would get a token. Beside threads that hold the
interpreter lock a request takes 10 ms, since it releases the lock to encode its prompt and waits to get it back.
Therefore fewer requests begin when iterations are long.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

__all__ = ["MAX_PER_ITERATION", "RequestGate"]

MAX_PER_ITERATION = 16
"""Default maximum number of requests per iteration: about 5 ms of work."""
LONG_ITERATION_S = 0.01
"""Duration of an iteration in seconds. After a longer one the limit is halved; after a shorter one it grows by one."""


class RequestGate:
    """Lets requests begin in order of arrival. Used in one event loop."""

    def __init__(self, max_per_iteration: int = MAX_PER_ITERATION) -> None:
        self._max_per_iteration = max_per_iteration
        """Maximum number of requests per iteration."""
        self._allowed = self._left = max_per_iteration
        """Number of requests allowed in this iteration, and number left."""
        self._begun = 0.0
        """Start of this iteration, by `time.perf_counter`."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        """One future for each request that waits for a later iteration."""
        self._turn_scheduled = False
        """Whether `_turn` is scheduled for the loop's next iteration."""

    @property
    def in_use(self) -> bool:
        """Whether requests pass in this iteration of the event loop or the next."""
        return self._turn_scheduled

    async def enter(self) -> None:
        """Pass now, or in a later iteration of the event loop."""
        loop = asyncio.get_running_loop()
        if not self._turn_scheduled:
            self._turn_scheduled = True
            self._begun = time.perf_counter()
            loop.call_soon(self._turn, loop)
        if self._left and time.perf_counter() - self._begun < LONG_ITERATION_S:
            self._left -= 1
            return
        place = loop.create_future()
        self._waiting.append(place)
        await place

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        now = time.perf_counter()
        was_long, self._begun = now - self._begun > LONG_ITERATION_S, now
        self._allowed = max(1, self._allowed // 2) if was_long else min(self._max_per_iteration, self._allowed + 1)
        self._left = self._allowed
        while self._left and self._waiting:
            place = self._waiting.popleft()
            if not place.done():  # otherwise its request was cancelled
                place.set_result(None)
                self._left -= 1
        self._turn_scheduled = self._left < self._allowed
        if self._turn_scheduled:
            loop.call_soon(self._turn, loop)
