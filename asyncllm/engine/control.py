"""Control: what is asked of the model as a whole, new weights, adapters, sleep and waking up, between two steps.

    asked ──> no step is launched ──> those in flight have been read ──> the executor carries it out ──> what follows

A sleeping model is a change that no step follows until everything is awake again. Requests wait meanwhile: they may
come, be aborted or reach their deadlines as ever.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args

from asyncllm.engine.adapters import AdapterTable
from asyncllm.engine.schedule.scheduler import Scheduler
from asyncllm.errors import AsyncLLMError, InvalidParameter, short
from asyncllm.protocol import (
    Command,
    Executor,
    LoadAdapter,
    ResidentPart,
    Sleep,
    UnloadAdapter,
    UpdateWeights,
    Wake,
)

__all__ = ["PARTS", "Control", "sleep_of", "update_of", "wake_of"]

PARTS: frozenset[ResidentPart] = frozenset(get_args(ResidentPart))


class Control:
    """Commands in the order of the calls, one at a time. Written by the engine's turns, the inbox of `ask` apart."""

    def __init__(
        self, executor: Executor, scheduler: Scheduler, wake: Callable[[], None], adapters: AdapterTable
    ) -> None:
        """`wake` has the engine take a turn."""
        self._executor = executor
        self._scheduler = scheduler
        self._wake = wake
        self._adapters = adapters
        self._event_loop = asyncio.get_running_loop()
        self._asked: deque[tuple[Command, asyncio.Future[None]]] = deque()
        """Inbox of `ask`, with the futures that wait. A cancelled future withdraws what is not begun."""
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
        """Go on, in a turn of the engine; `quiet`: no step is in flight. Raises what left the model halfway."""
        while self._asked:
            if self._carried_out is None:
                command, done = self._asked[0]
                if done.cancelled():
                    self._asked.popleft()
                    self._is_over(command)
                    continue
                if quiet:
                    self._carried_out = self._executor.carry_out(command)
                    self._carried_out.add_done_callback(lambda _: self._wake())
            if self._carried_out is None or not self._carried_out.done():
                return
            error, self._carried_out = self._carried_out.exception(), None
            self._finish(*self._asked.popleft(), error)

    def _finish(self, command: Command, done: asyncio.Future[None], error: BaseException | None) -> None:
        """Tell the caller, if it still waits, how the executor carried the command out."""
        self._is_over(command)
        if error is None:
            self._take_in(command)
            if not done.done():
                done.set_result(None)
            return
        if not done.done():
            done.set_exception(error)
        if not isinstance(error, AsyncLLMError):
            raise error

    def _is_over(self, command: Command) -> None:
        """Free the name of an adapter: also when the call has been cancelled and its command was not."""
        if isinstance(command, LoadAdapter):
            self._adapters.end(command)

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
            case LoadAdapter():
                self._adapters.add(command)
            case UnloadAdapter(number):
                self._scheduler.adapters.forget(number)

    def _awaken(self, parts: frozenset[ResidentPart]) -> None:
        self.asleep -= parts
        if not self.asleep:
            self.sleep_level = 0

    async def end(self, error: AsyncLLMError) -> None:
        """Wait for what the executor is at, and refuse the rest with `error`: the engine has ended."""
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


def update_of(weights: Any) -> UpdateWeights:
    """Return the command. Raises InvalidParameter unless there are pairs of a name and a tensor, and each name once."""
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
    """Return the command. Raises InvalidParameter for a level that is neither 1 nor 2."""
    if type(level) is not int or level not in (1, 2):
        raise InvalidParameter(
            f"level must be 1, which keeps the weights in host memory, or 2, which keeps none (given: {short(level)}).",
            "level",
        )
    return Sleep(level)


def wake_of(tags: Any) -> Wake:
    """Return the command; None: everything. Raises InvalidParameter for an unknown part."""
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
