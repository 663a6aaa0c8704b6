"""Clients that leave, and clients that do not read: the engine drops them, and no other client notices."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Callable
from typing import Any

import pytest

from asyncllm.config import EngineConfig
from asyncllm.testing import FakeEngine
from tests.server.raw import Wire, connected, events_of, head, post, until
from tests.server.serving import Served, serving

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
LONG = "a long answer " * 20
PING: dict[str, Any] = {"messages": "ping"}


async def gone(served: Served, executor: Any, cancelled: int = 1) -> None:
    """The request has ended while the device stands still, launches nothing more, and gives its blocks back."""
    engine = served.engine
    await until(lambda: served.service.state.in_work == 0 and engine.stats().requests_cancelled == cancelled)
    assert (engine.stats().waiting, served.service.state.idle.is_set()) == (0, True)
    launched = len(executor.batches)
    executor.resume()
    await until(lambda: engine.stats().blocks_held == 0 and engine.stats().running == 0)
    engine.check_idle()
    assert len(executor.batches) == launched


@pytest.fixture(params=["closed", "reset"])
def leave(request: pytest.FixtureRequest) -> Callable[[Wire], None]:
    """How the client leaves."""
    return lambda wire: wire.abort(reset=request.param == "reset")


class TestLeaving:
    async def test_with_half_of_the_body_sent(self, leave: Callable[[Wire], None]) -> None:
        engine = FakeEngine(LONG)
        async with serving(engine) as served, connected(served) as wire:
            wire.send(post(CHAT, PING)[:-5])
            await until(lambda: served.service.state.in_work == 1)
            leave(wire)
            await gone(served, engine.executor, cancelled=0)
            assert engine.stats().requests_started == 0

    async def test_while_the_prompt_is_encoded(self, leave: Callable[[Wire], None]) -> None:
        engine = FakeEngine(LONG)
        encoding = asyncio.Event()

        async def encode(text: str, **_: Any) -> list[int]:
            encoding.set()
            await asyncio.sleep(60)
            return [1]

        async with serving(engine) as served, connected(served) as wire:
            engine._lifecycle.encoder.prompt_ids = encode  # type: ignore[assignment,method-assign]
            wire.send(post(CHAT, PING))
            await encoding.wait()
            leave(wire)
            await gone(served, engine.executor, cancelled=0)
            assert engine.stats().requests_started == 0

    @pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
    async def test_in_the_queue(self, leave: Callable[[Wire], None], streamed: bool) -> None:
        engine = FakeEngine(LONG, num_slots=1)
        engine.executor.pause()
        async with serving(engine) as served, connected(served) as first, connected(served) as second:
            first.send(post(CHAT, {**PING, "stream": True}))
            await until(lambda: engine.stats().running == 1)
            second.send(post(CHAT, {**PING, "stream": streamed}))
            await until(lambda: engine.stats().waiting == 1)
            leave(second)
            await until(lambda: served.service.state.in_work == 1 and engine.stats().waiting == 0)
            assert engine.stats().running == 1
            leave(first)
            await gone(served, engine.executor, cancelled=2)

    @pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
    async def test_in_prefill(self, leave: Callable[[Wire], None], streamed: bool) -> None:
        engine = FakeEngine(LONG, EngineConfig(max_prefill_token_num=16))
        engine.executor.pause()
        async with serving(engine) as served, connected(served) as wire:
            wire.send(post(CHAT, {"messages": "ping" * 50, "stream": streamed}))
            await until(lambda: engine.stats().running == 1)
            engine.executor.advance(2)
            await until(lambda: engine.stats().prefill_tokens >= 32)
            leave(wire)
            await gone(served, engine.executor)
            assert engine.stats().decode_tokens == 0

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            (CHAT, PING),
            (CHAT, {**PING, "n": 3}),
            (PLAIN, {"prompt": ["ping", "pong"], "n": 2, "max_tokens": 99}),
            ("/v1/responses", {"input": "ping"}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "ping"}], "max_tokens": 99}),
        ],
        ids=["one answer", "several answers", "several prompts", "response", "message"],
    )
    @pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
    async def test_while_tokens_come(
        self, leave: Callable[[Wire], None], path: str, body: dict[str, Any], streamed: bool
    ) -> None:
        engine = FakeEngine(LONG)
        engine.executor.pause()
        async with serving(engine) as served, connected(served) as wire:
            wire.send(post(path, {**body, "stream": streamed}))
            await until(lambda: engine.stats().running >= 1)
            engine.executor.advance(5)
            await until(lambda: engine.executor.num_completed == 5)
            if streamed:
                status, headers = await wire.answer_head()
                assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
                assert (await wire.piece()).startswith((b"data: {", b"event: "))
            leave(wire)
            await gone(served, engine.executor, cancelled=len(body.get("prompt", "x")))
            assert engine.stats().decode_tokens > 0

    @pytest.mark.parametrize(
        ("first", "behind"),
        [
            ({}, post(CHAT, PING) * 40),
            ({}, post(CHAT, PING)[:-1]),
            ({}, post(CHAT, b" " * 400_000)),
            ({}, head("GET", "/health") * 4000),
            ({"Connection": "Upgrade", "Upgrade": "websocket"}, b"x" * 200_000),
        ],
        ids=["requests", "a part of one", "a large body", "small ones", "after an upgrade"],
    )
    async def test_with_more_behind_an_unstreamed_answer(
        self, leave: Callable[[Wire], None], first: dict[str, str | bytes], behind: bytes
    ) -> None:
        engine = FakeEngine(LONG)
        engine.executor.pause()
        async with serving(engine) as served, connected(served) as wire:
            wire.send(post(CHAT, PING, first) + behind)
            await until(lambda: engine.stats().running == 1)
            wire.send(b"no HTTP at all\r\n\r\n" * 4000)
            await wire.writer.drain()
            leave(wire)
            await gone(served, engine.executor)
            assert engine.stats().requests_started == 1

    async def test_at_any_time(self, leave: Callable[[Wire], None]) -> None:
        rng = random.Random(7)
        engine = FakeEngine(LONG, num_slots=4, delay_per_token=0.0005)
        bodies = [PING, {**PING, "stream": True}, {**PING, "n": 2, "stream": True, "max_tokens": 3}]

        async def come_and_go() -> None:
            for _ in range(12):
                async with connected(served) as wire:
                    data = post(CHAT, rng.choice(bodies))
                    wire.send(data[: rng.choice([len(data)] * 5 + [rng.randrange(len(data))])])
                    await asyncio.sleep(rng.random() * 0.02)
                    leave(wire)

        async with serving(engine) as served:
            async with asyncio.TaskGroup() as group:
                for _ in range(6):
                    group.create_task(come_and_go())
            await until(lambda: served.service.state.in_work == 0 and engine.stats().blocks_held == 0)
            engine.check_idle()
            stats = engine.stats()
            assert stats.requests_started == stats.requests_finished + stats.requests_cancelled
            assert stats.requests_cancelled > 10
            assert (await served.post(CHAT, {**PING, "max_tokens": 3}))[0] == 200


WIDE: dict[str, Any] = {"messages": "ping", "logprobs": True, "top_logprobs": 20, "max_tokens": 600}
"""An answer whose tokens take more than a kilobyte each."""


class TestSlowReaders:
    """The kernel's buffers are made small, so that a client that does not read is noticed after some 150 KB."""

    async def test_chunks_become_one_for_a_reader_who_is_late(self) -> None:
        engine = FakeEngine("x" * 600)
        async with serving(engine) as served:
            served.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            async with connected(served, receive_buffer=4096) as wire:
                wire.send(post(CHAT, {**WIDE, "stream": True}))
                # Whatever the reader does, the engine goes on, and holds nothing when the answer is complete.
                await until(lambda: engine.stats().requests_finished == 1, 20)
                assert engine.stats().blocks_held == 0
                assert served.service.state.in_work == 1
                answer = await wire.answer()
                events = events_of(answer.body)
                choices = [event["choices"][0] for event in events]
                assert "".join(choice["delta"].get("content", "") for choice in choices) == "x" * 600
                assert sum(len((choice.get("logprobs") or {"content": ()})["content"]) for choice in choices) == 600
                sizes = sorted(len(json.dumps(event)) for event in events)
                assert len(events) < 400
                assert sizes[-1] > 100 * sizes[len(sizes) // 2]

    @pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
    async def test_a_client_that_reads_nothing_is_dropped(self, streamed: bool) -> None:
        engine = FakeEngine("x" * 3000, delay_per_token=0.001 if streamed else 0.0)
        async with serving(engine, write_timeout=0.3) as served:
            served.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            async with connected(served, receive_buffer=4096) as wire:
                wire.send(post(CHAT, {**WIDE, "max_tokens": 3000 if streamed else 600, "stream": streamed}))
                await until(lambda: served.service.state.in_work == 1)
                await until(lambda: served.service.state.in_work == 0, 20)
                await until(lambda: engine.stats().blocks_held == 0)
                engine.check_idle()
                assert engine.stats().requests_cancelled == int(streamed)
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await wire.answer()

    async def test_a_client_that_reads_slowly_is_not(self) -> None:
        engine = FakeEngine("x" * 600)
        async with serving(engine, write_timeout=0.4) as served:
            served.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            async with connected(served, receive_buffer=4096) as wire:
                wire.send(post(CHAT, WIDE))
                status, headers = await wire.answer_head()
                left = int(headers["content-length"])
                assert (status, left > 500_000) == (200, True)
                begun = asyncio.get_running_loop().time()
                while left:
                    left -= len(await wire.reader.readexactly(min(left, 50_000)))
                    await asyncio.sleep(0.1)
                assert asyncio.get_running_loop().time() - begun > 2 * served.service.config.write_timeout
            await until(lambda: served.service.state.in_work == 0)
