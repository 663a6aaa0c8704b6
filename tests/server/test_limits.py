"""Limits in time, number and size: what is beyond them is refused, and a connection goes on or is closed."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest

from asyncllm.server.service import MAX_BODY
from asyncllm.testing import FakeEngine
from tests.server.raw import connected, head, post, until
from tests.server.serving import serving

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
PING: dict[str, Any] = {"messages": "ping"}


class TestConnections:
    async def test_one_serves_request_after_request(self) -> None:
        async with serving(FakeEngine({"ping": "pong"}), max_body_bytes=2048) as served, connected(served) as wire:
            for data, status in (
                (post(CHAT, PING), 200),
                (post(CHAT, {**PING, "stream": True}), 200),
                (post(CHAT, {**PING, "n": -1}), 400),
                (post(CHAT, b"{"), 400),
                (post("/none", PING), 404),
                (head("GET", CHAT), 405),
                (post(CHAT, PING), 200),
                (head("GET", "/health"), 200),
            ):
                wire.send(data)
                answer = await wire.answer()
                assert answer.status == status, data
                assert answer.headers.get("connection") != "close"

    async def test_pipelined_requests_that_are_no_work_are_answered_in_order(self) -> None:
        async with serving(FakeEngine()) as served, connected(served) as wire:
            wire.send(b"".join(head("GET", f"/v1/models/number{index}") for index in range(200)))
            for index in range(200):
                assert f"'number{index}'" in (await wire.answer()).json["error"]["message"]

    @pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
    async def test_nothing_waits_behind_work(self, streamed: bool) -> None:
        engine = FakeEngine({"ping": "pong"})
        async with serving(engine) as served, connected(served) as wire:
            wire.send(head("GET", "/health") + post(CHAT, {**PING, "stream": streamed}) * 3)
            assert (await wire.answer()).status == 200
            answer = await wire.answer()
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            assert b"pong" in answer.body or streamed
            assert await wire.closed() == b""
            assert engine.stats().requests_started == 1

    async def test_it_ends_with_connection_close_and_http_1_0(self) -> None:
        async with serving(FakeEngine()) as served:
            for data in (
                post(CHAT, PING, {"Connection": "close"}),
                post(CHAT, PING).replace(b"HTTP/1.1", b"HTTP/1.0"),
            ):
                async with connected(served) as wire:
                    wire.send(data)
                    assert (await wire.answer()).status == 200
                    assert await wire.closed() == b""

    @pytest.mark.parametrize("sent", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: local"], ids=len)
    async def test_one_without_a_whole_head_is_closed(self, sent: bytes) -> None:
        async with serving(FakeEngine(), keep_alive_timeout=0.1) as served, connected(served) as wire:
            wire.send(sent)
            assert await wire.closed(2) == b""

    async def test_a_head_that_comes_byte_by_byte_gets_no_more_time(self) -> None:
        async with serving(FakeEngine(), keep_alive_timeout=0.2) as served, connected(served) as wire:

            async def drip() -> None:
                for index in range(1000):
                    wire.send(head("GET", "/health")[index : index + 1] or b"x")
                    await asyncio.sleep(0.02)

            dripping = asyncio.create_task(drip())
            assert await wire.closed(3) == b""
            dripping.cancel()
            await asyncio.wait([dripping])

    async def test_an_idle_one_is_closed_after_its_answer(self) -> None:
        async with serving(FakeEngine(), keep_alive_timeout=0.1) as served, connected(served) as wire:
            wire.send(post(CHAT, PING))
            assert (await wire.answer()).status == 200
            assert await wire.closed(2) == b""

    async def test_a_running_answer_is_not_idle(self) -> None:
        engine = FakeEngine("pong")
        engine.executor.pause()
        async with serving(engine, keep_alive_timeout=0.1) as served, connected(served) as wire:
            wire.send(post(CHAT, PING))
            await until(lambda: engine.stats().running == 1)
            await asyncio.sleep(0.3)
            engine.executor.resume()
            assert (await wire.answer()).status == 200

    async def test_there_are_at_most_so_many(self) -> None:
        async with serving(FakeEngine(), max_connections=2) as served, connected(served) as first:
            first.send(head("GET", "/health"))
            assert (await first.answer()).status == 200
            async with connected(served) as second:
                second.send(head("GET", "/health"))
                assert (await second.answer()).status == 200
                async with connected(served) as third:
                    third.send(head("GET", "/health"))
                    assert await third.closed() == b""
                first.send(head("GET", "/health"))
                assert (await first.answer()).status == 200
            await asyncio.sleep(0.05)
            async with connected(served) as fourth:
                fourth.send(head("GET", "/health"))
                assert (await fourth.answer()).status == 200

    async def test_a_head_without_end_is_not_kept(self) -> None:
        async with serving(FakeEngine()) as served, connected(served) as wire:
            wire.send(head("GET", "/health")[:-2])
            for index in range(9):
                wire.send(b"X-%d: %b\r\n" % (index, b"x" * 8000))
                await asyncio.sleep(0.001)
            answer = await wire.answer()
            assert (answer.status, answer.headers["connection"]) == (431, "close")
        async with serving(FakeEngine()) as served, connected(served) as wire:
            for _ in range(20):  # each of them is its own
                wire.send(head("GET", "/health", {"X-1": "x" * 8000}))
                assert (await wire.answer()).status == 200


class TestBodies:
    @pytest.mark.parametrize("part", [0, 1, -1], ids=["nothing", "a byte", "all but a byte"])
    async def test_one_that_does_not_come_is_waited_for_so_long(self, part: int) -> None:
        data = post(CHAT, PING)
        body = data.partition(b"\r\n\r\n")[2]
        async with serving(FakeEngine(), body_timeout=0.1) as served, connected(served) as wire:
            wire.send(data[: len(data) - len(body)] + body[:part])
            answer = await wire.answer()
            assert (answer.status, answer.json["error"]["code"]) == (408, "body_timeout")
            assert answer.headers["connection"] == "close"
            assert answer.headers["x-should-retry"] == "false"
            wire.send(body[part:])
            assert await wire.closed() == b""
            assert served.service.state.in_work == 0

    async def test_one_that_trickles_gets_no_more_time(self) -> None:
        async with serving(FakeEngine(), body_timeout=0.2) as served, connected(served) as wire:
            wire.send(head("POST", CHAT, {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}))
            answering = asyncio.create_task(wire.answer())
            while not answering.done():
                wire.send(b"1\r\n \r\n")
                await asyncio.sleep(0.02)
            assert (await answering).status == 408

    async def test_a_large_one_is_refused_however_it_comes(self) -> None:
        large = json.dumps({**PING, "user": "x" * 3000}).encode()
        bomb = gzip.compress(json.dumps({**PING, "user": "x" * 30_000_000}).encode())
        chunked = {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
        async with serving(FakeEngine(), max_body_bytes=2048) as served:
            assert len(bomb) < 40_000
            for data in (
                post(CHAT, large),
                head("POST", CHAT, chunked) + b"%x\r\n%b\r\n0\r\n\r\n" % (len(large), large),
                head("POST", CHAT, chunked) + b"".join(b"1\r\n%c\r\n" % byte for byte in large) + b"0\r\n\r\n",
                post(CHAT, gzip.compress(large), {"Content-Encoding": "gzip"}),
                post(CHAT, bomb, {"Content-Encoding": "gzip"}),
            ):
                async with connected(served) as wire:
                    wire.send(data)
                    answer = await wire.answer()
                    assert (answer.status, answer.json["error"]["code"]) == (413, "body_too_large"), data[:300]
            small = gzip.compress(json.dumps(PING).encode())
            async with connected(served) as wire:
                wire.send(post(CHAT, small, {"Content-Encoding": "gzip"}))
                assert (await wire.answer()).status == 200

    async def test_the_largest_one_is_taken(self) -> None:
        body = json.dumps(PING).encode()
        for bound, most in ((2048, 2048), (None, MAX_BODY)):
            async with serving(FakeEngine(), max_body_bytes=bound) as served, connected(served) as wire:
                for length, status in ((most, 200), (most + 1, 413)):
                    wire.send(post(CHAT, body.ljust(length)))
                    assert (await wire.answer()).status == status


async def test_only_so_many_requests_are_in_work() -> None:
    engine = FakeEngine({"ping": "pong"})
    engine.executor.pause()
    async with serving(engine, max_concurrent_requests=2) as served:
        running = [
            asyncio.create_task(served.post(CHAT, PING)),
            asyncio.create_task(served.post("/v1/completions", {"prompt": "ping"})),
        ]
        await until(lambda: served.service.state.in_work == 2)
        async with served.http.post(served.url + CHAT, json=PING) as response:
            assert response.status == 429
            assert (await response.json())["error"]["code"] == "too_many_requests"
            assert 1 <= int(response.headers["Retry-After"]) <= 120
        assert (await served.get("/health"))[0] == 200
        engine.executor.resume()
        for found, _ in await asyncio.gather(*running):
            assert found == 200
        assert (await served.post(CHAT, PING))[0] == 200
