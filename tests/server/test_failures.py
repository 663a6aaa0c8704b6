"""Faults while an answer runs: its client gets exactly one end, which looks like no other."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import openai
import pytest

from asyncllm.testing import FakeEngine
from tests.server.raw import Wire, connected, events_of, head, post, until
from tests.server.serving import Served, serving

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
ASK: dict[str, Any] = {"messages": "ping", "stream": True}
STREAMS = [
    pytest.param((CHAT, ASK), id="chat"),
    pytest.param((CHAT, {**ASK, "n": 3, "stream_options": {"include_usage": True}}), id="n"),
    pytest.param((PLAIN, {"prompt": ["ping", "pang"], "max_tokens": 99, "stream": True}), id="prompts"),
]


async def failed(wire: Wire, code: str) -> list[Any]:
    """Read a stream that fails: text, one error, `[DONE]`, and without an engine the connection is closed; else it
    takes the next request. -> the choices' texts."""
    answer = await wire.answer()
    assert answer.status == 200
    if code == "request_failed":
        wire.send(head("GET", "/health"))
        assert (await wire.answer()).status == 200
    else:
        assert await wire.closed() == b""
    *events, error = events_of(answer.body)
    assert error["error"]["code"] == code
    assert error["error"]["type"] in ("server_error", "unavailable_error")
    assert not any("error" in event for event in events)
    choices = [choice for event in events for choice in event["choices"]]
    # Another prompt of the call may have come to its end before.
    assert not any(choice["finish_reason"] for choice in choices if choice["index"] == 0)
    return choices


def fails_at(character: str) -> Any:
    """A device whose rows fail when they come to the character in their answer."""
    return lambda history: "not a number" if history[-1:] == [ord(character)] else None


class TestStreams:
    @pytest.mark.parametrize("call", STREAMS)
    async def test_a_row_that_fails_is_one_error_and_its_neighbours_go_on(self, call: tuple[str, Any]) -> None:
        engine = FakeEngine({"ping": "abc!def", "neighbour": "x" * 60}, row_failure=fails_at("!"))
        engine.executor.pause()
        async with serving(engine) as served, connected(served) as wire, connected(served) as neighbour:
            neighbour.send(post(CHAT, {**ASK, "messages": "neighbour"}))
            await until(lambda: engine.stats().running == 1)
            wire.send(post(*call))
            await until(lambda: served.service.state.in_work == 2)
            engine.executor.resume()
            choices = await failed(wire, "request_failed")
            assert choices
            events = events_of((await neighbour.answer()).body)
            assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "x" * 60
            assert [event["choices"][0]["finish_reason"] for event in events][-1] == "stop"
            await until(lambda: served.service.state.in_work == 0 and engine.stats().blocks_held == 0)
            engine.check_idle()

    @pytest.mark.parametrize("call", STREAMS)
    async def test_an_engine_that_dies_is_one_error_for_each(self, call: tuple[str, Any]) -> None:
        engine = FakeEngine("a long answer", fail_at=6)
        async with serving(engine) as served:
            async with connected(served) as first, connected(served) as second:
                first.send(post(*call))
                second.send(post(*call))
                for wire in (first, second):
                    await failed(wire, "engine_unavailable")
            await refused(served, CHAT, {"messages": "ping"}, 503, "engine_unavailable")
            await refused(served, *call, 503, "engine_unavailable")
            for path in ("/health", "/health/live", "/health/ready"):
                status, found = await served.get(path)
                assert (status, found["status"]) == (503, "dead")

    @pytest.mark.parametrize("call", STREAMS)
    async def test_an_engine_that_is_closed_is_one_error(self, call: tuple[str, Any]) -> None:
        engine = FakeEngine("a long answer")
        engine.executor.pause()
        async with serving(engine) as served, connected(served) as wire:
            wire.send(post(*call))
            await until(lambda: engine.stats().running >= 1)
            engine.executor.advance(3)
            await until(lambda: engine.executor.num_completed == 3)
            closing = asyncio.create_task(engine.close())
            await asyncio.sleep(0)
            engine.executor.resume()
            await closing
            await failed(wire, "shutting_down")
            await refused(served, *call, 503, "shutting_down")

    async def test_openais_client_raises_it(self) -> None:
        engine = FakeEngine({"ping": "abc!def"}, row_failure=fails_at("!"))
        async with serving(engine) as served, served.openai() as client:
            stream = await client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "ping"}], stream=True
            )
            with pytest.raises(openai.APIError) as caught:
                async for _ in stream:
                    pass
            assert caught.value.code == "request_failed"
            with pytest.raises(openai.InternalServerError):
                await client.completions.create(model="fake", prompt="a!")

    async def test_what_is_wrong_with_the_request_is_said_before_the_stream(self) -> None:
        async with serving(FakeEngine()) as served:
            await refused(served, CHAT, {**ASK, "messages": []}, 400, "invalid_value")
            await refused(served, CHAT, {**ASK, "messages": "x" * 5000}, 400, "context_length_exceeded")

    async def test_a_silent_stream_says_that_it_lives(self) -> None:
        engine = FakeEngine("pong")
        engine.executor.pause()
        async with serving(engine, ping_interval=0.02) as served, connected(served) as wire:
            wire.send(post(CHAT, ASK))
            status, _ = await wire.answer_head()
            assert status == 200
            for _ in range(3):
                assert await wire.piece() == b": ping\n\n"
            engine.executor.advance(2)
            body = b""
            while b"content" not in body or not body.endswith(b": ping\n\n"):
                body += await wire.piece()
            engine.executor.resume()
            while piece := await wire.piece():
                body += piece
            choices = [event["choices"][0] for event in events_of(body)]
            assert "".join(choice["delta"].get("content", "") for choice in choices) == "pong"
            assert choices[-1]["finish_reason"] == "stop"

    async def test_a_stream_that_speaks_has_no_comments(self) -> None:
        engine = FakeEngine("a long answer", delay_per_token=0.005)
        async with serving(engine, ping_interval=5) as served, connected(served) as wire:
            wire.send(post(CHAT, ASK))
            assert b": ping" not in (await wire.answer()).body


class TestWholeAnswers:
    @pytest.mark.parametrize(
        ("path", "body"),
        [
            (CHAT, {"messages": "ping"}),
            (CHAT, {"messages": "ping", "n": 3}),
            (PLAIN, {"prompt": ["pang", "ping"], "max_tokens": 99}),
        ],
        ids=["chat", "n", "prompts"],
    )
    async def test_a_row_that_fails_fails_its_request(self, path: str, body: dict[str, Any]) -> None:
        engine = FakeEngine({"ping": "abc!def", "pang": "x" * 99}, row_failure=fails_at("!"))
        async with serving(engine) as served:
            await refused(served, path, body, 500, "request_failed")
            assert (await served.post(CHAT, {"messages": "pong"}))[0] == 200
            await until(lambda: served.service.state.in_work == 0 and engine.stats().blocks_held == 0)
            engine.check_idle()

    async def test_an_engine_that_is_closed_fails_all(self) -> None:
        engine = FakeEngine("a long answer")
        engine.executor.pause()
        async with serving(engine) as served:
            calls = [
                asyncio.create_task(refused(served, CHAT, {"messages": "ping"}, 503, "shutting_down")) for _ in range(3)
            ]
            # Two steps in flight are all that a paused device takes: who arrives later waits.
            await until(lambda: engine.stats().running + engine.stats().waiting == 3)
            closing = asyncio.create_task(engine.close())
            await asyncio.sleep(0)
            engine.executor.resume()
            await asyncio.gather(closing, *calls)

    async def test_an_unexpected_error_is_a_500_without_details(self) -> None:
        engine = FakeEngine()

        def broken(*_: Any, **__: Any) -> Any:
            raise KeyError("/home/secret/path 0xdeadbeef")

        async with serving(engine) as served:
            for part, name, code in (
                (engine._lifecycle.encoder, "render", "request_failed"),
                (engine, "generate", "internal_error"),
            ):
                setattr(part, name, broken)
                error = await refused(served, CHAT, {"messages": "ping"}, 500, code)
                assert "secret" not in str(error)
                assert "0x" not in str(error)


async def test_broken_requests_leave_no_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    broken = head("POST", CHAT, {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}) + b"x\r\n"
    zipped = post(CHAT, b"no gzip", {"Content-Encoding": "gzip"})
    async with serving(FakeEngine()) as served:
        for data in (b"\x16\x03\x01 no HTTP\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", broken, zipped):
            async with connected(served) as wire:
                wire.send(data)
                assert (await wire.answer()).status == 400
    assert caplog.text == ""


async def refused(served: Served, path: str, body: Any, status: int, code: str) -> Any:
    """Ask for what ends in this error. -> the error."""
    found, answer = await served.post(path, body)
    assert (found, answer["error"]["code"]) == (status, code)
    return answer["error"]
