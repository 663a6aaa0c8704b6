"""Registration: a server tells a distributor its address, again and again, and takes it back when it stops.

Renewing makes a distributor that was started again know its servers, and forget those that ended without a word.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import aiohttp

from asyncllm.config import ServerConfig
from asyncllm.server.distributor.nodes import address_of_node
from asyncllm.server.http.access import read_key
from asyncllm.server.http.listening import first_of

__all__ = ["Registration"]

logger = logging.getLogger("asyncllm.server")

RENEWAL_S = 15.0
"""Seconds between two registrations."""
LEASE_S = 45.0
"""Seconds after which the distributor forgets the server: two registrations may be lost."""
RETRY_S = 1.0
"""Seconds until the next attempt after one has failed."""
JITTER = 0.2
"""Fraction by which the pauses differ, so that many servers do not register at the same time."""
TIMEOUT_S = 5.0
"""Maximum number of seconds that the distributor may take to answer."""

ALL_INTERFACES = ("0.0.0.0", "::")


class Registration:
    """The registration of one server with the distributor of `proxy_url`."""

    def __init__(self, config: ServerConfig, address: str) -> None:
        """`address`: where the server listens. Blocks on files. Raises InvalidParameter."""
        assert config.proxy_url is not None
        self._distributor = address_of_node(config.proxy_url)
        self._config = config
        self._address = address
        key = read_key(config.proxy_key_file, "proxy_key_file")
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._logged_problem = ""
        """The last failure that the log has told."""

    @asynccontextmanager
    async def kept(self, models: list[str], until: asyncio.Event) -> AsyncIterator[None]:
        """Keep the server registered until the event is set or the block ends. `models`: those that it begins with; the
        distributor asks for later ones."""
        task = asyncio.get_running_loop().create_task(self._keep(models, until), name="asyncllm-register")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _keep(self, models: list[str], until: asyncio.Event) -> None:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout, headers=self._headers) as session:
            try:
                while not until.is_set():
                    body = {"url": await self._own_url(), "status": {"models": models}, "lease_seconds": LEASE_S}
                    registered = await self._tell(session, "add", body)
                    pause = (RENEWAL_S if registered else RETRY_S) * random.uniform(1 - JITTER, 1 + JITTER)
                    await first_of(pause, until)
            finally:
                await self._tell(session, "remove", {"url": await self._own_url()})

    async def _tell(self, session: aiohttp.ClientSession, what: str, body: dict[str, object]) -> bool:
        """Call a node route of the distributor; returns whether that succeeded. The log tells each new failure once."""
        try:
            async with session.post(f"{self._distributor}/nodes/{what}", json=body) as response:
                problem = "" if response.ok else f"status {response.status}: {(await response.text())[:500]}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem and problem != self._logged_problem:
            logger.error(
                "The distributor at %s could not be told to %s this server (%s). Check proxy_url, "
                "proxy_key_file and node_url.",
                self._distributor,
                what,
                problem,
            )
        self._logged_problem = problem
        return not problem

    async def _own_url(self) -> str:
        """Return the address under which the distributor reaches this server."""
        if self._config.node_url is not None:
            return address_of_node(self._config.node_url)
        if self._config.server_name not in ALL_INTERFACES:
            return self._address
        host = await asyncio.to_thread(_interface_towards, self._distributor)
        own = urlsplit(self._address)
        return f"{own.scheme}://{f'[{host}]' if ':' in host else host}:{own.port}"


def _interface_towards(url: str) -> str:
    """Return this machine's address on the way to another one; nothing is sent. Blocks on the name server."""
    address = urlsplit(url)
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address.hostname, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
