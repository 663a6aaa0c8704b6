"""StepExecutor: runs the steps of an agent for the event loop, with the help of one thread.

On a CPU the thread computes the steps. On a GPU the event loop's thread launches them, and the step thread waits for
them in a call that sleeps in the driver. A launch consists of a few hundred short calls, each of which releases the
interpreter lock. In another thread, each call would have to win the lock back from other threads: 30 such calls take 37
us alone, and 5.3 ms next to a thread of busy Python at the interpreter's default switch interval.
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
from asyncllm.errors import AsyncLLMError, EngineClosed, ModelError, short
from asyncllm.event_loop.in_thread import in_thread
from asyncllm.event_loop.retrieve import retrieve
from asyncllm.protocol import (
    Batch,
    Command,
    Executor,
    Limits,
    LoadAdapter,
    StartTimes,
    StepDropped,
    StepFailed,
    StepOutput,
)

if TYPE_CHECKING:
    from asyncllm.distributed.group import Rendezvous, TorchGroup

__all__ = ["Agent", "LaunchedStep", "LostSteps", "StepExecutor", "compute", "open_executor"]

_Step = tuple[Batch, asyncio.Future[StepOutput]]


class LaunchedStep(Protocol):
    """The result of a launch: `agent.pending_step.PendingStep`, or a fake."""

    @property
    def launched(self) -> bool:
        """Whether the whole step is launched. Part of it may wait for `Agent.resume`."""

    def wait(self) -> None:
        """Block until the device is done with the step."""

    def output(self) -> StepOutput:
        """Return the results, after `wait`."""


class Agent(Protocol):
    """The interface that a `StepExecutor` drives: `ModelAgent`, or a fake.

    The step thread creates it, and carries out commands while no step is in flight. If the agent runs ahead, the event
    loop's thread launches its steps; otherwise the step thread does.
    """

    @property
    def limits(self) -> Limits: ...

    @property
    def runs_ahead(self) -> bool:
        """Whether `launch` returns before the step is computed."""

    @property
    def blocked(self) -> bool:
        """Whether `launch` must wait for `resume` or for a step to be read. False when all steps are read."""

    def launch(self, batch: Batch, /) -> LaunchedStep: ...

    def carry_out(self, command: Command, /) -> None:
        """Carry out a command. An AsyncLLMError means that nothing has changed."""

    def load_adapter(self, adapter: LoadAdapter, /) -> str:
        """Read an adapter into host memory and return the digest of its files. Called in a separate thread."""

    def drop_adapter(self, number: int, /) -> None:
        """Free the host memory of an adapter. Called in any thread."""

    def resume(self) -> LaunchedStep | None:
        """Complete the launch of a partly launched step. Return None if there is none, or if it still has to wait."""

    def survives(self, error: BaseException, /) -> bool:
        """Return whether the agent can continue after `launch`, `resume` or a step's `output` has raised this error."""


class LostSteps:
    """Steps that must not run, because they build on a failed one.

    The slots of their rows may never have been started, or may hold block tables and positions of a former owner, so
    such a step would write where others read.
    """

    def __init__(self) -> None:
        self._newest = -1

    def add(self, batch: Batch) -> None:
        """Note that this step has failed."""
        self._newest = batch.step

    def check(self, batch: Batch) -> None:
        """Raise StepDropped if this step builds on a lost one. Call this for all steps in order."""
        if batch.last_read < self._newest:
            failed, self._newest = self._newest, batch.step
            raise StepDropped(f"Step {batch.step} was not run: it was built on step {failed}, which gave nothing.")


class StepExecutor:
    """States: new, running once `start` has returned, possibly dead, then closed.

    `load` creates the agent in the step thread, and `release` is called there when the agent is gone. The event loop's
    thread writes the state; the step thread hands over an agent that runs ahead before `start` returns.
    """

    isolated = False

    def __init__(self, load: Callable[[], Agent], *, release: Callable[[], None] | None = None) -> None:
        self._loaded = _Handover()
        self._thread: StepThread[Any] = StepThread(partial(_load, load, self._loaded), release=release)
        """Computes steps, or waits for launched ones."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop that called `start`."""
        self._running = False
        self._launches = False
        """Whether the event loop's thread launches steps. Stays True after the agent is gone."""
        self._held: deque[_Step] = deque()
        """Steps that cannot be launched yet."""
        self._unfinished: _Step | None = None
        """The partly launched step."""
        self._lost = LostSteps()
        """Written by the thread that launches steps."""
        self._waited: deque[asyncio.Future[None]] = deque()
        """The step thread's waits for launched steps, oldest first."""
        self._launch_error: BaseException | None = None
        """The first error that the agent did not survive. Nothing is launched after it."""
        self._step_error: BaseException | None = None
        """Such an error from a launched step. Steps launched after it are not read."""
        self._adapter_reads: set[asyncio.Task[str]] = set()
        """Readings of adapters under way."""
        self._on_step: Callable[[], None] = lambda: None

    def watch(self, on_step: Callable[[], None], on_death: Callable[[Exception], None]) -> None:
        """See `Executor`. `on_death` is never called, because only an error of a step or command ends the thread."""
        self._on_step = on_step

    async def start(self) -> Limits:
        """Load the model in the step thread. Raises the error of `load`, as a ModelError unless it is one of
        asyncllm's."""
        limits = await self._thread.start()
        self._loop = asyncio.get_running_loop()
        self._launches = self._loaded.agent is not None
        self._running = not self._loaded.closed
        return limits

    def submit(self, batch: Batch) -> asyncio.Future[StepOutput]:
        """Launch a step, and return the future of its output.

        The future raises StepFailed, StepDropped, or an error that the agent did not survive. After such an error, all
        later futures raise EngineDead with it as cause. Raises EngineClosed unless running.
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
        """Carry out a command in the step thread, because it takes seconds. The caller has no step in flight, and
        submits none until the future is done. Raises EngineClosed unless running.
        """
        if self._loop is None or not self._running:
            raise EngineClosed("This executor is not running: it was closed, or never started.")
        if self._launches and self._loaded.agent is None:
            future: asyncio.Future[None] = self._loop.create_future()
            set_seen_exception(future, dead(self._launch_error))
            return future
        carried_out = self._thread.submit(partial(_carry_out, self._loaded.agent, command), spares=(AsyncLLMError,))
        if self._launches:
            carried_out.add_done_callback(self._command_done)
        return carried_out

    def load_adapter(self, adapter: LoadAdapter) -> asyncio.Future[str]:
        """Read an adapter in a separate thread. Raises EngineClosed unless running."""
        if self._loop is None or not self._running:
            raise EngineClosed("This executor is not running: it was closed, or never started.")
        reading = self._loop.create_task(self._load_adapter(adapter), name="asyncllm-adapter")
        self._adapter_reads.add(reading)
        reading.add_done_callback(self._adapter_reads.discard)
        return reading

    async def _load_adapter(self, adapter: LoadAdapter) -> str:
        if self._launches:
            if self._loaded.agent is None:
                raise dead(self._launch_error)
            load = self._loaded.agent.load_adapter
        else:
            # Normally only the step thread refers to its agent; this thread does too while it reads.
            load = await self._thread.submit(_loader)
        return await in_thread(partial(_read_adapter, load, adapter))

    def drop_adapter(self, number: int) -> None:
        """Free the host memory of an adapter. An executor that no longer runs has none."""
        if self._loop is None or not self._running:
            return
        if not self._launches:
            self._thread.submit(partial(_drop, number=number)).add_done_callback(retrieve)
        elif self._loaded.agent is not None:
            self._loaded.agent.drop_adapter(number)

    async def close(self) -> None:
        """Let the launched steps finish, drop the others, end the thread, release memory. Idempotent."""
        here = self._loop is asyncio.get_running_loop()
        if self._loop is not None and self._running:
            self._running = False
            closed = EngineClosed("The executor was closed before this step ran.")
            if here:
                self._drop(closed)
            else:
                # Futures belong to their own event loop. If that loop is closed, no task waits for them.
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._drop, closed)
        self._loaded.close()
        try:
            if here and self._adapter_reads:
                await asyncio.wait(self._adapter_reads)
            if here and self._waited:
                # When told to end, the thread drops the steps it is not waiting for yet.
                await asyncio.wait(self._waited)
        finally:
            await self._thread.close()
            if not here:
                # Their callbacks are no longer called, and would keep the agent alive.
                self._waited.clear()

    def _launch(self) -> None:
        """Launch all steps that can be launched.

        This function has no variable for the agent, because the traceback of an error keeps its frame alive.
        """
        if self._unfinished is not None and self._loaded.agent is not None:
            pending, failure = attempt(self._loaded.agent.resume)
            if pending is None and failure is None:
                return
            step, self._unfinished = self._unfinished, None
            self._after_launch(step, pending, failure)
        while self._held and self._loaded.agent is not None and not self._loaded.agent.blocked:
            step = self._held.popleft()
            try:
                self._lost.check(step[0])
            except StepDropped as dropped:
                set_seen_exception(step[1], dropped)
                continue
            self._after_launch(step, *attempt(self._loaded.agent.launch, step[0]))

    def _after_launch(self, step: _Step, pending: LaunchedStep | None, failure: BaseException | None) -> None:
        """Wait for a launched step, hold a partly launched one, or handle a failed launch."""
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
        then = partial(self._step_done, future, pending)
        self._waited.append(self._thread.submit(partial(_wait, pending=pending), then=then))

    def _step_done(self, future: asyncio.Future[StepOutput], pending: LaunchedStep) -> None:
        """Continue when the device is done with the oldest launched step."""
        self._read(future, pending)
        del pending
        self._on_step()

    def _read(self, future: asyncio.Future[StepOutput], pending: LaunchedStep) -> None:
        """Read the oldest launched step, and launch the steps that waited for that."""
        error = self._waited.popleft().exception()
        if isinstance(error, EngineClosed):
            # The thread dropped it, because `close` was cancelled.
            set_seen_exception(future, error)
            return
        if self._step_error is not None:
            set_seen_exception(future, dead(self._step_error))
            return
        arrived = error is None
        output: StepOutput | None = None
        if arrived:
            output, error = attempt(pending.output)
        # The traceback of an error keeps this frame alive, and the step refers to the model.
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
        """Launch no more steps after this error of a step, or of a command that failed halfway."""
        set_exception(future, error)
        if self._launch_error is None:
            self._launch_error = error
            self._loaded.close()
            self._drop(dead(error))

    def _command_done(self, carried_out: asyncio.Future[None]) -> None:
        """Handle the end of a command that was carried out, refused, or failed halfway."""
        error = None if carried_out.cancelled() else carried_out.exception()
        if error is not None and not isinstance(error, AsyncLLMError):
            self._die(carried_out, error)

    def _drop(self, error: BaseException) -> None:
        """End the unlaunched steps with this error."""
        if self._unfinished is not None:
            set_seen_exception(self._unfinished[1], error)
            self._unfinished = None
        while self._held:
            set_seen_exception(self._held.popleft()[1], error)


def compute(agent: Agent, batch: Batch, lost: LostSteps) -> StepOutput:
    """Run a step from its launch to its output. All earlier steps have been read.

    Raises StepFailed for an error that the agent survives, StepDropped for steps that build on such a step, and any
    other error unchanged.
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
    """Return the error of a step that failed because of `cause`, which the agent survives."""
    error = StepFailed("A step failed; the cause is chained.")
    error.__cause__ = cause
    return error


def _wait(_: _Waiter, pending: LaunchedStep) -> None:
    pending.wait()


def _carry_out(launching: Agent | None, command: Command, runner: Any) -> None:
    """Carry out a command in the step thread, with `launching`, the agent of the event loop, or else with the thread's
    own agent."""
    (launching if launching is not None else runner).carry_out(command)


def _loader(agent: Agent) -> Callable[[LoadAdapter], str]:
    return agent.load_adapter


def _drop(agent: Agent, number: int) -> None:
    agent.drop_adapter(number)


def _read_adapter(load: Callable[[LoadAdapter], str], adapter: LoadAdapter) -> str:
    """Read an adapter. Every error becomes an AsyncLLMError, because nothing has changed."""
    try:
        return load(adapter)
    except AsyncLLMError:
        raise
    except Exception as error:
        raise ModelError(f"The adapter {short(adapter.name)} could not be read: {error!r}.") from error


class _Handover:
    """Passes an agent that runs ahead from the step thread, which creates it, to the event loop. `close` may happen in
    between."""

    def __init__(self) -> None:
        self.agent: Agent | None = None
        """None before it is created, and once it must not be used any more."""
        self.closed = False

    def put(self, agent: Agent) -> None:
        self.agent = agent
        # Checked after the assignment, because `close` may happen in between.
        if self.closed:
            self.agent = None

    def close(self) -> None:
        self.closed = True
        self.agent = None


class _Waiter:
    """Replaces, in the step thread, an agent that has been handed over and may be gone."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits


def _load(load: Callable[[], Agent], loaded: _Handover) -> Agent | _Waiter:
    """Load the agent, and return the step thread's runner."""
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
    rendezvous: Rendezvous | None = None,
) -> Executor:
    """Return the executor of a model in this process, not started. `model_path` is the checkpoint's folder.

    `wrap` may replace the agent when it is created. `rendezvous` is where a rank, which has a share of the model, meets
    the other ranks.
    """
    group: TorchGroup | None = None

    def load() -> Agent:
        nonlocal group
        times, joined = StartTimes(), None
        with nullcontext() if config.device_type == "cpu" else context_meanwhile():
            from asyncllm.agent.model_agent import ModelAgent
        if rendezvous is not None:
            from asyncllm.agent.open_model import choose_device
            from asyncllm.distributed.group import TorchGroup

            joined = TorchGroup(rendezvous, choose_device(config))
        times.lap("import")
        agent: Agent = ModelAgent(config, model_path, times=times, group=joined)
        # A rank that cannot load stays in the group until its process ends. Otherwise the others would fail for lack of
        # it, and their errors might be reported before its own.
        group = joined
        return agent if wrap is None else wrap(agent)

    def release() -> None:
        _release_memory()
        if group is not None:
            group.close()

    return StepExecutor(load, release=release)


def _release_memory() -> None:
    """Return unused device memory to the system. A lost device cannot return any."""
    import gc

    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gc.collect()
        with suppress(torch.AcceleratorError):
            torch.cuda.empty_cache()
