"""A bounded queue: refused at once, with a time to come back, and nothing left behind."""

from __future__ import annotations

import asyncio

import pytest

from asyncllm.config import EngineConfig, GenerationConfig
from asyncllm.engine.schedule.backpressure import MAX_RETRY_S, MIN_RETRY_S, Backpressure
from asyncllm.errors import QueueFull
from asyncllm.testing import FakeEngine, hash_oracle
from asyncllm.types import Response
from tests.engine.waits import settle

LONG = GenerationConfig(max_new_tokens=1000, ignore_eos=True)


async def cancel(*tasks: asyncio.Task[Response]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def refusal(bounds: Backpressure, requests: int, tokens: int, new_tokens: int, now: float = 0.0) -> QueueFull:
    with pytest.raises(QueueFull) as caught:
        bounds.check(requests, tokens, new_tokens, now)
    return caught.value


class TestBounds:
    def test_none_by_default(self) -> None:
        Backpressure().check(10**6, 10**9, 10**6, 0.0)

    def test_requests(self) -> None:
        bounds = Backpressure(max_requests=3)
        bounds.check(2, 10**9, 10**9, 0.0)
        refusal(bounds, 3, 30, 1)

    def test_tokens(self) -> None:
        bounds = Backpressure(max_tokens=100)
        bounds.check(10**6, 90, 10, 0.0)
        refusal(bounds, 1, 90, 11)

    def test_a_request_that_finds_an_empty_queue_is_never_too_large(self) -> None:
        Backpressure(max_requests=1, max_tokens=100).check(0, 0, 10**6, 0.0)

    def test_a_part_of_the_queue(self) -> None:
        bounds = Backpressure(max_requests=10, max_tokens=100)
        assert bounds.has_room(0.3, 2, 20, 10)
        assert not bounds.has_room(0.3, 3, 20, 10)
        assert not bounds.has_room(0.3, 2, 20, 11)
        assert not bounds.has_room(0.0, 0, 0, 0)
        assert Backpressure(max_requests=10).has_room(0.01, 0, 10**6, 10**6)
        assert Backpressure(max_tokens=100).has_room(0.5, 10**6, 0, 50)

    def test_retry_after_is_the_measured_time_for_as_much_as_is_too_much(self) -> None:
        bounds = Backpressure(max_requests=10, max_tokens=1000)
        for end in range(1, 5):
            bounds.request_ended(2.0 * end)
        # 4 ends in the 6 s since the first: 1.5 s each.
        assert refusal(bounds, 10, 500, 1, now=8.0).retry_after == 1.5
        assert refusal(bounds, 13, 500, 1, now=8.0).retry_after == 6.0
        # 500 tokens too many, of requests of 100 tokens on average: 5 ends.
        assert refusal(bounds, 9, 900, 600, now=8.0).retry_after == pytest.approx(7.5)
        assert refusal(bounds, 10, 500, 1, now=48.0).retry_after == 11.5, "nothing has ended since"

    def test_retry_after_is_a_time_that_clients_accept(self) -> None:
        bounds = Backpressure(max_requests=1)
        assert refusal(bounds, 1, 1, 1).retry_after == MIN_RETRY_S
        bounds.request_ended(0.0)
        assert refusal(bounds, 1, 1, 1, now=1e-3).retry_after == MIN_RETRY_S
        assert refusal(bounds, 1000, 1, 1, now=1e6).retry_after == MAX_RETRY_S


@pytest.mark.anyio
class TestEngine:
    def engine(self, **settings: int) -> FakeEngine:
        config = EngineConfig(max_batch_size=2, **settings)
        return FakeEngine(None, config, oracle=hash_oracle(256), max_position=512)

    async def test_too_many_requests(self) -> None:
        async with self.engine(max_queued_requests=3) as engine:
            tasks = [asyncio.create_task(engine.generate("Hi", LONG).response()) for _ in range(5)]
            await asyncio.sleep(0.01)
            assert (engine.stats().running, engine.stats().queued_requests) == (2, 3)
            for _ in range(3):
                with pytest.raises(QueueFull, match="max_queued_requests=3") as caught:
                    await engine.generate("Hi", LONG)
                assert MIN_RETRY_S <= caught.value.retry_after <= MAX_RETRY_S
            stats = engine.stats()
            assert (stats.requests_started, stats.requests_refused, stats.queued_requests) == (5, 3, 3)
            assert len(engine.running().requests) == 5
            await cancel(tasks[2])
            late = asyncio.create_task(engine.generate("Hi", LONG).response())
            await asyncio.sleep(0.005)
            assert engine.stats().queued_requests == 3
            await cancel(late, *tasks)
            await settle(engine)

    async def test_a_burst_that_fits_the_free_rows_is_not_refused(self) -> None:
        async with self.engine(max_queued_requests=1) as engine:
            answers = await asyncio.gather(*(engine.generate("Hi", GenerationConfig(max_new_tokens=3)) for _ in "abc"))
            assert len(answers) == 3

    async def test_too_many_tokens(self) -> None:
        async with self.engine(max_queued_tokens=100) as engine:
            tasks = [
                asyncio.create_task(engine.generate(input_ids=[7] * 40, gen_config=LONG).response()) for _ in "abcd"
            ]
            await asyncio.sleep(0.01)
            assert engine.stats().queued_tokens == 80
            with pytest.raises(QueueFull, match="max_queued_tokens=100"):
                await engine.generate(input_ids=[7] * 21, gen_config=LONG)
            tasks.append(asyncio.create_task(engine.generate(input_ids=[7] * 20, gen_config=LONG).response()))
            await asyncio.sleep(0.01)
            assert engine.stats().queued_tokens == 100
            await cancel(*tasks)
            await settle(engine)

    async def test_a_session_that_was_refused_is_as_before(self) -> None:
        async with self.engine(max_queued_requests=1) as engine:
            session = engine.session()
            await session.chat("one", GenerationConfig(max_new_tokens=3))
            before, history = list(session.token_ids), session.history
            tasks = [asyncio.create_task(engine.generate("Hi", LONG).response()) for _ in "abc"]
            await asyncio.sleep(0.01)
            options = {"session_id": session.id, "sequence_start": False}
            with pytest.raises(QueueFull):
                await engine.generate("two", sequence_end=False, step=4, **options)
            with pytest.raises(QueueFull):
                await engine.generate("two", **options)
            assert (session.token_ids, session.history) == (before, history)
            await cancel(*tasks)
            await settle(engine)
            await session.chat("two", GenerationConfig(max_new_tokens=3))
            assert len(session.history) == 2

    async def test_a_salted_session_finds_its_blocks_again(self) -> None:
        async with self.engine() as engine:
            settings = GenerationConfig(max_new_tokens=8, ignore_eos=True)
            session = engine.session()
            await session.chat("one two three four", settings, cache_salt="a")
            again = await session.chat("five", settings, cache_salt="a")
            assert again.cached_token_len > 16
            await settle(engine)
            cache = engine.running().scheduler.prefix_cache
            assert cache is not None
            assert cache._idle_pinned, "its blocks are not pinned"
            other = await engine.generate(input_ids=session.token_ids, gen_config=settings)
            assert other.cached_token_len == 0
