"""Leaving early, in any way and at any moment, frees row and blocks and disturbs no other request."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from asyncllm.config import EngineConfig, GenerationConfig
from asyncllm.engine.requests.generation import Generation
from asyncllm.errors import EngineClosed
from asyncllm.testing import FakeEngine, hash_oracle
from tests.engine.waits import settle

pytestmark = pytest.mark.anyio

SETTINGS = GenerationConfig(max_new_tokens=6, random_seed=3, top_k=0)
LONG = GenerationConfig(max_new_tokens=60)


def new_engine(*, max_loras: int = 0, **device: Any) -> FakeEngine:
    settings = {"oracle": hash_oracle(256), "num_blocks": 128, "block_size": 4, **device}
    config = EngineConfig(max_batch_size=6, max_prefill_token_num=8, max_loras=max_loras)
    return FakeEngine(backend_config=config, **settings)


async def by_break(engine: FakeEngine) -> None:
    async for _ in engine.generate("Hi", LONG):
        break


async def by_the_task_that_it_is_the_coroutine_of(engine: FakeEngine) -> None:
    task = asyncio.create_task(engine.generate("Hi", LONG))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_close_of_a_coroutine(engine: FakeEngine) -> None:
    generation = engine.generate("Hi", LONG)
    generation.send(None)
    generation.close()


async def by_aclose(engine: FakeEngine) -> None:
    generation = engine.generate("Hi", LONG)
    await anext(generation)
    await asyncio.gather(generation.aclose(), generation.aclose())
    await generation.aclose()


async def by_context(engine: FakeEngine) -> None:
    async with engine.generate("Hi", LONG) as generation:
        await anext(generation)


async def by_exception(engine: FakeEngine) -> None:
    async def read() -> None:
        async for _ in engine.generate("Hi", LONG):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await read()


async def by_task_cancel(engine: FakeEngine) -> None:
    task = asyncio.create_task(engine.generate("Hi", LONG).response())
    await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_timeout(engine: FakeEngine) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await engine.generate("Hi", LONG)


async def by_sibling_task(engine: FakeEngine) -> None:
    async def fail() -> None:
        await asyncio.sleep(0.005)
        raise ZeroDivisionError

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(engine.generate("Hi", LONG).response())
            group.create_task(fail())

    with pytest.raises(ExceptionGroup):
        await both()


async def by_move_on(engine: FakeEngine) -> None:
    with anyio.move_on_after(0.01) as scope:
        async for _ in engine.generate("Hi", LONG):
            pass
    assert scope.cancelled_caught


async def by_dropping_it(engine: FakeEngine) -> None:
    generation = engine.generate("Hi", LONG)
    await anext(generation)
    del generation


async def by_collecting_a_cycle_in_another_thread(engine: FakeEngine) -> None:
    class Cycle:
        generation: Generation
        itself: Cycle

    async def enter() -> None:
        cycle = Cycle()
        cycle.itself, cycle.generation = cycle, engine.generate("Hi", LONG)
        await anext(cycle.generation)

    await enter()
    before = engine.stats().running
    thread = threading.Thread(target=gc.collect)
    thread.start()
    while thread.is_alive():  # noqa: ASYNC110 - a thread's end has no awaitable
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.002)  # the finalizer's call into the loop, and the loop's turn
    assert before > 0
    assert engine.stats().requests_cancelled == 1


async def by_stop_session(engine: FakeEngine) -> None:
    generation = engine.generate("Hi", LONG, session_id=4)
    await anext(generation)
    await engine.stop_session(4)
    assert [chunk.finish_reason async for chunk in generation][-1] == "abort"


async def by_leaving_a_batch(engine: FakeEngine) -> None:
    async for _ in engine.stream_infer(["one", "two", "three"], LONG):
        break


async def by_cancelling_a_batch(engine: FakeEngine) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await engine.batch_infer(["one", "two", "three"], LONG)


async def by_cancelling_before_it_is_scheduled(engine: FakeEngine) -> None:
    generation = engine.generate("Hi", LONG)
    await generation.start()
    generation.cancel()
    generation.cancel()


async def by_dropping_it_before_it_is_scheduled(engine: FakeEngine) -> None:
    generation = engine.generate("Hi", LONG)
    await generation.start()
    del generation


async def by_never_starting_it(engine: FakeEngine) -> None:
    engine.generate("Hi", LONG)
    await engine.generate("Hi", LONG).aclose()


async def by_leaving_several_answers(engine: FakeEngine) -> None:
    async for _ in engine.generate("Hi", GenerationConfig(max_new_tokens=60, n=3)):
        break


ROUTES = [value for name, value in globals().items() if name.startswith("by_")]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)
async def test_every_way_out_frees_the_row_at_once(route: Callable[[FakeEngine], Awaitable[None]]) -> None:
    async with new_engine(latency=0.001) as engine:
        expected = (await engine.generate("neighbour", LONG)).token_ids
        neighbour = asyncio.create_task(engine.generate("neighbour", LONG).response())
        await asyncio.sleep(0.01)
        await route(engine)
        for _ in range(4):
            await asyncio.sleep(0)
        stats = engine.stats()
        assert stats.running + stats.waiting == (not neighbour.done()), "only the neighbour may be left"
        assert (await neighbour).token_ids == expected
        await settle(engine)


async def test_rows_come_back_without_a_step_and_blocks_with_those_in_flight() -> None:
    async with new_engine() as engine:
        engine.executor.pause()
        generation = engine.generate("Hi", LONG)
        await generation.start()
        await asyncio.sleep(0.01)
        stats = engine.stats()
        assert (stats.running, stats.steps_in_flight) == (1, 2)
        await generation.aclose()
        stats = engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert stats.blocks_held > 0, "steps in flight may still write them"
        engine.executor.resume()
        await settle(engine)
        assert len(engine.executor.batches) == 2


async def test_engine_close_is_a_way_out_too() -> None:
    engine = new_engine(latency=0.001)
    await engine.start()
    generation = engine.generate("Hi", LONG)
    await anext(generation)
    await engine.close()
    with pytest.raises(EngineClosed):
        async for _ in generation:
            pass
    await generation.aclose()


async def test_an_answer_outlives_the_handle_of_its_engine() -> None:
    async with new_engine() as engine:
        generation = engine.generate("Hi", SETTINGS)
        await anext(generation)
        assert sys.getrefcount(generation) == 2, "only this test refers to it"


async def test_closing_from_another_task_while_a_long_prompt_is_encoded() -> None:
    async with new_engine(max_position=100_000, num_blocks=100_000) as engine:
        generation = engine.generate("x" * 20_000, SETTINGS)
        start = asyncio.create_task(generation.start())
        await asyncio.sleep(0)
        await generation.aclose()
        await start
        assert [chunk async for chunk in generation] == []
        assert engine.stats().requests_started == 0
        await settle(engine)


async def test_a_thousand_aborts_at_any_phase_leave_nothing() -> None:
    async with new_engine() as engine:
        tasks = []
        for number in range(1000):
            tasks.append(asyncio.create_task(engine.generate(f"q{number % 7}", LONG).response()))
            if number % 3 == 0:
                await asyncio.sleep(0)
            if number >= 20:
                tasks[number - number % 20].cancel()
                tasks[number - 10].cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await settle(engine)
        assert (await engine.generate("after", SETTINGS)).finish_reason == "length"
