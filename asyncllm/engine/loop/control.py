"""Control: commands to the whole model between two steps, such as weight updates, sleep and wake.

    asked ──> launching stops ──> steps in flight are read ──> the executor carries it out ──> launching resumes

While the model sleeps or the engine is paused, no step is launched until everything is awake and the engine resumes.
Meanwhile requests still arrive, are aborted and reach their deadlines.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

import msgspec

from asyncllm.engine.loop.watchdog import Watchdog
from asyncllm.engine.schedule.scheduler import Scheduler
from asyncllm.errors import AsyncLLMError, EngineDead, InvalidParameter, short
from asyncllm.event_loop.retrieve import retrieve
from asyncllm.protocol import (
    Command,
    Executor,
    ResidentPart,
    Sleep,
    UpdateWeights,
    Wake,
)

__all__ = ["PARTS", "Control", "EngineCommand", "Pause", "ResetCache", "Resume", "sleep_of", "update_of", "wake_of"]

PARTS: frozenset[ResidentPart] = frozenset(get_args(ResidentPart))


class ResetCache(msgspec.Struct, frozen=True):
    """Drop all cached keys and values."""


class Pause(msgspec.Struct, frozen=True):
    """Launch no step until `Resume`."""

    drains: bool
    """Whether the open requests are answered first."""


class Resume(msgspec.Struct, frozen=True):
    """End a pause."""


EngineCommand = ResetCache | Pause | Resume
"""A command that concerns the engine alone, so that the executor has no part in it."""


class Control:
    """Carries out commands one at a time, in the order of the calls. Written by the engine's turns, except `_asked`."""

    def __init__(self, executor: Executor, scheduler: Scheduler, wake: Callable[[], None], watchdog: Watchdog) -> None:
        """`wake` schedules a turn of the engine. `watchdog` watches the command under way."""
        self._watchdog = watchdog
        self._executor = executor
        self._scheduler = scheduler
        self._wake = wake
        self._event_loop = asyncio.get_running_loop()
        self._asked: deque[tuple[Command | EngineCommand, asyncio.Future[None]]] = deque()
        """Commands from `ask`, with their callers' futures. Cancelling a future withdraws a command that has not
        begun."""
        self._carried_out: asyncio.Future[None] | None = None
        """Done when the executor has carried out the first command of `_asked`; None before it has begun."""
        self.asleep: frozenset[ResidentPart] = frozenset()
        """Parts of the model that are not on the device."""
        self.sleep_level = 0
        """0 when everything is awake."""
        self.num_updates = 0
        """Weight updates since start."""
        self.paused = False

    @property
    def hold(self) -> bool:
        """Whether no step may be launched."""
        return self._held or bool(self._asked and not self.drains)

    @property
    def drains(self) -> bool:
        """Whether the scheduler's requests are answered, and no new one is begun, for a pause."""
        pauses = bool(self._asked) and isinstance(command := self._asked[0][0], Pause) and command.drains
        return pauses and not self._held and bool(self._scheduler.num_running or self._scheduler.num_waiting)

    @property
    def _held(self) -> bool:
        return self.paused or bool(self.asleep)

    def ask(self, command: Command | EngineCommand) -> asyncio.Future[None]:
        """Queue a command, and return a future that is done when it has been carried out."""
        done: asyncio.Future[None] = self._event_loop.create_future()
        done.add_done_callback(lambda _: self._wake())
        self._asked.append((command, done))
        self._wake()
        return done

    def advance(self, *, quiet: bool) -> None:
        """Begin or finish commands, in a turn of the engine. `quiet`: no step is in flight. Raises the error of a
        command that failed halfway."""
        while self._asked:
            if self._carried_out is None:
                command, done = self._asked[0]
                if done.cancelled():
                    self._asked.popleft()
                    continue
                if quiet and isinstance(command, EngineCommand) and not self.drains:
                    self._finish(*self._asked.popleft(), None)
                    continue
                if quiet and not isinstance(command, EngineCommand):
                    self._carried_out = self._executor.carry_out(command)
                    self._watchdog.watch()
                    self._carried_out.add_done_callback(lambda _: self._wake())
            if self._carried_out is None or not self._carried_out.done():
                return
            error, self._carried_out = self._carried_out.exception(), None
            self._watchdog.rest()
            self._finish(*self._asked.popleft(), error)

    def _finish(
        self, command: Command | EngineCommand, done: asyncio.Future[None], error: BaseException | None
    ) -> None:
        """End a command, and give its caller, if one still waits, the outcome."""
        if error is None:
            self._update_engine(command)
            if not done.done():
                done.set_result(None)
            return
        halfway = not isinstance(error, AsyncLLMError)
        if not done.done():
            done.set_exception(_dead(error) if halfway else error)
        if halfway:
            raise error

    def _update_engine(self, command: Command | EngineCommand) -> None:
        """Update the engine's own state to match the model's."""
        match command:
            case UpdateWeights():
                self.num_updates += 1
                if self.sleep_level == 2:
                    # The weights that sleep level 2 dropped are back on the device.
                    self._awaken(frozenset({"weights"}))
                self._scheduler.reset_cache()
            case Sleep(level):
                still = self.sleep_level if "weights" in self.asleep else 0
                self.asleep, self.sleep_level = PARTS, max(level, still)
                self._scheduler.reset_cache()
            case Wake(parts):
                self._awaken(parts)
            case ResetCache():
                self._scheduler.reset_cache()
            case Pause() | Resume():
                self.paused = isinstance(command, Pause)

    def _awaken(self, parts: frozenset[ResidentPart]) -> None:
        self.asleep -= parts
        if not self.asleep:
            self.sleep_level = 0

    @property
    def under_way(self) -> str:
        """The command being carried out."""
        return "none" if self._carried_out is None else type(self._asked[0][0]).__name__

    async def end(self, error: AsyncLLMError, *, wait: bool) -> None:
        """Refuse the waiting commands with `error`. If `wait`, let the command under way finish, unless that takes too
        long. The engine has ended."""
        carried_out, self._carried_out = self._carried_out, None
        self._watchdog.rest()
        if carried_out is not None and wait:
            await asyncio.wait([carried_out], timeout=self._watchdog.timeout or None)
        if carried_out is not None and not carried_out.done():
            carried_out.add_done_callback(retrieve)
        elif carried_out is not None:
            _, done = self._asked.popleft()
            failure = carried_out.exception()
            if not done.done():
                if failure is None:
                    done.set_result(None)
                else:
                    done.set_exception(failure if isinstance(failure, AsyncLLMError) else _dead(failure))
        while self._asked:
            _, done = self._asked.popleft()
            if not done.done():
                done.set_exception(error)


def _dead(cause: BaseException) -> EngineDead:
    error = EngineDead(f"The engine loop died of {cause!r} while it carried this call out.")
    error.__cause__ = cause
    return error


def update_of(weights: Any) -> UpdateWeights:
    """Return the command for `AsyncEngine.update_weights`. Raises InvalidParameter unless `weights` are pairs of a name
    and a tensor, with each name once."""
    if not isinstance(weights, Iterable):
        raise InvalidParameter(
            f"weights must be a mapping of names to tensors, or pairs of them, not {type(weights).__name__}.", "weights"
        )
    named: dict[str, Any] = {}
    for pair in weights.items() if isinstance(weights, Mapping) else weights:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise InvalidParameter(
                f"weights must be a mapping of names to tensors, or pairs of them, and hold {short(pair)}.", "weights"
            )
        if pair[0] in named:
            raise InvalidParameter(f"weights name {short(pair[0])} twice. Give each tensor once.", "weights")
        named[pair[0]] = pair[1]
    return UpdateWeights(named)


def sleep_of(level: Any) -> Sleep:
    """Return the command for `AsyncEngine.sleep`. Raises InvalidParameter unless `level` is 1 or 2."""
    if type(level) is not int or level not in (1, 2):
        raise InvalidParameter(
            f"level must be 1, which keeps the weights in host memory, or 2, which keeps none (given: {short(level)}).",
            "level",
        )
    return Sleep(level)


def wake_of(tags: Any) -> Wake:
    """Return the command for `AsyncEngine.wake`. Raises InvalidParameter for an unknown part."""
    if tags is None:
        return Wake(PARTS)
    names = list(tags) if isinstance(tags, list | tuple | set | frozenset) else []
    if not names or not all(isinstance(name, str) and name in PARTS for name in names):
        raise InvalidParameter(
            f"tags must be a list of {' and '.join(map(repr, get_args(ResidentPart)))}, or None for both (given: "
            f"{short(tags)}).",
            "tags",
        )
    return Wake(frozenset(names))
