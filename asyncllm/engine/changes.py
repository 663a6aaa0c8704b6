"""Changes: what is asked of the model as a whole, new weights, sleep and waking up, between two steps.

    asked ──> no step is launched ──> those in flight have been read ──> the executor carries it out ──> KV is forgotten

A sleeping model is a change that no step follows until everything is awake again. Requests wait meanwhile: they may
come, be aborted or reach their deadlines as ever.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from asyncllm.batch import Command, Executor, ResidentPart, Sleep, UpdateWeights, Wake
from asyncllm.engine.commands import PARTS
from asyncllm.engine.scheduler import Scheduler
from asyncllm.errors import AsyncLLMError

__all__ = ["Changes"]


class Changes:
    """Commands in the order of the calls, one at a time. Written by the engine task, except for the inbox of `ask`."""

    def __init__(self, executor: Executor, scheduler: Scheduler, wake: Callable[[], None]) -> None:
        """`wake` gives the engine task a turn."""
        self._executor = executor
        self._scheduler = scheduler
        self._wake = wake
        self._event_loop = asyncio.get_running_loop()
        self._asked: deque[tuple[Command, asyncio.Future[None]]] = deque()
        """Inbox of `ask`, and whom to tell. A cancelled future withdraws what is not begun."""
        self._carried_out: asyncio.Future[None] | None = None
        """When the executor has carried out the head of `_asked`; None: it has not begun."""
        self.asleep: frozenset[ResidentPart] = frozenset()
        """What is not on the device."""
        self.sleep_level = 0
        """0 when everything is awake."""
        self.num_updates = 0
        """Weight updates since start."""

    @property
    def hold(self) -> bool:
        """Whether no step may be launched."""
        return bool(self._asked or self.asleep)

    def ask(self, command: Command) -> asyncio.Future[None]:
        """Queue a command; the future ends with it."""
        done: asyncio.Future[None] = self._event_loop.create_future()
        done.add_done_callback(lambda _: self._wake())
        self._asked.append((command, done))
        self._wake()
        return done

    def advance(self, *, quiet: bool) -> None:
        """A turn of the engine task; `quiet`: no step is in flight. Raises what left the model halfway."""
        while self._asked:
            if self._carried_out is None:
                command, done = self._asked[0]
                if done.cancelled():
                    self._asked.popleft()
                    continue
                if quiet:
                    self._carried_out = self._executor.carry_out(command)
                    self._carried_out.add_done_callback(lambda _: self._wake())
            if self._carried_out is None or not self._carried_out.done():
                return
            error, self._carried_out = self._carried_out.exception(), None
            self._finish(*self._asked.popleft(), error)

    def _finish(self, command: Command, done: asyncio.Future[None], error: BaseException | None) -> None:
        """The executor is through with the command; tell who asked, if he still waits."""
        if error is None:
            self._take_in(command)
            if not done.done():
                done.set_result(None)
            return
        if not done.done():
            done.set_exception(error)
        if not isinstance(error, AsyncLLMError):
            raise error

    def _take_in(self, command: Command) -> None:
        match command:
            case UpdateWeights():
                self.num_updates += 1
                if self.sleep_level == 2:
                    # Lost weights have come back by this, and lie on the device.
                    self._awaken(frozenset({"weights"}))
                self._scheduler.forget()
            case Sleep(level):
                still = self.sleep_level if "weights" in self.asleep else 0
                self.asleep, self.sleep_level = PARTS, max(level, still)
                self._scheduler.forget()
            case Wake(parts):
                self._awaken(parts)

    def _awaken(self, parts: frozenset[ResidentPart]) -> None:
        self.asleep -= parts
        if not self.asleep:
            self.sleep_level = 0

    async def end(self, error: AsyncLLMError) -> None:
        """The engine task ends: wait for what the executor is at, and refuse the rest with `error`."""
        if self._carried_out is not None:
            await asyncio.wait([self._carried_out])
            _, done = self._asked.popleft()
            failure = self._carried_out.exception()
            if not done.done():
                if failure is None:
                    done.set_result(None)
                else:
                    done.set_exception(failure)
        while self._asked:
            _, done = self._asked.popleft()
            if not done.done():
                done.set_exception(error)
