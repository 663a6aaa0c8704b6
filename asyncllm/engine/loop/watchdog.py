"""Watchdog: notices that there is work but no step completes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Watchdog"]

GRACE_S = 0.05
"""A timer may go off just before a completed step is read. A timer late by more than this shows that the event loop
itself was blocked, not the device."""


class Watchdog:
    """States: resting while there is no work; watching. Written by the engine loop.

    Watching costs one timer, which is renewed when it goes off and not at each step. Resting costs nothing.
    """

    def __init__(self, event_loop: asyncio.AbstractEventLoop, timeout: float, on_stall: Callable[[], None]) -> None:
        """`on_stall` is called once when no step has completed for `timeout` seconds; never if `timeout` is 0."""
        self._event_loop = event_loop
        self.timeout = timeout
        self._on_stall = on_stall
        self._since: float | None = None
        """When the last step completed or work began, whichever is later; None while resting."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def seconds_since_progress(self) -> float:
        """Seconds of work in which no step has completed; 0 while resting."""
        return 0.0 if self._since is None else self._event_loop.time() - self._since

    def watch(self) -> None:
        """Begin to watch: there is work."""
        if self._since is None:
            self._since = self._event_loop.time()
            if self.timeout:
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
        """Check for progress when the timer, set for `due`, goes off. `suspected`: the value of `_since` that the
        previous check found too old, if it did."""
        assert self._since is not None
        now = self._event_loop.time()
        if now > due + GRACE_S:
            due, suspected = now + self.timeout, None
        elif now < self._since + self.timeout:
            due, suspected = self._since + self.timeout, None
        elif self._since != suspected:
            due, suspected = now + GRACE_S, self._since
        else:
            self._timer = None
            self._on_stall()
            return
        self._timer = self._event_loop.call_at(due, self._look, due, suspected)
