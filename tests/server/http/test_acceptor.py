"""Connections: how many there may be, handshakes included, and a system that has no room for another one."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from asyncllm.server.http import acceptor
from asyncllm.server.http.acceptor import connections_for, raise_limit
from asyncllm.testing import FakeEngine
from tests.server.http.test_access import certificate  # noqa: F401 - a fixture
from tests.server.raw import Wire, connected, head
from tests.server.serving import Served, serving

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def silent(served: Served, count: int) -> AsyncIterator[list[Wire]]:
    """So many connections that say nothing, and not even TLS's hello."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(connected(served)) for _ in range(count)]


async def test_unfinished_handshakes_are_connections(certificate: tuple[str, str]) -> None:  # noqa: F811
    files: dict[str, Any] = {"ssl_certfile": certificate[0], "ssl_keyfile": certificate[1]}
    async with serving(FakeEngine(), ssl=True, max_connections=5, keep_alive_timeout=0.5, **files) as served:
        async with silent(served, 5) as kept, silent(served, 20) as refused:
            for wire in refused:
                assert await wire.closed() == b""
            # Those that were taken have their time, and give their places back.
            for wire in kept:
                await wire.closed()
        async with silent(served, 5):
            pass
        for _ in range(5):  # the places of those who left in the middle are free too
            await asyncio.sleep(0.01)
        status, _ = await served.get("/health", ssl=False)
        assert status == 200


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.EPERM], ids=errno.errorcode.get)
async def test_without_descriptors_it_waits_and_says_so_once(
    number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(acceptor, "PAUSE_S", 0.05)
    real, tries, full = socket.socket.accept, [], True

    def accept(listener: socket.socket) -> Any:
        tries.append(listener)
        if full:
            raise OSError(number, "there is none left")
        return real(listener)

    monkeypatch.setattr(socket.socket, "accept", accept)
    async with serving(FakeEngine()) as served, connected(served) as wire:
        wire.send(head("GET", "/health"))
        await asyncio.sleep(0.3)
        assert 1 <= len(tries) <= 7
        assert len(caplog.records) == 1
        full = False
        assert (await wire.answer()).status == 200
    assert len(caplog.records) == 1


async def test_stopping_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def accept(listener: socket.socket) -> Any:
        raise OSError(errno.EMFILE, "there is none left")

    monkeypatch.setattr(socket.socket, "accept", accept)
    async with serving(FakeEngine()) as served, connected(served):
        await asyncio.sleep(0.02)
        served.service.state.stop.set()
        async with asyncio.timeout(3):
            await served.task


class TestDescriptors:
    @pytest.fixture(autouse=True)
    def limits(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """The soft and the hard limit of a process that has 20 files open."""
        found = [1024, 4096]

        def setrlimit(_: int, limits: tuple[int, int]) -> None:
            assert limits[0] <= limits[1]
            found[:] = limits

        monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(found))
        monkeypatch.setattr(resource, "setrlimit", setrlimit)
        monkeypatch.setattr(acceptor, "_in_use", lambda: 20)
        return found

    @pytest.mark.parametrize(
        ("limit", "wanted", "room"),
        [
            (1024, 8192, 876),
            (1024, 50, 50),
            (65536, 8192, 8192),
            (256, 8192, 172),
            (16, 8192, 1),
            (resource.RLIM_INFINITY, 8192, 8192),
        ],
    )
    def test_there_is_room_for_what_the_process_may_open(
        self, limit: int, wanted: int, room: int, limits: list[int]
    ) -> None:
        limits[0] = limit
        assert connections_for(wanted) == room

    @pytest.mark.parametrize(
        ("hard", "wanted", "soft"),
        [(4096, 8192, 4096), (2**20, 8192, 8340), (resource.RLIM_INFINITY, 8192, 8340), (4096, 100, 1024)],
    )
    def test_the_limit_is_raised_as_far_as_needed(self, hard: int, wanted: int, soft: int, limits: list[int]) -> None:
        limits[1] = hard if hard != resource.RLIM_INFINITY else 2**63 - 1
        if hard == resource.RLIM_INFINITY:
            resource.setrlimit = lambda _, found: limits.__setitem__(0, found[0])  # type: ignore[assignment]
            limits[1] = hard
        raise_limit(wanted)
        assert limits[0] == soft

    async def test_a_server_takes_no_more(self, limits: list[int], caplog: pytest.LogCaptureFixture) -> None:
        limits[0] = 40  # room for 10
        async with serving(FakeEngine()) as served, silent(served, 10), silent(served, 3) as refused:
            for wire in refused:
                assert await wire.closed() == b""
        assert "At most 10 connections" in caplog.text
