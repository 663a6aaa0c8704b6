"""Watchdog: notices that there is work and no step completes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Watchdog"]

GRACE_S = 0.05
"""A timer may go off before the step that completed just now is read; one that is later than this shows that the
event loop itself was held up, which is not the device's doing."""


class Watchdog:
    """States: resting, while there is no work; watching. Written by the engine loop.

    Watching costs one timer, which is set anew when it goes off, and not with each step; resting costs nothing.
    """

    def __init__(self, event_loop: asyncio.AbstractEventLoop, timeout: float, on_stall: Callable[[], None]) -> None:
        """`on_stall` is called once when no step has completed for `timeout` seconds; 0: never."""
        self._event_loop = event_loop
        self._timeout = timeout
        self._on_stall = on_stall
        self._since: float | None = None
        """When the last step completed, or the work began if that was later; None while resting."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def seconds_since_progress(self) -> float:
        """How long there has been work and no step has completed; 0 while resting."""
        return 0.0 if self._since is None else self._event_loop.time() - self._since

    def watch(self) -> None:
        """Begin to watch: there is work."""
        if self._since is None:
            self._since = self._event_loop.time()
            if self._timeout:
                self._look(self._since)

    def step_completed(self) -> None:
        """Note that a step has completed."""
        self._since = self._event_loop.time()

    def rest(self) -> None:
        """Stop watching: there is no work."""
        self._since = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, due: float, suspected: float | None = None) -> None:
        """See whether there was progress; the timer was set for `due`, and `suspected` is the step that was then the
        last one for too long."""
        assert self._since is not None
        now = self._event_loop.time()
        if now > due + GRACE_S:
            due, suspected = now + self._timeout, None
        elif now < self._since + self._timeout:
            due, suspected = self._since + self._timeout, None
        elif self._since != suspected:
            due, suspected = now + GRACE_S, self._since
        else:
            self._timer = None
            self._on_stall()
            return
        self._timer = self._event_loop.call_at(due, self._look, due, suspected)
