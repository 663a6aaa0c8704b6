"""Bodies of requests: packed, asked for, refused. What is refused is neither unpacked nor waited for."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import zlib
from typing import Any

import pytest

from asyncllm.server.http import listening
from asyncllm.testing import FakeEngine
from tests.server.raw import connected, head, post, until
from tests.server.serving import serving

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
PING: dict[str, Any] = {"messages": "ping"}
JSON = {"Content-Type": "application/json"}
BOMB = gzip.compress(b" " * 30_000_000)


@pytest.fixture
def unpackers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads in which something began to unpack, one for each time."""
    real, found = zlib.decompressobj, []

    def counted(*arguments: Any, **options: Any) -> Any:
        found.append(threading.get_ident())
        return real(*arguments, **options)

    monkeypatch.setattr(zlib, "decompressobj", counted)
    return found


REFUSALS: list[tuple[str, dict[str, str | bytes], int]] = [
    (CHAT, {"x-api-key": "wrong"}, 401),
    ("/none", {}, 404),
    ("/health", {}, 405),
    (CHAT, {"Content-Type": "text/plain"}, 400),
    (CHAT, {"Origin": "https://evil.example"}, 403),
    (CHAT, {"Content-Length": str(2**40)}, 413),
]


@pytest.mark.parametrize(("path", "headers", "status"), REFUSALS, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_what_is_refused_is_not_unpacked(
    path: str, headers: dict[str, str | bytes], status: int, encoding: str, unpackers: list[int]
) -> None:
    async with serving(FakeEngine(), api_keys=["key"]) as served, connected(served) as wire:
        wire.send(post(path, BOMB, {"x-api-key": "key", "Content-Encoding": encoding, **headers}))
        answer = await wire.answer()
        assert answer.status == status
        assert not unpackers
        if status == 413:
            assert answer.headers["connection"] == "close"


async def test_a_full_server_unpacks_nothing(unpackers: list[int]) -> None:
    engine = FakeEngine()
    engine.executor.pause()
    async with serving(engine, max_concurrent_requests=1) as served, connected(served) as wire:
        asking = asyncio.create_task(served.post(CHAT, PING))
        await until(lambda: served.service.state.in_work == 1)
        wire.send(post(CHAT, BOMB, {"Content-Encoding": "gzip"}))
        assert (await wire.answer()).status == 429
        engine.executor.resume()
        assert (await asking)[0] == 200
    assert not unpackers


@pytest.mark.parametrize("framing", [{"Content-Length": "1000"}, {"Transfer-Encoding": "chunked"}], ids=str)
async def test_a_refused_body_that_goes_on_is_not_listened_to(
    framing: dict[str, str | bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "LINGER_S", 0.2)
    async with serving(FakeEngine(), api_keys=["key"]) as served, connected(served) as wire:
        wire.send(head("POST", CHAT, {**JSON, **framing}))
        answer = await wire.answer()
        assert (answer.status, answer.headers["connection"]) == (401, "close")

        async def drip() -> None:
            while True:
                wire.send(b"1\r\n \r\n" if "Transfer-Encoding" in framing else b" ")
                await asyncio.sleep(0.01)

        dripping = asyncio.create_task(drip())
        assert await wire.closed() == b""
        dripping.cancel()
        await asyncio.wait([dripping])


async def test_a_body_that_came_along_leaves_the_connection_open() -> None:
    async with serving(FakeEngine(), api_keys=["key"]) as served, connected(served) as wire:
        for key, status in (("wrong", 401), ("key", 200)):
            wire.send(post(CHAT, PING, {"x-api-key": key}))
            answer = await wire.answer()
            assert answer.status == status
            assert "connection" not in answer.headers


async def test_only_who_is_let_in_is_asked_for_the_body() -> None:
    waiting = {"Expect": "100-Continue", "Content-Length": str(len(json.dumps(PING)))}
    async with serving(FakeEngine(), api_keys=["key"], max_body_bytes=1024) as served:
        for path, headers, status in (
            (CHAT, {}, 401),
            (CHAT, {"x-api-key": "key", "Content-Type": "text/plain"}, 400),
            (CHAT, {"x-api-key": "key", "Content-Length": "1025"}, 413),
            (CHAT, {"x-api-key": "key", "Expect": "a miracle"}, 417),
        ):
            async with connected(served) as wire:
                wire.send(head("POST", path, {**JSON, **waiting, **headers}))
                answer = await wire.answer()
                assert (answer.status, answer.headers["connection"]) == (status, "close")
                assert answer.json["error"]["type"]
        async with connected(served) as wire:
            wire.send(head("POST", CHAT, {**JSON, **waiting, "x-api-key": "key"}))
            assert await wire.line() == b"HTTP/1.1 100 Continue\r\n"
            assert await wire.line() == b"\r\n"
            wire.send(json.dumps(PING).encode())
            assert (await wire.answer()).status == 200


class TestPacked:
    @pytest.mark.parametrize(
        ("encoding", "body"),
        [
            ("gzip", gzip.compress(json.dumps(PING).encode(), mtime=0)),
            ("X-GZIP", gzip.compress(json.dumps(PING).encode(), mtime=0)),
            ("deflate", zlib.compress(json.dumps(PING).encode())),
            ("deflate", zlib.compress(json.dumps(PING).encode(), wbits=-15)),
            ("identity", json.dumps(PING).encode()),
            ("", json.dumps(PING).encode()),
        ],
    )
    async def test_it_is_unpacked(self, encoding: str, body: bytes) -> None:
        async with serving(FakeEngine()) as served, connected(served) as wire:
            wire.send(post(CHAT, body, {"Content-Encoding": encoding}))
            assert (await wire.answer()).status == 200

    @pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "gzip, gzip", "*"])
    async def test_another_encoding_is_refused(self, encoding: str) -> None:
        async with serving(FakeEngine()) as served, connected(served) as wire:
            wire.send(post(CHAT, PING, {"Content-Encoding": encoding}))
            answer = await wire.answer()
            assert (answer.status, answer.json["error"]["code"]) == (415, "unsupported_encoding")
            assert answer.headers["accept-encoding"] == "gzip, deflate"

    @pytest.mark.parametrize("encoding", ["gzip", "deflate"])
    @pytest.mark.parametrize("damage", ["cut", "more", "other", "empty", "members"])
    async def test_a_damaged_one_is_refused(self, encoding: str, damage: str) -> None:
        pack = gzip.compress if encoding == "gzip" else zlib.compress
        whole = pack(json.dumps(PING).encode())
        body = {
            "cut": whole[:-5],
            "more": whole + b"x",
            "other": b"no such format",
            "empty": b"",
            "members": pack(b"") * 1000,
        }[damage]
        async with serving(FakeEngine()) as served, connected(served) as wire:
            wire.send(post(CHAT, body, {"Content-Encoding": encoding}))
            answer = await wire.answer()
            assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_body")

    async def test_a_large_one_does_not_hold_the_loop(self, unpackers: list[int]) -> None:
        """Made of empty blocks it takes a second for nothing."""
        blocks = b"\x00\x00\x00\xff\xff" * 10_000
        async with serving(FakeEngine()) as served, connected(served) as wire:
            wire.send(post(CHAT, blocks, {"Content-Encoding": "deflate"}))
            assert (await wire.answer()).status == 400
        assert len(unpackers) == 1
        assert threading.get_ident() not in unpackers


@pytest.mark.parametrize("text", [r"\ud83d", r"\ude00", r"\ud83d\ude00\ud83d", r"\uD83D\ud83d\uDE00"])
async def test_half_a_surrogate_pair_is_named(text: str) -> None:
    """As programs send it that cut a text in the middle of an emoji."""
    async with serving(FakeEngine()) as served:
        for content, status in ((text, 400), (r"\ud83d\ude00", 200)):
            body = b'{"messages": [{"role": "user", "content": "%b"}]}' % content.encode()
            async with served.http.post(served.url + CHAT, data=body, headers=JSON) as response:
                assert response.status == status
                assert status == 200 or "surrogate pair" in (await response.json())["error"]["message"]


async def test_a_body_may_begin_with_the_mark_of_utf_8() -> None:
    async with serving(FakeEngine("pong")) as served:
        body = b'\xef\xbb\xbf{"messages": "ping"}'
        headers = {"Content-Type": "application/json"}
        async with served.http.post(f"{served.url}/v1/chat/completions", data=body, headers=headers) as response:
            assert response.status == 200
