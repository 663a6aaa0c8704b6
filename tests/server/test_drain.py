"""Draining: running answers finish, new requests are refused, and no answer is cut off without an error."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncllm.server.http.server_state import Phase
from asyncllm.testing import FakeEngine
from tests.server.raw import connected, events_of, head, post, until
from tests.server.serving import Served, serving

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
PING: dict[str, Any] = {"messages": "ping"}
STREAM = {**PING, "stream": True}


def text_of(events: list[Any]) -> str:
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events)


async def running(served: Served, count: int) -> None:
    await until(lambda: served.engine.stats().running == count)


async def test_answers_that_run_finish_and_new_requests_go_elsewhere() -> None:
    engine = FakeEngine({"ping": "a long answer " * 5})
    engine.executor.pause()
    async with (
        serving(engine) as served,
        connected(served) as streamed,
        connected(served) as whole,
        connected(served) as idle,
    ):
        idle.send(head("GET", "/health/ready"))
        assert (await idle.answer()).status == 200
        streamed.send(post(CHAT, STREAM))
        whole.send(post(CHAT, PING))
        await running(served, 2)
        served.service.state.stop.set()
        await until(lambda: served.service.state.phase is Phase.DRAINING)
        for path, status in (("/health/ready", 503), ("/health/live", 200), ("/health", 200)):
            idle.send(head("GET", path))
            answer = await idle.answer()
            assert (answer.status, answer.json["status"]) == (status, "draining")
        idle.send(post(CHAT, PING))
        answer = await idle.answer()
        assert (answer.status, answer.json["error"]["code"]) == (503, "shutting_down")
        assert 1 <= int(answer.headers["retry-after"]) <= 120
        assert await idle.closed() == b""
        with pytest.raises(ConnectionError):
            async with connected(served):
                pass
        engine.executor.resume()
        events = events_of((await streamed.answer()).body)
        assert text_of(events) == "a long answer " * 5
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
        assert (await whole.answer()).json["choices"][0]["message"]["content"] == "a long answer " * 5
        async with asyncio.timeout(5):
            await served.task


async def test_a_server_at_rest_stops_at_once() -> None:
    async with serving(FakeEngine()) as served, connected(served) as idle:
        idle.send(post(CHAT, PING))
        assert (await idle.answer()).status == 200
        served.service.state.stop.set()
        async with asyncio.timeout(3):
            await served.task
        assert await idle.closed() == b""


async def test_a_large_answer_is_read_to_its_end() -> None:
    """An answer is in work until it is written, however slowly its client reads."""
    engine = FakeEngine("x" * 600)
    async with serving(engine) as served, connected(served, receive_buffer=4096) as wire:
        wire.send(post(CHAT, {**PING, "logprobs": True, "top_logprobs": 20, "n": 8}))
        await until(lambda: engine.stats().requests_finished == 1, 20)
        served.service.state.stop.set()
        await asyncio.sleep(0.1)
        assert served.service.state.in_work == 1
        answer = await wire.answer()
        assert len(answer.body) > 4_000_000
        assert len(answer.json["choices"]) == 8
        async with asyncio.timeout(5):
            await served.task


async def test_what_takes_too_long_ends_with_an_error_event() -> None:
    engine = FakeEngine("a long answer " * 20, delay_per_token=0.02)
    async with serving(engine, drain_timeout=0.2) as served, connected(served) as wire, connected(served) as whole:
        wire.send(post(CHAT, STREAM))
        whole.send(post(CHAT, PING))
        await running(served, 2)
        served.service.state.stop.set()
        await ends_with_an_error(wire)
        answer = await whole.answer()
        assert (answer.status, answer.json["error"]["code"]) == (503, "shutting_down")
        async with asyncio.timeout(5):
            await served.task


async def test_a_second_signal_ends_it_at_once() -> None:
    engine = FakeEngine("a long answer " * 20, delay_per_token=0.02)
    async with serving(engine, drain_timeout=600) as served:
        async with connected(served) as first, connected(served) as second:
            for wire in (first, second):
                wire.send(post(CHAT, STREAM))
            await running(served, 2)
            served.service.state.stop.set()
            await asyncio.sleep(0.1)
            assert not served.task.done()
            served.service.state.stop_now.set()
            for wire in (first, second):
                await ends_with_an_error(wire)
            async with asyncio.timeout(5):
                await served.task
        await until(lambda: served.service.state.in_work == 0)


async def test_a_client_that_does_not_read_holds_nothing_up_after_the_second_signal() -> None:
    engine = FakeEngine("x" * 600)
    async with serving(engine) as served, connected(served, receive_buffer=4096) as wire:
        wire.send(post(CHAT, {**STREAM, "logprobs": True, "top_logprobs": 20, "n": 8}))
        await until(lambda: engine.stats().requests_finished == 1, 20)
        served.service.state.stop.set()
        served.service.state.stop_now.set()
        async with asyncio.timeout(10):
            await served.task


async def test_the_delay_serves_while_ready_says_no() -> None:
    engine = FakeEngine({"ping": "pong"})
    async with serving(engine, drain_delay=30) as served:
        served.service.state.stop.set()
        await asyncio.sleep(0.05)
        assert (await served.get("/health/ready"))[0] == 503
        status, answer = await served.post(CHAT, PING)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "pong")
        assert not served.task.done()
        served.service.state.stop_now.set()
        async with asyncio.timeout(5):
            await served.task


async def ends_with_an_error(wire: Any) -> None:
    """Read a stream that was running when the server stopped."""
    *events, error = events_of((await wire.answer()).body)
    assert error["error"]["code"] == "shutting_down"
    assert events
    assert all(event["choices"][0]["finish_reason"] is None for event in events)
    assert await wire.closed() == b""
