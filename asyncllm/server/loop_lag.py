"""LoopLag: how late the event loop runs its timers, which is how long everything else in it waits too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

__all__ = ["LoopLag"]

INTERVAL_S = 0.5


class LoopLag:
    """One timer at a time, while it runs. Written by the event loop."""

    def __init__(self, report: Callable[[float], None]) -> None:
        """`report` gets the seconds by which each timer was late."""
        self._report = report
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin in the running event loop."""
        self._due = time.monotonic() + INTERVAL_S
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._went_off)

    def stop(self) -> None:
        """End; nothing is left in the event loop."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _went_off(self) -> None:
        # uvloop rounds to whole milliseconds, so that a timer may be early.
        self._report(max(0.0, time.monotonic() - self._due))
        self.start()
