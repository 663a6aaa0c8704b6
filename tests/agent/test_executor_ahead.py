"""StepExecutor with steps launched in the loop's thread: it waits in its own, and answers in order."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from asyncllm.agent.executor import StepExecutor
from asyncllm.errors import EngineClosed, EngineDead, InvalidParameter, ModelError
from asyncllm.protocol import Batch, Command, Limits, Sleep, StepDropped, StepFailed, StepOutput
from tests.agent.test_executor import LIMITS, empty_batch, step_threads


class Launched:
    """A step on a device that is done when `done` is set."""

    def __init__(self, launcher: Launcher, batch: Batch, *, launched: bool = True) -> None:
        self.launcher = launcher
        self.step = batch.step
        self.launched = launched
        self.done = threading.Event()
        if not launcher.slow:
            self.done.set()

    def wait(self) -> None:
        assert self.done.wait(10)
        self.launcher.note("wait", self.step)

    def output(self) -> StepOutput:
        self.launcher.note("output", self.step)
        self.launcher.num_read += 1
        return StepOutput(step=self.step, slots=[], tokens=[self.step])


class Launcher:
    """An agent that takes notes. Steps in `blocking` wait for all before them to be read."""

    runs_ahead = True

    def __init__(
        self,
        *,
        slow: bool = False,
        blocking: tuple[int, ...] = (),
        failures: dict[str, int] | None = None,
        robust: bool = False,
    ) -> None:
        self.limits: Limits = LIMITS
        self.slow = slow
        self.blocking = blocking
        self.failures = failures or {}
        """Call -> the step that raises in it."""
        self.robust = robust
        """Whether it survives that."""
        self.notes: list[tuple[str, int]] = []
        self.threads: dict[str, set[str]] = {}
        self.launches: list[Launched] = []
        self.num_read = 0
        self._partial: Launched | None = None

    def note(self, call: str, step: int) -> None:
        self.notes.append((call, step))
        self.threads.setdefault(call, set()).add(threading.current_thread().name)
        if self.failures.get(call) == step:
            raise ValueError(f"broken {call}")

    @property
    def blocked(self) -> bool:
        return self._partial is not None

    def launch(self, batch: Batch) -> Launched:
        assert not self.blocked
        self.note("launch", batch.step)
        whole = batch.step not in self.blocking or self.num_read == batch.step
        pending = Launched(self, batch, launched=whole)
        self.launches.append(pending)
        if not whole:
            self._partial = pending
        return pending

    def carry_out(self, command: Command) -> None:
        assert isinstance(command, Sleep)
        self.note("carry_out", command.level)
        if command.level == 2:
            raise InvalidParameter("not that deep")

    def resume(self) -> Launched | None:
        pending = self._partial
        if pending is None or self.num_read < pending.step:
            return None
        self._partial = None
        self.note("resume", pending.step)
        pending.launched = True
        return pending

    def survives(self, error: BaseException) -> bool:
        return self.robust

    def steps(self, call: str) -> list[int]:
        return [step for name, step in self.notes if name == call]


class Made:
    """Makes a launcher in the executor's thread, and keeps no reference to it that counts."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self.reference: weakref.ref[Launcher] | None = None
        self.released_in: list[tuple[str, bool]] = []
        """Thread that called `release`, and whether the launcher was gone."""

    def __call__(self) -> Launcher:
        launcher = Launcher(**self._settings)
        self.reference = weakref.ref(launcher)
        return launcher

    @property
    def gone(self) -> bool:
        gc.collect()
        return self.reference is not None and self.reference() is None

    def release(self) -> None:
        self.released_in.append((threading.current_thread().name, self.gone))


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[tuple[StepExecutor, Launcher]]:
    launcher = Launcher(**settings)
    executor = StepExecutor(lambda: launcher)
    assert await executor.start() == LIMITS
    try:
        yield executor, launcher
    finally:
        for pending in launcher.launches:
            pending.done.set()
        await executor.close()
        assert not step_threads()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - set by another thread
        await asyncio.sleep(0.001)


@pytest.mark.anyio
async def test_steps_are_launched_in_the_loops_thread_and_answered_in_order() -> None:
    async with running() as (executor, launcher):
        here = threading.current_thread().name
        futures = [executor.submit(empty_batch(step)) for step in range(8)]
        assert launcher.steps("launch") == list(range(8)), "submit launches at once"
        done: list[int] = []
        for step, future in enumerate(futures):
            future.add_done_callback(lambda _, step=step: done.append(step))  # type: ignore[misc]
        outputs = await asyncio.gather(*futures)
    assert [output.tokens for output in outputs] == [[step] for step in range(8)]
    assert done == launcher.steps("wait") == launcher.steps("output") == list(range(8))
    assert launcher.threads == {"launch": {here}, "wait": {"asyncllm-step"}, "output": {here}}


@pytest.mark.anyio
async def test_one_wakeup_of_the_loop_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(blocking=(3,)) as (executor, _):
        loop = asyncio.get_running_loop()
        calls = []
        wake = loop.call_soon_threadsafe

        class Counting:
            def call_soon_threadsafe(self, *args: Any) -> None:
                calls.append(args)
                wake(*args)

        assert executor._thread._worker is not None
        monkeypatch.setattr(executor._thread._worker, "_loop", Counting())
        await asyncio.gather(*[executor.submit(empty_batch(step)) for step in range(7)])
        assert len(calls) == 7


@pytest.mark.anyio
async def test_blocked_launches_are_held_and_resumed_in_order() -> None:
    async with running(slow=True, blocking=(2, 3, 5)) as (executor, launcher):
        futures = [executor.submit(empty_batch(step)) for step in range(7)]
        assert launcher.steps("launch") == [0, 1, 2]
        launcher.launches[0].done.set()
        await futures[0]
        assert launcher.steps("resume") == []
        launcher.launches[1].done.set()
        await futures[1]
        assert launcher.notes[-2:] == [("resume", 2), ("launch", 3)]
        for step in range(2, 7):
            await until(lambda step=step: len(launcher.launches) > step)  # type: ignore[misc]
            launcher.launches[step].done.set()
            assert (await futures[step]).step == step
        # A step that needs no unread tokens follows the one before at once.
        assert launcher.notes.index(("launch", 4)) < launcher.notes.index(("output", 3)) + 3
        assert launcher.steps("launch") == list(range(7))
        assert launcher.steps("resume") == [2, 3, 5]


@pytest.mark.anyio
@pytest.mark.parametrize("call", ["launch", "wait", "output", "resume"])
async def test_a_step_that_the_launcher_does_not_survive_fails_every_later_one(call: str) -> None:
    made = Made(slow=True, blocking=(2,) if call == "resume" else (), failures={call: 2})
    executor = StepExecutor(made, release=made.release)
    await executor.start()
    futures = [executor.submit(empty_batch(step)) for step in range(5)]
    assert made.reference is not None
    launcher = made.reference()
    assert launcher is not None
    for pending in launcher.launches:
        pending.done.set()
    del launcher, pending
    outputs = [await future for future in futures[:2]]
    assert [output.step for output in outputs] == [0, 1], "the steps before it are unharmed"
    with pytest.raises(ValueError, match=f"broken {call}") as failed:
        await futures[2]
    futures.append(executor.submit(empty_batch(5)))
    for future in futures[3:]:
        with pytest.raises(EngineDead) as dead:
            await future
        assert dead.value.__cause__ is failed.value
    # Nobody asks for this one; asyncio must not complain that its error was never retrieved.
    executor.submit(empty_batch(6))
    # The model goes while the executor and the error are there; the thread lets go of a step a moment after the loop.
    async with asyncio.timeout(5):
        await until(lambda: made.gone)
    await executor.close()
    assert made.released_in == [("asyncllm-step", True)]
    with pytest.raises(EngineClosed):
        executor.submit(empty_batch(7))


def built_on(step: int, last_read: int) -> Batch:
    batch = empty_batch(step)
    batch.last_read = last_read
    return batch


@pytest.mark.anyio
@pytest.mark.parametrize("call", ["launch", "resume"])
async def test_a_step_that_the_launcher_survives_takes_along_what_was_built_on_it(call: str) -> None:
    async with running(blocking=(2,) if call == "resume" else (), failures={call: 2}, robust=True) as (executor, it):
        futures = [executor.submit(built_on(step, max(-1, step - 3))) for step in range(6)]
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [StepOutput] * 2 + [StepFailed] + [StepDropped] * 3
        failed = outcomes[2]
        assert isinstance(failed, StepFailed)
        assert isinstance(failed.__cause__, ValueError)
        # Who knows of all of them is served again; who does not is not.
        with pytest.raises(StepDropped, match="built on step 5"):
            await executor.submit(built_on(6, 4))
        it.num_read = 7
        assert (await executor.submit(built_on(7, 6))).step == 7
    assert it.steps("wait") == [0, 1, 7]


@pytest.mark.anyio
async def test_results_that_cannot_be_read_end_their_step_alone() -> None:
    async with running(failures={"output": 2}, robust=True) as (executor, _launcher):
        futures = [executor.submit(built_on(step, max(-1, step - 3))) for step in range(5)]
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [StepOutput] * 2 + [StepFailed] + [StepOutput] * 2


@pytest.mark.anyio
async def test_what_the_device_reports_is_the_end_whatever_the_launcher_says() -> None:
    async with running(failures={"wait": 1}, robust=True) as (executor, _launcher):
        futures = [executor.submit(built_on(step, max(-1, step - 3))) for step in range(3)]
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [StepOutput, ValueError, EngineDead]


@pytest.mark.anyio
async def test_stop_iteration_reaches_the_caller_too() -> None:
    async with running() as (executor, launcher):
        launcher.launch = lambda batch: next(iter(()))  # type: ignore[assignment, method-assign]
        with pytest.raises(RuntimeError, match="StopIteration"):
            await executor.submit(empty_batch())


@pytest.mark.anyio
async def test_a_cancelled_step_runs_and_harms_no_other() -> None:
    async with running(slow=True, blocking=(1,)) as (executor, launcher):
        futures = [executor.submit(empty_batch(step)) for step in range(4)]
        for future in futures[:3]:
            future.cancel()
        launcher.launches[0].done.set()
        for step in (1, 2, 3):
            await until(lambda step=step: len(launcher.launches) > step)  # type: ignore[misc]
            launcher.launches[step].done.set()
        assert (await futures[3]).step == 3
    assert launcher.steps("output") == [0, 1, 2, 3]


@pytest.mark.anyio
@pytest.mark.parametrize("error", [ModelError("no"), InvalidParameter("no", "session_len"), ZeroDivisionError("no")])
async def test_errors_of_loading_reach_the_starter(error: Exception) -> None:
    def load() -> Launcher:
        raise error

    executor = StepExecutor(load)
    with pytest.raises((ModelError, InvalidParameter)) as caught:
        await executor.start()
    assert error in (caught.value, caught.value.__cause__)
    assert not step_threads()
    with pytest.raises(EngineClosed):
        executor.submit(empty_batch())
    await executor.close()


@pytest.mark.anyio
async def test_close_before_start_and_again() -> None:
    executor = StepExecutor(Launcher)
    with pytest.raises(EngineClosed):
        executor.submit(empty_batch())
    await executor.close()
    await executor.close()
    with pytest.raises(EngineClosed):
        await executor.start()


@pytest.mark.anyio
@pytest.mark.parametrize("cancelled", [False, True])
async def test_close_while_loading_drops_the_model(cancelled: bool) -> None:
    entered, leave = threading.Event(), threading.Event()
    made = Made()

    def load() -> Launcher:
        entered.set()
        assert leave.wait(10)
        return made()

    executor = StepExecutor(load, release=made.release)
    starting = asyncio.ensure_future(executor.start())
    await until(entered.is_set)
    with pytest.raises(EngineClosed):
        executor.submit(empty_batch())
    if cancelled:
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
    closing = asyncio.ensure_future(executor.close())
    await asyncio.sleep(0)
    leave.set()
    await closing
    if not cancelled:
        assert await starting == LIMITS
    with pytest.raises(EngineClosed):
        executor.submit(empty_batch())
    assert made.released_in == [("asyncllm-step", True)], "nothing refers to the model when memory is released"
    assert not step_threads()


@pytest.mark.anyio
@pytest.mark.parametrize("blocking", [(), (2,)])
async def test_close_finishes_what_is_launched_and_drops_the_rest(blocking: tuple[int, ...]) -> None:
    made = Made(slow=True, blocking=blocking)
    executor = StepExecutor(made, release=made.release)
    await executor.start()
    assert made.reference is not None
    launcher = made.reference()
    assert launcher is not None
    futures = [executor.submit(empty_batch(step)) for step in range(4)]
    events = [pending.done for pending in launcher.launches]
    notes = launcher.notes
    del launcher
    closing = [asyncio.ensure_future(executor.close()) for _ in range(2)]
    await asyncio.sleep(0.005)
    with pytest.raises(EngineClosed):
        executor.submit(empty_batch(9))
    assert not any(task.done() for task in closing)
    for event in events:
        event.set()
    await asyncio.gather(*closing)
    await executor.close()
    finished = 2 if blocking else 4
    assert [(await future).step for future in futures[:finished]] == list(range(finished))
    for future in futures[finished:]:
        with pytest.raises(EngineClosed):
            await future
    assert [step for call, step in notes if call == "wait"] == list(range(finished))
    assert made.released_in == [("asyncllm-step", True)]
    assert not step_threads()


@pytest.mark.anyio
async def test_a_cancelled_close_still_ends_the_thread() -> None:
    made = Made(slow=True)
    executor = StepExecutor(made, release=made.release)
    await executor.start()
    assert made.reference is not None
    launcher = made.reference()
    assert launcher is not None
    futures = [executor.submit(empty_batch(step)) for step in range(2)]
    events = [pending.done for pending in launcher.launches]
    del launcher
    closing = asyncio.ensure_future(executor.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.sleep(0)
    for event in events:
        event.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await executor.close()
    for future in futures:
        assert future.done()
        assert future.exception() is None or isinstance(future.exception(), EngineClosed)
    # The error of the cancelled task leads to the steps that it waited for.
    del closing
    async with asyncio.timeout(5):
        await until(lambda: made.gone)
    assert not step_threads()


def test_close_from_another_loop() -> None:
    """The event loop of the steps is closed: no task waits for them, and the thread ends all the same."""
    made = Made(slow=True, blocking=(1,))
    executor = StepExecutor(made, release=made.release)
    events: list[threading.Event] = []

    async def abandon() -> None:
        await executor.start()
        for step in range(3):
            # As the engine does, which is gone with its loop.
            executor.submit(empty_batch(step)).add_done_callback(lambda _: None)
        assert made.reference is not None
        launcher = made.reference()
        assert launcher is not None
        events.extend(pending.done for pending in launcher.launches)

    asyncio.run(abandon())
    for event in events:
        event.set()
    asyncio.run(executor.close())
    assert not step_threads()
    with pytest.raises(EngineClosed):
        executor.submit(empty_batch(9))
    assert made.gone


@pytest.mark.anyio
async def test_an_executor_that_is_dropped_ends_its_thread() -> None:
    made = Made()
    executor = StepExecutor(made, release=made.release)
    await executor.start()
    await executor.submit(empty_batch())
    (thread,) = step_threads()
    del executor
    gc.collect()
    await until(lambda: not thread.is_alive())
    assert made.gone
    # Here it is chance which of the two the collection ends first.
    assert [name for name, _ in made.released_in] == ["asyncllm-step"]


@pytest.mark.anyio
async def test_a_step_that_was_read_keeps_nothing_alive() -> None:
    async with running() as (executor, launcher):
        await executor.submit(empty_batch())
        reference = weakref.ref(launcher.launches.pop())
        # The thread lets go of it a moment after the loop.
        await until(lambda: reference() is None)
