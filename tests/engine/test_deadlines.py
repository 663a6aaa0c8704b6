"""A request's timeout ends it in every phase within a step, by a typed error, and disturbs no other request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncllm.config import EngineConfig, GenerationConfig
from asyncllm.engine.schedule.sequence import SequenceState
from asyncllm.errors import DeadlineExceeded, RequestFailed
from asyncllm.testing import FakeEngine, hash_oracle
from asyncllm.types import Chunk
from tests.engine.waits import settle, until

pytestmark = pytest.mark.anyio

LONG = GenerationConfig(max_new_tokens=1000, ignore_eos=True)
SHORT = GenerationConfig(max_new_tokens=4, ignore_eos=True)


def new_engine(*, rows: int = 1, **device: Any) -> FakeEngine:
    settings = {"oracle": hash_oracle(256), "num_blocks": 300, **device}
    return FakeEngine(None, EngineConfig(max_batch_size=rows, max_prefill_token_num=8), **settings)


async def test_while_it_waits_it_costs_no_step() -> None:
    async with new_engine() as engine:
        async with engine.generate("Hi", LONG) as running:
            await anext(running)
            with pytest.raises(DeadlineExceeded, match="no token yet"):
                await engine.generate("in vain", timeout=0.01)
            assert engine.stats().queued_requests == 0
            await anext(running)
        await settle(engine)
        stats = engine.stats()
        assert (stats.requests_expired, stats.requests_cancelled, stats.requests_failed) == (1, 1, 0)
        assert all(bytes(row.tokens).find(b"in v") < 0 for batch in engine.executor.batches for row in batch.prefill), (
            "it was computed"
        )


async def test_while_its_prompt_is_computed() -> None:
    async with new_engine(latency=0.002) as engine:
        generation = engine.generate("x" * 900, LONG, timeout=0.05)
        async with generation:
            await until(lambda: engine.stats().running)
            request = engine.running().requests[0]
            assert request.sequences[0].state is SequenceState.PREFILL
            with pytest.raises(DeadlineExceeded, match="no token yet"):
                async for _ in generation:
                    pass
        await settle(engine)
        assert 8 <= engine.stats().prefill_tokens < 900


@pytest.mark.parametrize("streaming", [True, False])
async def test_while_it_decodes_what_there_is_comes_first(streaming: bool) -> None:
    async with new_engine(latency=0.001) as engine:
        chunks: list[Chunk] = []

        async def read() -> None:
            async for chunk in engine.generate("Hi", LONG, timeout=0.05, stream_response=streaming):
                chunks.append(chunk)

        with pytest.raises(DeadlineExceeded, match="its answer had"):
            await read()
        assert chunks[-1].finish_reason == "error"
        assert sum(len(chunk.token_ids) for chunk in chunks) == chunks[-1].generate_token_len > 0
        await settle(engine)


async def test_after_it_was_preempted() -> None:
    async with new_engine(rows=2, latency=0.001) as engine:
        first = asyncio.create_task(engine.generate("Hi", LONG).response())
        await until(lambda: engine.stats().running)
        async with engine.generate("Ho", LONG, timeout=0.1) as second:
            scheduler, (_, request) = engine.running().scheduler, engine.running().requests
            await until(lambda: request.sequences[0].state is SequenceState.DECODE)
            scheduler._preempt(request.sequences[0])
            scheduler.admission.max_running = 1  # keeps it waiting
            with pytest.raises(DeadlineExceeded, match="its answer had"):
                await second
        assert not first.done()
        first.cancel()
        await asyncio.wait([first])
        await settle(engine)


async def test_within_a_step_of_a_late_device() -> None:
    async with new_engine() as engine:
        async with engine.generate("Hi", LONG, timeout=0.02) as generation:
            await anext(generation)
            engine.executor.pause()
            with pytest.raises(DeadlineExceeded):
                async for _ in generation:
                    pass
            late = engine.stats()
            engine.executor.advance(late.steps_in_flight)
            await settle(engine)
        engine.executor.resume()
        assert late.running == 0
        assert late.steps_in_flight == 2
        assert late.blocks_held > 0, "the steps in flight may still write them"


async def test_it_is_a_timeout_error_and_a_failed_request() -> None:
    async with new_engine() as engine:
        for kind in (TimeoutError, RequestFailed):
            with pytest.raises(kind):
                await engine.generate("Hi", LONG, timeout=0.005)
        await settle(engine)


async def test_a_prompt_that_took_too_long_to_encode_is_never_queued() -> None:
    async with new_engine(max_position=40_000, num_blocks=10_000) as engine:
        with pytest.raises(DeadlineExceeded, match="encoded"):
            await engine.generate("x" * 20_000, timeout=1e-6)
        await settle(engine)
        assert engine.stats().steps == 0


async def test_an_answer_in_time_leaves_no_timer() -> None:
    async with new_engine() as engine:
        answer = await engine.generate("Hi", SHORT, timeout=3600)
        assert answer.finish_reason == "length"
        loop = engine.running()
        assert not loop.requests
        assert not [
            handle for handle in getattr(asyncio.get_running_loop(), "_scheduled", ()) if not handle.cancelled()
        ]


async def test_the_others_of_a_batch_go_on() -> None:
    async with new_engine(latency=0.001) as engine:
        answers = await engine.batch_infer(["a", "b", "c"], [SHORT, LONG, SHORT], timeout=0.1)
        assert [answer.finish_reason for answer in answers] == ["length", "error", "error"]
        assert "timeout" in (answers[1].error_message or "")
        ends = [chunk async for chunk in engine.stream_infer(["a", "b"], [SHORT, LONG], timeout=0.1)]
        assert {chunk.index: chunk.finish_reason for chunk in ends if chunk.finish_reason} == {0: "length", 1: "error"}
        await settle(engine)


async def test_all_answers_to_a_prompt_end_at_once() -> None:
    async with new_engine(rows=4, latency=0.001) as engine:
        with pytest.raises(DeadlineExceeded):
            await engine.generate("Hi", GenerationConfig(n=4, max_new_tokens=900, ignore_eos=True), timeout=0.03)
        await settle(engine)


async def test_a_session_keeps_what_was_said_in_time() -> None:
    async with new_engine(latency=0.001) as engine:
        session = engine.session()
        await session.chat("one", SHORT)
        with pytest.raises(DeadlineExceeded):
            await session.chat("two", LONG, timeout=0.05)
        assert [prompt for prompt, _ in session.history] == ["one", "two"]
        assert session.response is not None
        assert session.response.generate_token_len > 0
        assert (await session.chat("three", SHORT)).finish_reason == "length"
        await settle(engine)
