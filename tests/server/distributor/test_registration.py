"""A server registers itself, again after the distributor has been started anew, and takes its address back."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from asyncllm.config import ServerConfig
from asyncllm.errors import InvalidParameter
from asyncllm.server.distributor import registration
from asyncllm.server.distributor.registration import LEASE_S, Registration
from tests.server.distributor.fakes import FakeNode, distributing
from tests.server.raw import until

pytestmark = pytest.mark.anyio


async def registered(config: ServerConfig, address: str) -> Registration:
    return await asyncio.to_thread(Registration, config, address)


async def test_it_registers_renews_and_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "RENEWAL_S", 0.01)
    async with FakeNode() as node, distributing() as served:
        own = await registered(ServerConfig(proxy_url=f"{served.url}/"), node.url)
        stop = asyncio.Event()
        async with own.kept(["m"], stop):
            await until(lambda: len(served.distributor.nodes) == 1)
            lease_end = served.node(node).lease_end
            assert lease_end is not None
            assert LEASE_S - 30 < lease_end - asyncio.get_running_loop().time() <= LEASE_S
            assert await served.names(1) == ["one"]
            # As after a restart of the distributor.
            served.distributor.nodes.remove(served.node(node))
            await until(lambda: len(served.distributor.nodes) == 1)
            stop.set()
            await until(lambda: not len(served.distributor.nodes))


async def test_it_takes_its_address_back_when_the_block_ends() -> None:
    async with FakeNode() as node, distributing() as served:
        own = await registered(ServerConfig(proxy_url=served.url), node.url)
        async with own.kept(["m"], asyncio.Event()):
            await until(lambda: len(served.distributor.nodes) == 1)
        assert not len(served.distributor.nodes)


async def test_the_key_is_sent_and_a_refusal_told_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registration, "RETRY_S", 0.01)
    (tmp_path / "key").write_text("owner\n")
    key = str(tmp_path / "key")
    async with FakeNode() as node, distributing(admin_key_file=key) as served:
        own = await registered(ServerConfig(proxy_url=served.url), node.url)
        async with own.kept(["m"], asyncio.Event()):
            await asyncio.sleep(0.1)
            assert not len(served.distributor.nodes)
        assert caplog.text.count("status 401") <= 2  # to add and to remove
        own = await registered(ServerConfig(proxy_url=served.url, proxy_key_file=key), node.url)
        async with own.kept(["m"], asyncio.Event()):
            await until(lambda: len(served.distributor.nodes) == 1)


@pytest.mark.parametrize(
    ("config", "address", "expected"),
    [
        ({}, "http://127.0.0.1:1234", "http://127.0.0.1:1234"),
        ({"server_name": "0.0.0.0"}, "http://0.0.0.0:1234", "http://127.0.0.1:1234"),
        ({"server_name": "0.0.0.0"}, "https://0.0.0.0:1234", "https://127.0.0.1:1234"),
        ({"server_name": "0.0.0.0", "node_url": "http://gpu-box:80/v1"}, "http://0.0.0.0:1234", "http://gpu-box:80"),
    ],
)
async def test_its_address_is_one_that_can_be_reached(config: dict[str, Any], address: str, expected: str) -> None:
    own = await registered(ServerConfig(proxy_url="http://127.0.0.1:9", **config), address)
    assert await own._own_url() == expected


async def test_without_a_name_server_the_own_machine_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise OSError("no name server")

    own = await registered(ServerConfig(proxy_url="http://far", server_name="0.0.0.0"), "http://0.0.0.0:1")
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert await own._own_url() == "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"proxy_url": "host:8000"}, "not the address of a server"),
        ({"node_url": "http://here"}, "proxy_url is not"),
        ({"proxy_key_file": "key"}, "proxy_url is not"),
    ],
)
def test_settings_that_are_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidParameter, match=says):
        ServerConfig(**config).checked()


def test_a_file_of_two_keys_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\ntwo\n")
    with pytest.raises(InvalidParameter, match="holds 2 keys"):
        Registration(ServerConfig(proxy_url="http://here", proxy_key_file=str(tmp_path / "keys")), "http://me")
