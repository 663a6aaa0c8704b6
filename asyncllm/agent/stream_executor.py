"""StreamExecutor: launches the steps of a GPU from the event loop's own thread, and waits for them in another.

A launch is a few hundred short calls, each of which gives the interpreter lock away. In a thread of their own they
would queue for it behind whatever else the process runs: 30 such calls take 37 us alone and 5.3 ms beside a thread of
busy Python at the interpreter's default switch interval. In the loop's thread there is nobody to queue behind. Waiting
is one call that sleeps in the driver, so a thread does that, and nothing polls. What computes its steps itself, on a
CPU, runs in that thread instead.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

from asyncllm.agent.contained_runner import BatchRunner, LostSteps
from asyncllm.agent.thread_executor import (
    StepRunner,
    ThreadExecutor,
    attempt,
    dead,
    set_exception,
    set_result,
    set_seen_exception,
)
from asyncllm.batch import Batch, Command, Limits, StepDropped, StepFailed, StepOutput
from asyncllm.errors import AsyncLLMError, EngineClosed

__all__ = ["LaunchedStep", "StepLauncher", "StreamExecutor"]


_Step = tuple[Batch, asyncio.Future[StepOutput]]


class LaunchedStep(Protocol):
    """What a launch gives: `agent.pending_step.PendingStep`, or a fake."""

    @property
    def launched(self) -> bool:
        """False while a part of the step waits for `StepLauncher.resume`."""

    def wait(self) -> None:
        """Block until the device is done with the step."""

    def output(self) -> StepOutput:
        """The results, after `wait`."""


@runtime_checkable
class StepLauncher(Protocol):
    """What a `StreamExecutor` drives: `DeviceAgent`, or a fake. It is used in the loop's thread, but made in the other
    one, which also carries out commands, while no step is in flight."""

    @property
    def limits(self) -> Limits: ...

    @property
    def blocked(self) -> bool:
        """Whether `launch` must wait for `resume`."""

    def launch(self, batch: Batch, /) -> LaunchedStep: ...

    def carry_out(self, command: Command, /) -> None:
        """Raises an AsyncLLMError if everything is as it was."""

    def resume(self) -> LaunchedStep | None:
        """Complete the launch of a step that could not go on before; None if there is none, or it still cannot."""

    def survives(self, error: BaseException, /) -> bool:
        """Whether the launcher is as good as before when `launch`, `resume` or a step's `output` has raised this."""


class StreamExecutor:
    """States: new, running from the end of `start` on, perhaps dead, then closed.

    `load` is called in the thread and makes what runs the steps; `release` is called there when that is gone. Written
    by the loop's thread, except for the launcher, which the thread hands over before `start` returns.
    """

    def __init__(
        self,
        load: Callable[[], BatchRunner | StepLauncher],
        *,
        release: Callable[[], None] | None = None,
    ) -> None:
        self._loaded = _Handover()
        self._thread: ThreadExecutor[Any, Any] = ThreadExecutor(
            partial(_load_runner, load, self._loaded), release=release
        )
        """Runs whole steps, or waits for launched ones."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """Where it was started, once it was."""
        self._running = False
        self._launches = False
        """Whether there is a launcher, perhaps gone by now."""
        self._held: deque[_Step] = deque()
        """Steps that cannot be launched yet."""
        self._unfinished: _Step | None = None
        """The step that is launched in part."""
        self._lost = LostSteps()
        self._waited: deque[asyncio.Future[LaunchedStep]] = deque()
        """Of the launched steps, oldest first: what the thread waits for."""
        self._launch_error: BaseException | None = None
        """Of the first step that the launcher did not survive: nothing is launched after it."""
        self._step_error: BaseException | None = None
        """The same of a launched step: what was launched after it is not read."""

    async def start(self) -> Limits:
        """Load in the thread. Raises what `load` raises, errors that are not asyncllm's as ModelError."""
        limits = await self._thread.start()
        self._loop = asyncio.get_running_loop()
        self._launches = self._loaded.launcher is not None
        self._running = not self._loaded.closed
        return limits

    def submit(self, batch: Batch) -> asyncio.Future[StepOutput]:
        """Launch a step; its future raises StepFailed or StepDropped, or what the launcher did not survive, and then
        every later one EngineDead with that as cause.

        Raises EngineClosed unless started and not closed.
        """
        if self._loop is None or not self._running:
            raise EngineClosed("This executor is not running: it was closed, or never started.")
        if not self._launches:
            return self._thread.submit(batch)
        future: asyncio.Future[StepOutput] = self._loop.create_future()
        if self._launch_error is not None:
            set_seen_exception(future, dead(self._launch_error))
            return future
        self._held.append((batch, future))
        self._launch()
        return future

    def carry_out(self, command: Command) -> asyncio.Future[None]:
        """Carry out a command in the thread, as it takes seconds. Nothing is in flight, nor submitted before its end.

        Raises EngineClosed unless started and not closed.
        """
        if self._loop is None or not self._running:
            raise EngineClosed("This executor is not running: it was closed, or never started.")
        if self._launches and self._loaded.launcher is None:
            future: asyncio.Future[None] = self._loop.create_future()
            set_seen_exception(future, dead(self._launch_error))
            return future
        carried_out = self._thread.call(partial(_carry_out, self._loaded.launcher, command))
        if self._launches:
            carried_out.add_done_callback(self._look_at)
        return carried_out

    async def close(self) -> None:
        """Let the launched steps finish, drop the others, end the thread, release the memory. Any number of times."""
        here = self._loop is asyncio.get_running_loop()
        if self._loop is not None and self._running:
            self._running = False
            closed = EngineClosed("The executor was closed before this step ran.")
            if here:
                self._drop(closed)
            else:
                # Futures belong to their own loop. If that is closed, nobody waits for them any more.
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._drop, closed)
        self._loaded.close()
        try:
            if here and self._waited:
                # The thread drops what it is not waiting for yet when it is told to end.
                await asyncio.wait(self._waited)
        finally:
            await self._thread.close()

    def _launch(self) -> None:
        """Launch all that can be launched.

        An error leads back to the frame of this function, which therefore has no variable for the launcher.
        """
        if self._unfinished is not None and self._loaded.launcher is not None:
            pending, failure = attempt(self._loaded.launcher.resume)
            if pending is None and failure is None:
                return
            step, self._unfinished = self._unfinished, None
            self._go_on(step, pending, failure)
        while self._held and self._loaded.launcher is not None and not self._loaded.launcher.blocked:
            step = self._held.popleft()
            try:
                self._lost.check(step[0])
            except StepDropped as dropped:
                set_seen_exception(step[1], dropped)
                continue
            self._go_on(step, *attempt(self._loaded.launcher.launch, step[0]))

    def _go_on(self, step: _Step, pending: LaunchedStep | None, failure: BaseException | None) -> None:
        """Wait for a step that is launched, or launched in part, or see to it that nothing is built on one that
        failed."""
        batch, future = step
        if pending is None:
            assert failure is not None
            if self._survives(failure):
                self._lost.add(batch)
                set_exception(future, _failed(failure))
            else:
                self._die(future, failure)
        elif pending.launched:
            self._watch(pending, future)
        else:
            self._unfinished = step

    def _watch(self, pending: LaunchedStep, future: asyncio.Future[StepOutput]) -> None:
        waited = self._thread.submit(pending)
        self._waited.append(waited)
        waited.add_done_callback(partial(self._read, future))

    def _read(self, future: asyncio.Future[StepOutput], waited: asyncio.Future[LaunchedStep]) -> None:
        """The device is done with the oldest launched step."""
        self._waited.popleft()
        error = waited.exception()
        if isinstance(error, EngineClosed):
            # Dropped by the thread, since `close` was cancelled.
            set_seen_exception(future, error)
            return
        if self._step_error is not None:
            set_seen_exception(future, dead(self._step_error))
            return
        arrived = error is None
        output: StepOutput | None = None
        if arrived:
            output, error = attempt(waited.result().output)
        # An error leads back to this frame, and what was waited for to the model.
        del waited
        if error is None:
            set_result(future, output)
        elif arrived and self._survives(error):
            set_exception(future, _failed(error))
        else:
            self._step_error = error
            self._die(future, error)
            return
        self._launch()

    def _survives(self, error: BaseException) -> bool:
        return self._loaded.launcher is not None and self._loaded.launcher.survives(error)

    def _die(self, future: asyncio.Future[Any], error: BaseException) -> None:
        """No step is launched after this, be it a step's error or that of a command that failed halfway."""
        set_exception(future, error)
        if self._launch_error is None:
            self._launch_error = error
            self._loaded.close()
            self._drop(dead(error))

    def _look_at(self, carried_out: asyncio.Future[None]) -> None:
        """The launcher has carried out a command, or has failed in the midst of it."""
        error = None if carried_out.cancelled() else carried_out.exception()
        if error is not None and not isinstance(error, AsyncLLMError):
            self._die(carried_out, error)

    def _drop(self, error: BaseException) -> None:
        """Answer the steps that are not launched."""
        if self._unfinished is not None:
            set_seen_exception(self._unfinished[1], error)
            self._unfinished = None
        while self._held:
            set_seen_exception(self._held.popleft()[1], error)


def _failed(cause: BaseException) -> StepFailed:
    error = StepFailed("A step failed; the cause is chained.")
    error.__cause__ = cause
    return error


def _carry_out(launcher: StepLauncher | None, command: Command, runner: Any) -> None:
    """In the thread: by what computes the steps there if nothing launches them."""
    (launcher if launcher is not None else runner).carry_out(command)


class _Handover:
    """The launcher, on its way from the thread that makes it to the loop's. Either may find that it is too late."""

    def __init__(self) -> None:
        self.launcher: StepLauncher | None = None
        """None before it is made, and once it may not be used any more."""
        self.closed = False

    def put(self, launcher: StepLauncher) -> None:
        self.launcher = launcher
        # In this order, as `close` may come in between.
        if self.closed:
            self.launcher = None

    def close(self) -> None:
        self.closed = True
        self.launcher = None


class _Waiter:
    """The thread's side: waits for one step after the other. It does not know the launcher, which may be gone."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def step(self, pending: LaunchedStep) -> LaunchedStep:
        pending.wait()
        return pending


def _load_runner(load: Callable[[], BatchRunner | StepLauncher], loaded: _Handover) -> StepRunner[Any, Any]:
    """What the thread drives."""
    made = load()
    if isinstance(made, StepLauncher):
        loaded.put(made)
        return _Waiter(made.limits)
    return made
