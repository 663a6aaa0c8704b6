"""Responses that are computed while no client waits, as OpenAI's own client sees them."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from asyncllm.server.http.errors import ApiError
from asyncllm.server.responses import background, event_log
from asyncllm.server.responses.event_log import EventLog
from asyncllm.testing import FakeEngine
from tests.engine.waits import until
from tests.server.serving import Served, serving

pytestmark = pytest.mark.anyio

ANSWER = "A long answer to a short question."


async def finished(served: Served) -> None:
    async with asyncio.timeout(30):
        await until(lambda: not served.service.state.in_work)


async def test_it_is_computed_without_a_client_and_polled() -> None:
    engine = FakeEngine(ANSWER)
    async with serving(engine) as served, served.openai() as client:
        engine.executor.pause()
        first = await client.responses.create(model="fake", input="Hi", background=True)
        assert (first.status, first.background, first.output) == ("queued", True, [])
        with pytest.raises(openai.BadRequestError, match="not finished") as caught:
            await client.responses.create(model="fake", input="And?", previous_response_id=first.id)
        assert caught.value.param == "previous_response_id"
        assert (await client.responses.retrieve(first.id)).status in ("queued", "in_progress")
        (item,) = (await client.responses.input_items.list(first.id)).data
        assert item.type == "message"
        assert served.service.state.in_work == 1
        engine.executor.advance(1000)
        await finished(served)
        assert served.service.state.in_work == 0
        done = await client.responses.retrieve(first.id)
        assert (done.id, done.status, done.output_text) == (first.id, "completed", ANSWER)
        assert done.usage is not None
        assert done.usage.output_tokens == len(ANSWER) + 1
        with pytest.raises(openai.BadRequestError, match="no events"):
            await client.responses.retrieve(first.id, stream=True)
        second = await client.responses.create(model="fake", input="And?", previous_response_id=first.id)
        assert second.status == "completed"
        assert not second.background
        with pytest.raises(openai.BadRequestError, match="Only background"):
            await client.responses.cancel(second.id)
        engine.check_idle()


async def test_a_stream_goes_on_behind_what_was_seen() -> None:
    engine = FakeEngine(ANSWER)
    async with serving(engine) as served, served.openai() as client:
        engine.executor.pause()
        engine.executor.advance(6)
        seen: list[Any] = []
        stream = await client.responses.create(model="fake", input="Hi", background=True, stream=True)
        async for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        kinds = [event.type.removeprefix("response.") for event in seen]
        assert kinds[:4] == ["created", "queued", "in_progress", "output_item.added"]
        response_id = seen[0].response.id
        engine.executor.advance(1000)
        running = await client.responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number)
        rest = [event async for event in running]
        whole = [event async for event in await client.responses.retrieve(response_id, stream=True)]
        assert [event.to_dict() for event in whole] == [event.to_dict() for event in [*seen, *rest]]
        assert [event.sequence_number for event in whole] == list(range(len(whole)))
        assert whole[-1].type == "response.completed"
        assert whole[-1].response.output_text == ANSWER
        last = await client.responses.retrieve(response_id, stream=True, starting_after=len(whole) - 2)
        assert [event.type async for event in last] == ["response.completed"]
        for query in ("stream=yes", "starting_after=1", "stream=true&starting_after=x"):
            status, _ = await served.get(f"/v1/responses/{response_id}?{query}")
            assert status == 400
        await finished(served)


@pytest.mark.parametrize("stream", [False, True])
async def test_it_is_cancelled_and_deleted(stream: bool) -> None:
    engine = FakeEngine(ANSWER)
    async with serving(engine) as served, served.openai() as client:
        engine.executor.pause()
        engine.executor.advance(5)
        ids = []
        for _ in range(2):
            if stream:
                events = await client.responses.create(model="fake", input="Hi", background=True, stream=True)
                ids.append((await anext(events)).response.id)
                await events.close()
            else:
                ids.append((await client.responses.create(model="fake", input="Hi", background=True)).id)
        cancelling = asyncio.create_task(client.responses.cancel(ids[0]))
        gone = asyncio.create_task(client.responses.delete(ids[1]))
        cancelled = await cancelling
        await gone
        engine.executor.advance(1000)
        assert (cancelled.id, cancelled.status) == (ids[0], "cancelled")
        assert (await client.responses.cancel(ids[0])).status == "cancelled"
        assert (await client.responses.retrieve(ids[0])).status == "cancelled"
        if stream:
            *_, last = [event async for event in await client.responses.retrieve(ids[0], stream=True)]
            assert last.to_dict()["type"] == "response.cancelled"
        with pytest.raises(openai.BadRequestError, match="cancelled"):
            await client.responses.create(model="fake", input="And?", previous_response_id=ids[0])
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(ids[1])
        with pytest.raises(openai.NotFoundError):
            await client.responses.cancel("resp_unknown")
        async with asyncio.timeout(30):
            await until(lambda: not engine.stats().running)
        engine.check_idle()


async def test_a_failure_is_kept_and_too_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MAX_OPEN", 1)
    engine = FakeEngine(ANSWER, fail_at=4)
    async with serving(engine) as served, served.openai() as client:
        engine.executor.pause()
        first = await client.responses.create(model="fake", input="Hi", background=True)
        with pytest.raises(openai.RateLimitError):
            await client.responses.create(model="fake", input="Hi", background=True)
        engine.executor.advance(1000)
        await finished(served)
        failed = await client.responses.retrieve(first.id)
        assert failed.status == "failed"
        assert failed.error is not None
        assert failed.error.message


async def test_other_keys_see_nothing_and_a_drain_waits() -> None:
    engine = FakeEngine(ANSWER)
    async with serving(engine, api_keys=["one", "two"]) as served:
        async with served.openai(api_key="one") as client, served.openai(api_key="two") as other:
            engine.executor.pause()
            first = await client.responses.create(model="fake", input="Hi", background=True)
            for call in (other.responses.retrieve, other.responses.cancel, other.responses.delete):
                with pytest.raises(openai.NotFoundError):
                    await call(first.id)
            served.service.state.stop.set()
            await asyncio.sleep(0.05)
            assert not served.task.done()
            assert (await client.responses.retrieve(first.id)).status in ("queued", "in_progress")
            engine.executor.advance(1000)
        async with asyncio.timeout(30):
            await served.task


async def test_a_log_keeps_the_latest_events_and_tells_who_comes_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MAX_BYTES", 10)
    log = EventLog()
    log.add([b"0000", b"1111"])
    slow = log.read(0, 30.0)
    assert await anext(slow) == b"00001111"
    log.add([b"2222", b"3333", b"4444"])
    assert log.size <= 10
    with pytest.raises(ApiError, match="number 3"):
        await anext(slow)
    with pytest.raises(ApiError):
        log.check(0)
    patient = log.read(4, 0.01)
    assert [await anext(patient), await anext(patient)] == [b"4444", b""]
    log.end()
    assert [piece async for piece in patient] == []
