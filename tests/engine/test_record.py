"""The record that observers get of an ended request, and observers that fail."""

from __future__ import annotations

import asyncio
import time

import pytest

from asyncllm.config import EngineConfig, GenerationConfig
from asyncllm.errors import RequestFailed
from asyncllm.testing import FakeEngine
from asyncllm.types import RequestRecord

pytestmark = pytest.mark.anyio


async def test_an_answered_request_has_been_through_all_stages_in_order() -> None:
    records: list[RequestRecord] = []
    began = time.monotonic()
    async with FakeEngine({"ping": "pong"}) as engine:
        engine.observers.append(records.append)
        await engine.generate("ping")
        await engine.generate("ping", GenerationConfig(n=2, max_new_tokens=3))
        stats = engine.stats()
    first, second = records
    assert first.admitted is not None
    assert first.prefilled is not None
    assert began <= first.arrived <= first.queued <= first.admitted < first.prefilled < first.ended <= time.monotonic()
    assert first.finish_reasons == ("stop",)
    assert (first.generated_tokens, first.longest_answer) == (5, 5)  # four bytes and the end of sequence
    assert (first.cached_tokens, second.cached_tokens) == (0, second.prompt_tokens // 4 * 4)
    assert second.finish_reasons == ("length", "length")
    assert (second.generated_tokens, second.longest_answer) == (6, 3)
    assert stats.sampled_tokens == 5 + 6


async def test_a_request_that_leaves_the_queue_was_never_admitted() -> None:
    records: list[RequestRecord] = []
    async with FakeEngine("x" * 50, EngineConfig(max_batch_size=1)) as engine:
        engine.observers.append(records.append)
        engine.executor.pause()
        running, waiting = engine.generate("a"), engine.generate("b")
        await running.start()
        await waiting.start()
        await waiting.aclose()
        engine.executor.resume()
        await running
    left, answered = records
    assert (left.admitted, left.prefilled, left.finish_reasons, left.generated_tokens) == (None, None, ("abort",), 0)
    assert answered.finish_reasons == ("stop",)


@pytest.mark.parametrize("error", [ValueError("mine"), asyncio.CancelledError("mine")], ids=repr)
async def test_failing_observers_harm_no_request(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    def fail(record: RequestRecord) -> None:
        raise error

    async with FakeEngine("answer") as engine:
        engine.observers.append(fail)
        responses = await asyncio.wait_for(asyncio.gather(*(engine.generate("Hi").response() for _ in range(3))), 10)
        assert [response.text for response in responses] == ["answer"] * 3
    assert caplog.text.count("An observer of ended requests failed.") == 3


@pytest.mark.parametrize("at_end", [False, True])
async def test_a_failing_listener_harms_no_other_request(at_end: bool) -> None:
    async with FakeEngine("x" * 50, delay_per_token=0.001) as engine:
        other = asyncio.create_task(engine.generate("Hi").response())
        heard = engine.generate("Hi", GenerationConfig(max_new_tokens=5))
        await heard.start()

        def fail() -> None:
            if heard.ended or not at_end:
                raise ValueError("mine")

        heard.listen(fail)
        with pytest.raises((RequestFailed, ValueError), match="mine"):
            await heard
        assert (await other).text == "x" * 50
        engine.check_running()


async def test_a_failure_is_a_reason_and_a_failing_observer_harms_no_request(caplog: pytest.LogCaptureFixture) -> None:
    records: list[RequestRecord] = []

    def fail(record: RequestRecord) -> None:
        raise ValueError("no room for this record")

    async with FakeEngine(row_failure=lambda prompt: "not finite") as engine:
        engine.observers += [fail, records.append]
        with pytest.raises(RequestFailed):
            await engine.generate("ping")
    assert [record.finish_reasons for record in records] == [("error",)]
    assert "no room for this record" in caplog.text
