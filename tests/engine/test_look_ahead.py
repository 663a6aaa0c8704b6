"""Steps launched far ahead of those that are read: how many, when, and that no answer changes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from asyncllm.config import EngineConfig, GenerationConfig
from asyncllm.testing import FakeEngine, hash_oracle
from tests.engine.test_async_engine import until
from tests.engine.test_cancellation import LONG, ROUTES, settle

pytestmark = pytest.mark.anyio

AHEAD = 5


def new_engine(depth: int = AHEAD, num_host_blocks: int = 0, **device: Any) -> FakeEngine:
    """With blocks on the host, preempted sequences are swapped."""
    settings = {"oracle": hash_oracle(256), "num_blocks": 128, "block_size": 4, **device}
    config = EngineConfig(
        max_batch_size=6, max_prefill_token_num=64, eviction_type="copy" if num_host_blocks else "recompute"
    )
    return FakeEngine(backend_config=config, max_steps_in_flight=depth, num_host_blocks=num_host_blocks, **settings)


async def test_as_many_steps_as_the_device_allows_are_in_flight() -> None:
    async with new_engine() as engine:
        engine.executor.pause()
        async with engine.generate("Hi", LONG) as generation:
            await until(lambda: len(engine.executor.batches) == AHEAD)
            engine.executor.advance(1)
            await anext(generation)
            await until(lambda: engine.stats().steps_in_flight == AHEAD)
            assert (len(engine.executor.batches), engine.executor.num_completed) == (AHEAD + 1, 1)
            engine.executor.resume()
            async for _ in generation:
                pass
        assert engine.executor.max_in_flight == AHEAD


@pytest.mark.parametrize("depth", [1, 2])
async def test_no_more_than_the_device_allows(depth: int) -> None:
    async with new_engine(depth) as engine:
        await asyncio.gather(*(engine.generate(f"q{number}", LONG).response() for number in range(9)))
        assert engine.executor.max_in_flight == depth


async def test_a_waiting_request_is_admitted_behind_one_step_and_not_behind_many() -> None:
    async with new_engine() as engine:
        engine.executor.pause()
        first = asyncio.create_task(engine.generate("one", LONG).response())
        await until(lambda: len(engine.executor.batches) == AHEAD)
        second = asyncio.create_task(engine.generate("two", LONG).response())
        await until(lambda: engine.stats().waiting == 1)
        for completed in range(1, AHEAD - 1):
            engine.executor.advance(1)
            await until(lambda completed=completed: engine.stats().steps_in_flight == AHEAD - completed)  # type: ignore[misc]
            assert len(engine.executor.batches) == AHEAD, "nothing is launched in front of the prompt"
        engine.executor.advance(1)
        await until(lambda: len(engine.executor.batches) > AHEAD)
        assert engine.executor.batches[AHEAD].prefill
        # Nobody waits any more.
        await until(lambda: engine.stats().steps_in_flight == AHEAD)
        engine.executor.resume()
        await asyncio.gather(first, second)
        await settle(engine)


async def test_with_a_full_house_two_steps_are_in_flight() -> None:
    """Rows that end are replaced at once, not behind steps in which they are missing."""
    async with new_engine() as engine:
        tasks = [asyncio.create_task(engine.generate(f"q{number}", LONG).response()) for number in range(7)]
        await until(lambda: engine.stats().running == 6 and engine.stats().steps_in_flight <= 2)
        seen = set()
        while engine.stats().waiting:
            seen.add(engine.stats().steps_in_flight)
            await asyncio.sleep(0)
        assert max(seen) <= 2
        await asyncio.gather(*tasks)


async def answers(engine: FakeEngine) -> list[Any]:
    """Texts, tokens and reasons of requests of every kind."""
    several = GenerationConfig(max_new_tokens=12, n=3, temperature=1.0, top_k=0, random_seed=5)
    stopping = GenerationConfig(max_new_tokens=40, stop_words=["a", "\ufffd\ufffd\ufffd"], random_seed=1)
    scored = GenerationConfig(max_new_tokens=7, logprobs=1, prompt_logprobs=1, random_seed=1)
    plain = GenerationConfig(max_new_tokens=17, random_seed=1, min_new_tokens=3)
    async with engine.session() as session:
        responses = await asyncio.gather(
            *(engine.generate(f"{number} " * (1 + 5 * number), plain).response() for number in range(5)),
            engine.generate("several", several).response(),
            engine.generate("stopping", stopping).response(),
            engine.generate("scored", scored).response(),
            session.chat("one", plain).response(),
        )
        responses.append(await session.chat("two", plain))
        engine.check_idle()
    return [
        (response.text, [choice.token_ids for choice in response.choices], response.finish_reason, response.logprobs)
        for response in responses
    ]


@pytest.mark.parametrize("num_host_blocks", [0, 15, 200])
@pytest.mark.parametrize("num_blocks", [40, 400])
async def test_no_answer_depends_on_how_far_ahead_steps_are_launched(num_blocks: int, num_host_blocks: int) -> None:
    """With few blocks, sequences are preempted while steps that write their blocks are in flight."""
    found = []
    preemptions = swapped_in = 0
    for depth in (2, AHEAD, 8):
        device = {"num_blocks": num_blocks, "num_host_blocks": num_host_blocks, "oracle": hash_oracle(128)}
        async with new_engine(depth, **device) as engine:
            found.append(await answers(engine))
            preemptions += engine.stats().preemptions
            swapped_in += engine.stats().blocks_swapped_in
            await settle(engine)
    assert found[0] == found[1] == found[2]
    assert (preemptions > 0) == (num_blocks == 40)
    assert (swapped_in > 0) == (num_blocks == 40 and num_host_blocks > 0)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.__name__)
async def test_leaving_with_many_steps_in_flight(route: Callable[[FakeEngine], Awaitable[None]]) -> None:
    async with new_engine(latency=0.0005) as engine:
        expected = (await engine.generate("neighbour", LONG)).token_ids
        neighbour = asyncio.create_task(engine.generate("neighbour", LONG).response())
        await asyncio.sleep(0.003)
        await route(engine)
        assert (await neighbour).token_ids == expected
        await settle(engine)
        assert engine.executor.max_in_flight == AHEAD


async def test_cancelled_rows_come_back_with_the_last_step_that_may_write_them() -> None:
    async with new_engine() as engine:
        engine.executor.pause()
        generation = engine.generate("Hi", LONG)
        await generation.start()
        await until(lambda: engine.stats().steps_in_flight == AHEAD)
        await generation.aclose()
        engine.executor.advance(AHEAD - 1)
        await until(lambda: engine.stats().steps_in_flight == 1)
        assert engine.stats().blocks_held > 0
        engine.check_idle()
        engine.executor.resume()
        await settle(engine)
        assert engine.stats().blocks_held == 0
        assert len(engine.executor.batches) == AHEAD


async def test_the_engine_is_idle_right_after_the_last_answer() -> None:
    """Steps launched behind the one in which the answer ended belong to no request."""
    async with FakeEngine("pong", max_steps_in_flight=AHEAD, latency=0.002) as engine:
        assert (await engine.generate("ping")).text == "pong"
        assert engine.stats().steps_in_flight > 0
        engine.check_idle()
        await until(lambda: not engine.stats().steps_in_flight)
        engine.check_idle()


async def test_an_engine_is_not_idle_while_a_request_runs() -> None:
    async with new_engine() as engine:
        async with engine.generate("Hi", LONG) as generation:
            await anext(generation)
            with pytest.raises(AssertionError, match="1 requests are open"):
                engine.check_idle()
        await settle(engine)
        engine.running().scheduler.blocks.allocate(1)
        with pytest.raises(AssertionError, match="references"):
            engine.check_idle()
        engine.running().scheduler.blocks._release([engine.running().scheduler.blocks._references.index(1)])


async def test_closing_with_many_steps_in_flight() -> None:
    engine = new_engine(latency=0.001)
    await engine.start()
    generation = engine.generate("Hi", LONG)
    await anext(generation)
    await until(lambda: engine.stats().steps_in_flight == AHEAD)
    await engine.close()
    assert engine.executor.num_completed == len(engine.executor.batches)
    await generation.aclose()
