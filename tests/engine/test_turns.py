"""A step costs the event loop one turn, in which it is read, the next one is launched and its tokens are delivered."""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from asyncllm import AsyncEngine
from asyncllm.agent.executor import StepExecutor
from asyncllm.config import EngineConfig, GenerationConfig
from asyncllm.engine.loop.inbox import MAX_PUT_OFF
from asyncllm.event_loop.request_gate import MAX_PER_ITERATION, RequestGate
from asyncllm.protocol import Batch, Limits, StepOutput
from asyncllm.testing import ByteTokenizer, FakeEngine, FakeExecutor
from asyncllm.testing.fake_engine import FakeTemplate
from asyncllm.types import Chunk
from tests.agent.test_executor import empty_batch
from tests.agent.test_executor_ahead import Launcher
from tests.engine.waits import until

LENGTH = 20


class CountingLoop(asyncio.SelectorEventLoop):
    turns = 0

    def _run_once(self) -> None:
        self.turns += 1
        super()._run_once()  # type: ignore[misc]


def run_counted(main: Callable[[CountingLoop], Coroutine[Any, Any, None]]) -> None:
    loop = CountingLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main(loop))


class Steps:
    """Completes the steps of a fake engine one by one, and knows the turn in which each came."""

    def __init__(self, engine: FakeEngine, loop: CountingLoop) -> None:
        self.executor = engine.executor
        self.turns: list[int] = []
        complete = self.executor._complete

        def noted(*how: Any) -> None:
            self.turns.append(loop.turns)
            complete(*how)

        self.executor._complete = noted  # type: ignore[method-assign]
        self.executor.pause()


def test_a_taker_has_a_chunk_in_the_turn_in_which_its_step_is_over() -> None:
    async def main(loop: CountingLoop) -> None:
        async with FakeEngine("x" * 100) as engine:
            steps = Steps(engine, loop)
            generation = engine.generate("Hi", GenerationConfig(max_new_tokens=LENGTH))
            await generation.start()
            taken = []

            def take(_: Chunk) -> bool:
                taken.append(loop.turns)
                steps.executor.advance()
                return True

            generation.listen(lambda: None, take)
            steps.executor.advance()
            await until(lambda: generation.ended)
            steps.executor.resume()
        assert taken == steps.turns[:LENGTH]

    run_counted(main)


def test_a_coroutine_has_it_in_the_next_turn() -> None:
    async def main(loop: CountingLoop) -> None:
        async with FakeEngine("x" * 100) as engine:
            steps = Steps(engine, loop)
            steps.executor.advance()
            read = []
            async for _ in engine.generate("Hi", GenerationConfig(max_new_tokens=LENGTH)):
                read.append(loop.turns)
                steps.executor.advance()
            steps.executor.resume()
        assert [turn - 1 for turn in read] == steps.turns[:LENGTH]

    run_counted(main)


def test_a_launched_step_is_read_and_told_of_in_the_turn_in_which_the_device_is_done() -> None:
    async def main(loop: CountingLoop) -> None:
        outputs, told = [], []

        class Noting(Launcher):
            def note(self, call: str, step: int) -> None:
                super().note(call, step)
                if call == "output":
                    outputs.append(loop.turns)

        executor = StepExecutor(lambda: Noting())
        executor.watch(lambda: told.append(loop.turns), lambda error: None)
        await executor.start()
        for step in range(5):
            await executor.submit(empty_batch(step))
        await executor.close()
        assert told == outputs
        assert len(told) == 5

    run_counted(main)


class Manual:
    """An executor whose steps are complete when a test says so."""

    isolated = False

    def __init__(self) -> None:
        self._device = FakeExecutor(num_blocks=256).device
        self._open: deque[tuple[Batch, asyncio.Future[StepOutput]]] = deque()
        self._on_step: Callable[[], None] = lambda: None

    def watch(self, on_step: Callable[[], None], on_death: object) -> None:
        self._on_step = on_step

    async def start(self) -> Limits:
        return self._device.limits

    def submit(self, batch: Batch) -> asyncio.Future[StepOutput]:
        self._open.append((batch, asyncio.get_running_loop().create_future()))
        return self._open[-1][1]

    def complete(self, steps: int) -> None:
        for _ in range(steps):
            batch, future = self._open.popleft()
            future.set_result(self._device.step(batch))
            self._on_step()

    async def close(self) -> None:
        self.complete(len(self._open))


@asynccontextmanager
async def manual_engine() -> AsyncIterator[tuple[AsyncEngine, Manual]]:
    executor: Any = Manual()
    async with AsyncEngine(
        "fake", executor=executor, tokenizer=ByteTokenizer(), chat_template=FakeTemplate()
    ) as engine:
        try:
            yield engine, executor
        finally:
            executor.complete(len(executor._open))


@pytest.mark.anyio
async def test_readers_run_between_two_steps_that_are_over_at_once() -> None:
    async with manual_engine() as (engine, executor):
        generation = engine.generate("Hi", GenerationConfig(max_new_tokens=8, ignore_eos=True))
        reading = asyncio.create_task(anext(generation))  # type: ignore[arg-type]
        await until(lambda: engine.stats().steps_in_flight == 2)
        executor.complete(1)
        assert len((await reading).token_ids) == 1
        reading = asyncio.create_task(anext(generation))  # type: ignore[arg-type]
        await until(lambda: generation._delivery._waiter is not None)
        executor.complete(2)
        assert engine.stats().steps_in_flight == 2, "the second is read after the reader of the first has run"
        assert len((await reading).token_ids) == 1
        await until(lambda: engine.stats().steps == 5)
        assert len((await anext(generation)).token_ids) == 1
        generation.cancel()
        await until(lambda: not engine.stats().running)


@pytest.mark.anyio
async def test_turns_take_place_in_no_request_s_context() -> None:
    who: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="unset")
    seen = set()
    async with FakeEngine("x" * 20) as engine:
        engine.observers.append(lambda _: seen.add(who.get()))
        who.set("the request")
        await engine.generate("Hi")
        generation = engine.generate("Hi")
        await generation.start()
        await generation.aclose()
    assert seen == {"unset"}


def test_the_first_step_of_a_burst_has_all_of_it() -> None:
    """More prompts than the gate lets in at once, while nothing is on the device; a lone one waits for none."""
    answer = GenerationConfig(max_new_tokens=2)

    async def main(loop: CountingLoop) -> None:
        async with FakeEngine("x" * 100, EngineConfig(max_batch_size=64), num_blocks=512, num_slots=64) as engine:
            batches = engine.executor.batches
            count = 3 * MAX_PER_ITERATION + 1
            await asyncio.gather(*(engine.generate("Hi", answer).response() for _ in range(count)))
            assert [len(batch.prefill) for batch in batches] == [count, 0]

            launched = len(batches)
            generation = engine.generate("Hi", answer)
            await generation.start()
            await asyncio.sleep(0)
            assert len(batches) > launched
            await generation.response()

    run_counted(main)


def test_a_burst_without_end_does_not_keep_the_device_idle() -> None:
    async def main(loop: CountingLoop) -> None:
        gate = RequestGate(1)
        async with FakeEngine("x" * 100, EngineConfig(max_batch_size=64), num_blocks=512, num_slots=64) as engine:
            assert engine._lifecycle._loop is not None
            engine._lifecycle._loop._inbox.gate = engine._lifecycle.encoder.gate = gate
            answers = [engine.generate("Hi", GenerationConfig(max_new_tokens=2)).response() for _ in range(64)]
            await asyncio.gather(*answers)
            assert 1 < len(engine.executor.batches[0].prefill) <= MAX_PUT_OFF + 1

    run_counted(main)
