"""Turns decides when the engine takes a turn.

The executor's callback takes one as soon as a step is done. Every other event schedules one for the event loop's next
iteration.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable

from asyncllm.engine.loop.inbox import Inbox
from asyncllm.engine.loop.launched_steps import LaunchedSteps

__all__ = ["Turns"]


class Turns:
    """Calls the engine's `turn`, one at a time. Written by its own methods, all of them in the event loop."""

    def __init__(self, inbox: Inbox, steps: LaunchedSteps, turn: Callable[[], None]) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        """Context of all turns, so that a turn does not run in the context of the request that caused it."""
        self._inbox = inbox
        self._steps = steps
        self._turn = turn
        self._due = False
        """Whether a turn is scheduled for the event loop's next iteration."""
        self._in_turn = False
        self.readers_first = False
        """Whether readers have been woken, and have to run before another step is read."""

    def wake(self) -> None:
        """Schedule a turn for the event loop's next iteration."""
        if not self._due:
            self._due = True
            self._event_loop.call_soon(self._take_scheduled, context=self._context)

    def step_done(self) -> None:
        """Take a turn at once, because a step is done. A turn in progress sees the step before it ends."""
        if not self._in_turn:
            self._take()

    def readers_woken(self) -> None:
        """Let the readers that this turn has woken run before another step is read."""
        self.readers_first = True
        self._event_loop.call_soon(self._readers_ran, context=self._context)

    def _take_scheduled(self) -> None:
        self._due = False
        if self._inbox.waits_for_burst(idle=not self._steps):
            self.wake()
        else:
            self._take()

    def _readers_ran(self) -> None:
        self.readers_first = False
        if self._steps.oldest_is_done:
            self._take()

    def _take(self) -> None:
        self._in_turn = True
        try:
            self._turn()
        finally:
            self._in_turn = False
