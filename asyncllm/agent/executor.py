"""StepExecutor: runs the steps of an agent for the event loop, with the help of one thread.

On a GPU a launch is a few hundred short calls, each of which gives the interpreter lock away. In a thread of their own
they would queue for it behind whatever else the process runs: 30 such calls take 37 us alone and 5.3 ms beside a thread
of busy Python at the interpreter's default switch interval. So they are made in the loop's thread, where there is
nothing to queue behind. Waiting is one call that sleeps in the driver, so the thread does that, and nothing polls. On a
CPU a launch computes the step, so the thread does all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from asyncllm.agent.device.context import context_meanwhile
from asyncllm.agent.step_thread import StepThread, attempt, dead, set_exception, set_result, set_seen_exception
from asyncllm.config import EngineConfig
from asyncllm.errors import AsyncLLMError, EngineClosed
from asyncllm.protocol import Batch, Command, Executor, Limits, StartTimes, StepDropped, StepFailed, StepOutput

if TYPE_CHECKING:
    from asyncllm.distributed.group import Meeting, TorchGroup

__all__ = ["Agent", "LaunchedStep", "LostSteps", "StepExecutor", "compute", "open_executor"]

_Step = tuple[Batch, asyncio.Future[StepOutput]]


class LaunchedStep(Protocol):
    """What a launch gives: `agent.pending_step.PendingStep`, or a fake."""

    @property
    def launched(self) -> bool:
        """False while a part of the step waits for `Agent.resume`."""

    def wait(self) -> None:
        """Block until the device is done with the step."""

    def output(self) -> StepOutput:
        """Return the results, after `wait`."""


class Agent(Protocol):
    """What a `StepExecutor` drives: `ModelAgent`, or a fake.

    It is made in the executor's thread, which also carries out commands, while no step is in flight. One that runs
    ahead is used in the loop's thread, any other one in the executor's.
    """

    @property
    def limits(self) -> Limits: ...

    @property
    def runs_ahead(self) -> bool:
        """Whether `launch` returns before the step is computed."""

    @property
    def blocked(self) -> bool:
        """Whether `launch` must wait for `resume` or for a step to be read; never while nothing is unread."""

    def launch(self, batch: Batch, /) -> LaunchedStep: ...

    def carry_out(self, command: Command, /) -> None:
        """Carry out a command. Raises an AsyncLLMError if everything is as it was."""

    def resume(self) -> LaunchedStep | None:
        """Complete the launch of a step that could not go on before; None if there is none, or it still cannot."""

    def survives(self, error: BaseException, /) -> bool:
        """Return whether the agent is as good as before when `launch`, `resume` or a step's `output` has raised
        this."""


class LostSteps:
    """Which steps must not run.

    A step that was built on a failed one has rows whose slots were never started, or whose block tables and positions
    are those of a former owner: it would write where others read.
    """

    def __init__(self) -> None:
        self._newest = -1

    def add(self, batch: Batch) -> None:
        """Record that this step has failed."""
        self._newest = batch.step

    def check(self, batch: Batch) -> None:
        """Raise StepDropped if this step is lost as well. To be called for all steps in order."""
        if batch.last_read < self._newest:
            failed, self._newest = self._newest, batch.step
            raise StepDropped(f"Step {batch.step} was not run: it was built on step {failed}, which gave nothing.")


class StepExecutor:
    """States: new, running from the end of `start` on, perhaps dead, then closed.

    `load` is called in the thread and makes the agent; `release` is called there when that is gone. Written by the
    loop's thread, except for an agent that runs ahead, which the thread hands over before `start` returns.
    """

    isolated = False

    def __init__(self, load: Callable[[], Agent], *, release: Callable[[], None] | None = None) -> None:
        self._loaded = _Handover()
        self._thread: StepThread[Any] = StepThread(partial(_load, load, self._loaded), release=release)
        """Computes steps, or waits for launched ones."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """Where it was started, once it was."""
        self._running = False
        self._launches = False
        """Whether steps are launched in the loop's thread, by an agent that is perhaps gone by now."""
        self._held: deque[_Step] = deque()
        """Steps that cannot be launched yet."""
        self._unfinished: _Step | None = None
        """The step that is launched in part."""
        self._lost = LostSteps()
        """Written by the thread that launches."""
        self._waited: deque[asyncio.Future[None]] = deque()
        """Of the launched steps, oldest first: what the thread waits for."""
        self._launch_error: BaseException | None = None
        """Of the first step that the agent did not survive: nothing is launched after it."""
        self._step_error: BaseException | None = None
        """The same of a launched step: what was launched after it is not read."""
        self._on_step: Callable[[], None] = lambda: None

    def watch(self, on_step: Callable[[], None], on_death: Callable[[Exception], None]) -> None:
        """See `Executor`. It never calls `on_death`: a thread dies of what a step or a command raises."""
        self._on_step = on_step

    async def start(self) -> Limits:
        """Load in the thread. Raises what `load` raises, errors that are not asyncllm's as ModelError."""
        limits = await self._thread.start()
        self._loop = asyncio.get_running_loop()
        self._launches = self._loaded.agent is not None
        self._running = not self._loaded.closed
        return limits

    def submit(self, batch: Batch) -> asyncio.Future[StepOutput]:
        """Launch a step; its future raises StepFailed or StepDropped, or what the agent did not survive, and then
        every later one EngineDead with that as cause.

        Raises EngineClosed unless started and not closed.
        """
        if self._loop is None or not self._running:
            raise EngineClosed("This executor is not running: it was closed, or never started.")
        if not self._launches:
            work = partial(compute, batch=batch, lost=self._lost)
            return self._thread.submit(work, spares=(StepFailed, StepDropped), then=self._on_step)
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
        if self._launches and self._loaded.agent is None:
            future: asyncio.Future[None] = self._loop.create_future()
            set_seen_exception(future, dead(self._launch_error))
            return future
        carried_out = self._thread.submit(partial(_carry_out, self._loaded.agent, command), spares=(AsyncLLMError,))
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
                # Futures belong to their own loop. If that is closed, no task waits for them any more.
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._drop, closed)
        self._loaded.close()
        try:
            if here and self._waited:
                # The thread drops what it is not waiting for yet when it is told to end.
                await asyncio.wait(self._waited)
        finally:
            await self._thread.close()
            if not here:
                # Their callbacks are not called any more, and would keep the agent.
                self._waited.clear()

    def _launch(self) -> None:
        """Launch all that can be launched.

        An error leads back to the frame of this function, which therefore has no variable for the agent.
        """
        if self._unfinished is not None and self._loaded.agent is not None:
            pending, failure = attempt(self._loaded.agent.resume)
            if pending is None and failure is None:
                return
            step, self._unfinished = self._unfinished, None
            self._go_on(step, pending, failure)
        while self._held and self._loaded.agent is not None and not self._loaded.agent.blocked:
            step = self._held.popleft()
            try:
                self._lost.check(step[0])
            except StepDropped as dropped:
                set_seen_exception(step[1], dropped)
                continue
            self._go_on(step, *attempt(self._loaded.agent.launch, step[0]))

    def _go_on(self, step: _Step, pending: LaunchedStep | None, failure: BaseException | None) -> None:
        """Wait for a step that is launched, or launched in part, or see to it that nothing is built on one that
        failed."""
        batch, future = step
        if pending is None:
            assert failure is not None
            if self._survives(failure):
                self._lost.add(batch)
                set_exception(future, _step_failed(failure))
            else:
                self._die(future, failure)
        elif pending.launched:
            self._watch(pending, future)
        else:
            self._unfinished = step

    def _watch(self, pending: LaunchedStep, future: asyncio.Future[StepOutput]) -> None:
        then = partial(self._step_over, future, pending)
        self._waited.append(self._thread.submit(partial(_wait, pending=pending), then=then))

    def _step_over(self, future: asyncio.Future[StepOutput], pending: LaunchedStep) -> None:
        """Go on when the device is done with the oldest launched step."""
        self._read(future, pending)
        del pending
        self._on_step()

    def _read(self, future: asyncio.Future[StepOutput], pending: LaunchedStep) -> None:
        """Read the oldest launched step, and launch what waited for that."""
        error = self._waited.popleft().exception()
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
            output, error = attempt(pending.output)
        # An error leads back to this frame, and the step to the model.
        del pending
        if error is None:
            set_result(future, output)
        elif arrived and self._survives(error):
            set_exception(future, _step_failed(error))
        else:
            self._step_error = error
            self._die(future, error)
            return
        self._launch()

    def _survives(self, error: BaseException) -> bool:
        return self._loaded.agent is not None and self._loaded.agent.survives(error)

    def _die(self, future: asyncio.Future[Any], error: BaseException) -> None:
        """Launch no step after this error, be it a step's or that of a command that failed halfway."""
        set_exception(future, error)
        if self._launch_error is None:
            self._launch_error = error
            self._loaded.close()
            self._drop(dead(error))

    def _look_at(self, carried_out: asyncio.Future[None]) -> None:
        """Look at how a command ended: carried out, refused, or failed in the midst."""
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


def compute(agent: Agent, batch: Batch, lost: LostSteps) -> StepOutput:
    """Run a step from its launch to its output, with none before it unread.

    Raises StepFailed for what the agent survives, StepDropped behind that, and anything else as it is.
    """
    lost.check(batch)
    try:
        pending = agent.launch(batch)
        pending.wait()
        return pending.output()
    except Exception as error:
        if not agent.survives(error):
            raise
        lost.add(batch)
        raise _step_failed(error) from error


def _step_failed(cause: BaseException) -> StepFailed:
    """Return what a step raises whose agent survives `cause`."""
    error = StepFailed("A step failed; the cause is chained.")
    error.__cause__ = cause
    return error


def _wait(_: _Waiter, pending: LaunchedStep) -> None:
    pending.wait()


def _carry_out(launching: Agent | None, command: Command, runner: Any) -> None:
    """Carry out a command in the thread, by what computes the steps there if nothing launches them elsewhere."""
    (launching if launching is not None else runner).carry_out(command)


class _Handover:
    """An agent that runs ahead, on its way from the thread that makes it to the loop's. Either may find that it is too
    late."""

    def __init__(self) -> None:
        self.agent: Agent | None = None
        """None before it is made, and once it may not be used any more."""
        self.closed = False

    def put(self, agent: Agent) -> None:
        self.agent = agent
        # In this order, as `close` may come in between.
        if self.closed:
            self.agent = None

    def close(self) -> None:
        self.closed = True
        self.agent = None


class _Waiter:
    """What the thread has of an agent that it hands over: not the agent itself, which may be gone."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits


def _load(load: Callable[[], Agent], loaded: _Handover) -> Agent | _Waiter:
    """Load what the thread works with."""
    agent = load()
    if not agent.runs_ahead:
        return agent
    loaded.put(agent)
    return _Waiter(agent.limits)


def open_executor(
    config: EngineConfig,
    model_path: Path,
    *,
    wrap: Callable[[Agent], Agent] | None = None,
    meeting: Meeting | None = None,
) -> Executor:
    """Return the executor of a model in this process, not yet started. `model_path` is the checkpoint's folder.

    `wrap` gets the agent when it is made, and returns what stands in front of it. `meeting`: the model is one rank's
    share, and this is where it meets the others.
    """
    group: TorchGroup | None = None

    def load() -> Agent:
        times = StartTimes()
        nonlocal group
        with nullcontext() if config.device_type == "cpu" else context_meanwhile():
            from asyncllm.agent.model_agent import ModelAgent
        if meeting is not None:
            from asyncllm.agent.open_model import choose_device
            from asyncllm.distributed.group import TorchGroup

            group = TorchGroup(meeting, choose_device(config))
        times.lap("import")
        agent: Agent = ModelAgent(config, model_path, times=times, group=group)
        return agent if wrap is None else wrap(agent)

    def release() -> None:
        _release_memory()
        if group is not None:
            group.close()

    return StepExecutor(load, release=release)


def _release_memory() -> None:
    """Give the device memory that nothing refers to any more back to the system. A lost device gives none."""
    import gc

    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gc.collect()
        with suppress(torch.AcceleratorError):
            torch.cuda.empty_cache()
