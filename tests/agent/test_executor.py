"""StepExecutor with steps that are computed in its thread: the loop is free, and nothing is left over."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from asyncllm.agent.executor import StepExecutor, open_executor
from asyncllm.config import EngineConfig
from asyncllm.errors import EngineClosed, EngineDead, InvalidCheckpoint, InvalidParameter, ModelError
from asyncllm.models.decoder import DecoderLM
from asyncllm.protocol import Batch, Command, Limits, PrefillRow, Sleep, SlotStart, StepDropped, StepFailed, StepOutput
from tests.agent.tiny_model import GREEDY, Driver, tiny_agent, tiny_llama

ROOT = Path(__file__).parents[2]
LIMITS = Limits(num_blocks=1, block_size=1, max_position=1, vocab_size=1, hidden_size=1, num_slots=1)


class Runner:
    """An agent whose steps do what the test says when they are launched, in the thread that is recorded."""

    runs_ahead = blocked = False

    def __init__(self, work: Callable[[Batch], None] = lambda batch: None, *, robust: bool = False) -> None:
        self.limits = LIMITS
        self.work = work
        self.robust = robust
        """Whether it survives what a step raises."""
        self.threads: list[str] = []
        self.steps: list[int] = []

    def launch(self, batch: Batch) -> Computed:
        self.threads.append(threading.current_thread().name)
        self.steps.append(batch.step)
        self.work(batch)
        return Computed(batch.step)

    def resume(self) -> None:
        raise AssertionError("nothing is launched in part")

    def survives(self, error: BaseException) -> bool:
        return self.robust

    def carry_out(self, command: Command) -> None:
        assert isinstance(command, Sleep)
        if command.level == 2:
            raise InvalidParameter("not this")
        if command.level == 3:
            raise ValueError("broken")


class Computed:
    """A step that is over."""

    launched = True

    def __init__(self, step: int) -> None:
        self.step = step

    def wait(self) -> None:
        pass

    def output(self) -> StepOutput:
        return StepOutput(step=self.step, slots=[], tokens=[])


def empty_batch(step: int = 0) -> Batch:
    return Batch(step=step, starts=[], new_blocks=[], copies=[], decode=[], prefill=[])


def step_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "asyncllm-step"]


@pytest.mark.anyio
async def test_steps_run_in_order_in_one_named_thread() -> None:
    runner = Runner()
    executor = StepExecutor(lambda: runner)
    assert await executor.start() == LIMITS
    futures = [executor.submit(empty_batch(step)) for step in range(20)]
    outputs = await asyncio.gather(*futures)
    await executor.close()
    assert [output.step for output in outputs] == runner.steps == list(range(20))
    assert set(runner.threads) == {"asyncllm-step"}
    assert not step_threads()


@pytest.mark.anyio
async def test_one_wakeup_of_the_loop_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = StepExecutor(Runner)
    await executor.start()
    loop = asyncio.get_running_loop()
    calls = []
    wake = loop.call_soon_threadsafe

    class Counting:
        def call_soon_threadsafe(self, *args: object) -> None:
            calls.append(args)
            wake(*args)  # type: ignore[arg-type]

    assert executor._thread._worker is not None
    monkeypatch.setattr(executor._thread._worker, "_loop", Counting())
    await asyncio.gather(*[executor.submit(empty_batch(step)) for step in range(7)])
    assert len(calls) == 7
    await executor.close()


@pytest.mark.anyio
async def test_a_failed_step_fails_every_later_one() -> None:
    def work(batch: Batch) -> None:
        if batch.step == 1:
            raise ValueError("broken step")

    executor = StepExecutor(lambda: Runner(work))
    await executor.start()
    futures = [executor.submit(empty_batch(step)) for step in range(3)]
    assert (await futures[0]).step == 0
    with pytest.raises(ValueError, match="broken step") as failed:
        await futures[1]
    for future in (futures[2], executor.submit(empty_batch(3))):
        with pytest.raises(EngineDead) as dead:
            await future
        assert dead.value.__cause__ is failed.value
    # Nobody asks for this one; asyncio must not complain that its error was never retrieved.
    executor.submit(empty_batch(4))
    await executor.close()


@pytest.mark.anyio
async def test_a_contained_step_fails_with_what_was_built_on_it_and_no_other() -> None:
    def work(batch: Batch) -> None:
        if batch.step == 1:
            raise ValueError("broken step")

    runner = Runner(work, robust=True)
    executor = StepExecutor(lambda: runner)
    await executor.start()
    batches = [empty_batch(step) for step in range(5)]
    for batch, last_read in zip(batches, (-1, -1, 0, 2, 3), strict=True):
        batch.last_read = last_read
    outcomes = await asyncio.gather(*(executor.submit(batch) for batch in batches), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [StepOutput, StepFailed, StepDropped, StepOutput, StepOutput]
    assert isinstance(outcomes[1], StepFailed)
    assert isinstance(outcomes[1].__cause__, ValueError)
    assert runner.steps == [0, 1, 3, 4]
    await executor.close()


@pytest.mark.anyio
async def test_what_a_runner_does_not_survive_is_passed_on() -> None:
    def work(batch: Batch) -> None:
        raise KeyError("beyond repair")

    executor = StepExecutor(lambda: Runner(work))
    await executor.start()
    with pytest.raises(KeyError):
        await executor.submit(empty_batch())
    with pytest.raises(EngineDead):
        await executor.submit(empty_batch(1))
    await executor.close()


@pytest.mark.anyio
async def test_stop_iteration_reaches_the_caller_too() -> None:
    def work(batch: Batch) -> None:
        next(iter(()))

    executor = StepExecutor(lambda: Runner(work))
    await executor.start()
    with pytest.raises(RuntimeError, match="StopIteration"):
        await executor.submit(empty_batch())
    await executor.close()


@pytest.mark.anyio
@pytest.mark.parametrize("error", [ModelError("no"), InvalidParameter("no", "session_len")])
async def test_errors_of_loading_pass_through(error: Exception) -> None:
    def load() -> Runner:
        raise error

    executor = StepExecutor(load)
    with pytest.raises(type(error)) as caught:
        await executor.start()
    assert caught.value is error
    assert not step_threads()
    with pytest.raises(EngineClosed):
        executor.submit(empty_batch())
    await executor.close()


@pytest.mark.anyio
async def test_unexpected_errors_of_loading_become_model_errors() -> None:
    executor = StepExecutor(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ModelError, match="ZeroDivisionError") as caught:
        await executor.start()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert not step_threads()


@pytest.mark.anyio
async def test_close_in_any_state_and_again() -> None:
    fresh = StepExecutor(Runner)
    await fresh.close()
    await fresh.close()
    with pytest.raises(EngineClosed):
        await fresh.start()
    with pytest.raises(EngineClosed):
        fresh.submit(empty_batch())

    running = StepExecutor(Runner)
    await running.start()
    with pytest.raises(EngineClosed):
        await running.start()
    await asyncio.gather(running.close(), running.close())
    await running.close()
    with pytest.raises(EngineClosed):
        running.submit(empty_batch())
    assert not step_threads()


@pytest.mark.anyio
async def test_close_finishes_what_runs_and_drops_what_waits() -> None:
    entered, leave = threading.Event(), threading.Event()

    def work(batch: Batch) -> None:
        entered.set()
        assert leave.wait(10)

    runner = Runner(work)
    executor = StepExecutor(lambda: runner)
    await executor.start()
    futures = [executor.submit(empty_batch(step)) for step in range(3)]
    while not entered.is_set():  # noqa: ASYNC110 - set by the other thread
        await asyncio.sleep(0.001)
    closing = asyncio.ensure_future(executor.close())
    await asyncio.sleep(0)
    leave.set()
    await closing
    assert (await futures[0]).step == 0
    assert runner.steps == [0]
    for future in futures[1:]:
        with pytest.raises(EngineClosed):
            await future


@pytest.mark.anyio
async def test_a_cancelled_step_runs_and_harms_no_other() -> None:
    runner = Runner()
    executor = StepExecutor(lambda: runner)
    await executor.start()
    first, second = executor.submit(empty_batch(0)), executor.submit(empty_batch(1))
    first.cancel()
    assert (await second).step == 1
    await executor.close()
    assert runner.steps == [0, 1]


@pytest.mark.anyio
async def test_a_command_may_be_refused_and_a_failed_one_is_the_last() -> None:
    runner = Runner()
    executor = StepExecutor(lambda: runner)
    await executor.start()
    with pytest.raises(InvalidParameter, match="not this"):
        await executor.carry_out(Sleep(2))
    assert (await executor.submit(empty_batch())).step == 0
    with pytest.raises(ValueError, match="broken"):
        await executor.carry_out(Sleep(3))
    with pytest.raises(EngineDead):
        await executor.submit(empty_batch(1))
    await executor.close()
    assert runner.steps == [0]


@pytest.mark.anyio
async def test_start_cancelled_while_loading_ends_the_thread() -> None:
    leave = threading.Event()

    def load() -> Runner:
        assert leave.wait(10)
        return Runner()

    executor = StepExecutor(load)
    starting = asyncio.ensure_future(executor.start())
    await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    leave.set()
    await executor.close()
    assert not step_threads()


def test_a_loop_that_is_gone_ends_the_thread() -> None:
    leave = threading.Event()

    def work(batch: Batch) -> None:
        assert leave.wait(10)

    executor = StepExecutor(lambda: Runner(work))

    async def abandon() -> None:
        await executor.start()
        executor.submit(empty_batch())

    asyncio.run(abandon())
    leave.set()
    asyncio.run(executor.close())
    assert not step_threads()


@pytest.mark.parametrize("step", ["time.sleep(0.3)", "threading.Event().wait()"], ids=["runs", "is stuck"])
def test_the_end_of_the_interpreter_waits_for_a_running_step_but_not_forever(step: str) -> None:
    """What a thread does inside torch when the interpreter is finalized ends the process by SIGABRT."""
    program = f"""
import asyncio, threading, time
from asyncllm.agent import step_thread

class Runner:
    limits = None

def work(runner):
    began.set()
    {step}
    print("over", flush=True)

step_thread.EXIT_PATIENCE_S = 10.0 if {"sleep" in step} else 0.1
began = threading.Event()

async def main():
    executor = step_thread.StepThread(Runner)
    await executor.start()
    kept.extend([executor, executor.submit(work), executor.submit(work)])
    began.wait()

kept = []
loop = asyncio.new_event_loop()
loop.run_until_complete(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, cwd=ROOT, check=False
    )
    assert (done.returncode, done.stdout) == (0, "over\n" if "sleep" in step else ""), done.stderr


@pytest.mark.anyio
async def test_an_executor_that_is_dropped_ends_its_thread() -> None:
    executor = StepExecutor(Runner)
    await executor.start()
    (thread,) = step_threads()
    del executor
    gc.collect()
    while thread.is_alive():  # noqa: ASYNC110 - a thread's end cannot be awaited
        await asyncio.sleep(0.001)


@pytest.mark.anyio
@pytest.mark.parametrize("fails", [False, True])
async def test_the_model_is_gone_after_close_and_after_a_failure(fails: bool) -> None:
    alive: list[weakref.ref[Runner]] = []

    def load() -> Runner:
        def work(batch: Batch) -> None:
            if fails:
                raise KeyError("broken")

        runner = Runner(work)
        alive.append(weakref.ref(runner))
        return runner

    executor = StepExecutor(load)
    await executor.start()
    future = executor.submit(empty_batch())
    error: BaseException | None = None
    if fails:
        with pytest.raises(KeyError) as caught:
            await future
        error = caught.value
    else:
        await future
        await executor.close()
    gc.collect()
    assert alive[0]() is None
    assert (error is not None) == fails
    await executor.close()


def _generate_alone(model: DecoderLM) -> list[int]:
    return Driver(tiny_agent(model)).generate(0, [5, 6, 7], 3)


@pytest.mark.anyio
async def test_a_real_model_answers_and_is_gone_after_close() -> None:
    model = tiny_llama()
    reference = weakref.ref(model)
    alone = await asyncio.to_thread(_generate_alone, model)  # an agent is made in a thread
    executor = StepExecutor(partial(tiny_agent, model))
    del model
    limits = await executor.start()
    assert limits.num_blocks == 80
    start = SlotStart(slot=0, params=GREEDY, num_prompt=3, num_tokens=3, token_ids=[])
    row = PrefillRow(slot=0, tokens=[5, 6, 7], position=0, sample=True)
    first = Batch(step=0, starts=[start], new_blocks=[(0, 0, 0, [4, 2])], copies=[], decode=[], prefill=[row])
    later = [Batch(step=step, starts=[], new_blocks=[], copies=[], decode=[0], prefill=[]) for step in (1, 2)]
    # Each step's input is the token of the one before, which has not been read when it is submitted.
    outputs = await asyncio.gather(*[executor.submit(batch) for batch in (first, *later)])
    assert [output.tokens[0] for output in outputs] == alone
    assert reference() is not None
    await executor.close()
    gc.collect()
    assert reference() is None


@pytest.mark.anyio
async def test_open_executor_reports_a_missing_checkpoint(tmp_path: Path) -> None:
    executor = open_executor(EngineConfig(device_type="cpu"), tmp_path)
    with pytest.raises(InvalidCheckpoint):
        await executor.start()
    await executor.close()


async def largest_gap(executor: StepExecutor, batch: Batch) -> tuple[float, float]:
    """Seconds that the step took, and the loop's largest gap between two turns meanwhile."""
    future = executor.submit(batch)
    began = last = time.perf_counter()
    gap = 0.0
    while not future.done():
        await asyncio.sleep(0.0005)
        now = time.perf_counter()
        gap, last = max(gap, now - last), now
    await future
    return last - began, gap


@pytest.mark.anyio
async def test_the_loop_turns_while_a_long_prompt_is_computed() -> None:
    model = tiny_llama(hidden_size=256, intermediate_size=512, num_hidden_layers=4, max_position_embeddings=1024)
    executor = StepExecutor(partial(tiny_agent, model, num_gpu_blocks=16, block_size=64))
    await executor.start()
    start = SlotStart(slot=0, params=GREEDY, num_prompt=1024, num_tokens=1024, token_ids=[])
    row = PrefillRow(slot=0, tokens=[token % 120 for token in range(1024)], position=0, sample=True)
    blocks = (0, 0, 0, list(range(16)))
    # Other programs on the machine can hold up the loop, and the step with it. A step that blocks the loop makes a gap
    # as long as itself each time.
    quiet = False
    for step in range(10):
        batch = Batch(step=step, starts=[start], new_blocks=[blocks], copies=[], decode=[], prefill=[row])
        took, gap = await largest_gap(executor, batch)
        assert took > 0.02
        quiet = gap < max(0.02, took / 5)
        if quiet:
            break
    await executor.close()
    assert quiet


@pytest.mark.anyio
async def test_the_gap_test_notices_a_step_that_keeps_the_interpreter() -> None:
    def work(batch: Batch) -> None:
        before = sys.getswitchinterval()
        sys.setswitchinterval(0.1)
        end = time.perf_counter() + 0.05
        while time.perf_counter() < end:
            pass
        sys.setswitchinterval(before)

    executor = StepExecutor(lambda: Runner(work))
    await executor.start()
    took, gap = await largest_gap(executor, empty_batch())
    await executor.close()
    assert gap > max(0.02, took / 5)
