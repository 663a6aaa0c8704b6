"""StreamExecutor: launches the steps of a GPU from the event loop's own thread, and waits for them in another.

A launch is a few hundred short calls, each of which gives the interpreter lock away. In a thread of their own they
would queue for it behind whatever else the process runs: 30 such calls take 37 us alone and 5.3 ms beside a thread of
busy Python at the interpreter's default switch interval. In the loop's thread there is nobody to queue behind. Waiting
is one call that sleeps in the driver, so a thread does that, and nothing polls. What computes its steps itself, on a
CPU, runs in that thread instead.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

from asyncllm.agent.thread_executor import (
    StepRunner,
    ThreadExecutor,
    attempt,
    dead,
    set_exception,
    set_result,
    set_seen_exception,
)
from asyncllm.batch import Batch, Limits, StepOutput
from asyncllm.errors import EngineClosed

__all__ = ["LaunchedStep", "StepLauncher", "StreamExecutor"]


class LaunchedStep(Protocol):
    """What a launch gives: `agent.device_agent.PendingStep`, or a fake."""

    @property
    def launched(self) -> bool:
        """False while a part of the step waits for `StepLauncher.resume`."""

    def wait(self) -> None:
        """Block until the device is done with the step."""

    def output(self) -> StepOutput:
        """The results, after `wait`."""


@runtime_checkable
class StepLauncher(Protocol):
    """What a `StreamExecutor` drives: `DeviceAgent`, or a fake. Apart from being made, it is used in the loop's thread
    alone."""

    @property
    def limits(self) -> Limits: ...

    @property
    def blocked(self) -> bool:
        """Whether `launch` must wait for `resume`."""

    def launch(self, batch: Batch, /) -> LaunchedStep: ...

    def resume(self) -> LaunchedStep | None:
        """Complete the launch of a step that could not go on before; None if there is none, or it still cannot."""


class StreamExecutor:
    """States: new, started, then dead or closed. `load` is called in the thread and makes what runs the steps.

    `release` is called in the thread when that is gone. Written by the loop's thread, except for the launcher, which
    appears before `start` returns.
    """

    def __init__(
        self,
        load: Callable[[], StepRunner[Batch, StepOutput] | StepLauncher],
        *,
        release: Callable[[], None] | None = None,
    ) -> None:
        self._launchers: list[StepLauncher] = []
        """The launcher, once there is one and as long as it may be used."""
        self._thread: ThreadExecutor[Any, Any] = ThreadExecutor(
            partial(_load_runner, load, self._launchers), release=release
        )
        """Runs whole steps, or waits for launched ones."""
        self._held: deque[tuple[Batch, asyncio.Future[StepOutput]]] = deque()
        """Steps that cannot be launched yet."""
        self._unfinished: asyncio.Future[StepOutput] | None = None
        """Of the step that is launched in part."""
        self._failure: BaseException | None = None

    async def start(self) -> Limits:
        """Load in the thread. Raises what `load` raises, errors that are not asyncllm's as ModelError."""
        return await self._thread.start()

    def submit(self, batch: Batch) -> asyncio.Future[StepOutput]:
        """Launch a step; its future raises what the step raised, and every later one EngineDead with that as cause.

        Raises EngineClosed unless started and not closed.
        """
        if self._failure is None and not self._launchers:
            return self._thread.submit(batch)
        future: asyncio.Future[StepOutput] = asyncio.get_running_loop().create_future()
        if self._failure is not None:
            set_seen_exception(future, dead(self._failure))
            return future
        self._held.append((batch, future))
        self._launch()
        return future

    async def close(self) -> None:
        """Let the launched steps finish, drop the others, end the thread, release the memory. Any number of times."""
        self._drop(EngineClosed("The executor was closed before this step ran."))
        self._launchers.clear()
        await self._thread.close()

    def _launch(self) -> None:
        """Launch all that can be launched."""
        launcher = self._launchers[0]
        if self._unfinished is not None:
            pending, failure = attempt(launcher.resume)
            if failure is not None:
                self._fail(self._unfinished, failure)
                return
            if pending is None:
                return
            self._watch(pending, self._unfinished)
            self._unfinished = None
        while self._held and not launcher.blocked:
            batch, future = self._held.popleft()
            pending, failure = attempt(launcher.launch, batch)
            if failure is not None:
                self._fail(future, failure)
                return
            assert pending is not None
            if pending.launched:
                self._watch(pending, future)
            else:
                self._unfinished = future

    def _watch(self, pending: LaunchedStep, future: asyncio.Future[StepOutput]) -> None:
        waited = self._thread.submit(pending)
        waited.add_done_callback(partial(self._read, future))

    def _read(self, future: asyncio.Future[StepOutput], waited: asyncio.Future[LaunchedStep]) -> None:
        """The device is done with a step."""
        error = waited.exception()
        if error is None:
            output, error = attempt(waited.result().output)
        if error is not None:
            self._fail(future, error)
            return
        set_result(future, output)
        if self._launchers:
            self._launch()

    def _fail(self, future: asyncio.Future[StepOutput], error: BaseException) -> None:
        """No step runs after one that failed."""
        set_exception(future, error)
        if self._failure is None:
            self._failure = error
            self._launchers.clear()
            self._drop(dead(error))

    def _drop(self, error: BaseException) -> None:
        """Answer the steps that are not launched."""
        if self._unfinished is not None:
            set_seen_exception(self._unfinished, error)
            self._unfinished = None
        while self._held:
            set_seen_exception(self._held.popleft()[1], error)


class _Waiter:
    """The thread's side: waits for one step after the other. It does not know the launcher, which may be gone."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def step(self, pending: LaunchedStep) -> LaunchedStep:
        pending.wait()
        return pending


def _load_runner(
    load: Callable[[], StepRunner[Batch, StepOutput] | StepLauncher], launchers: list[StepLauncher]
) -> StepRunner[Any, Any]:
    """What the thread drives."""
    loaded = load()
    if isinstance(loaded, StepLauncher):
        launchers.append(loaded)
        return _Waiter(loaded.limits)
    return loaded
