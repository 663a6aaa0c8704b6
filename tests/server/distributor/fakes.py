"""A node that answers as a test says, and a distributor on a free port, both on this machine's loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Self

import aiohttp
from aiohttp import web

from asyncllm.config import DistributorConfig
from asyncllm.server.distributor.distributor import Distributor, open_distributor
from asyncllm.server.distributor.nodes import Node
from asyncllm.server.distributor.run import serve_until_stopped
from asyncllm.server.http.listening import bind
from tests.server.raw import until

__all__ = ["CHAT", "Distributing", "FakeNode", "distributing"]

CHAT = "/v1/chat/completions"
OFTEN_S = 0.01

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FakeNode:
    """A server that is ready, has the models, and answers each request with its name. Used as a context."""

    def __init__(self, name: str = "one", models: tuple[str, ...] = ("m",)) -> None:
        self.name = name
        self.models = models
        self.ready = 200
        """Status of its /health/ready."""
        self.key: str | None = None
        """What its /v1/models asks for."""
        self.handle: Handler = self.tell_name
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        """Method, path, headers (names in lower case) and body of each, checks left out."""
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def tell_name(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"name": self.name})

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/health/ready", self._ready)
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("*", "/{path:.*}", self._any)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """End it with all its connections, as a kill does. It can be started again on its port."""
        if self._runner is not None:
            server = self._runner.server
            assert server is not None
            for connection in server.connections:
                if connection.transport is not None:
                    connection.transport.abort()
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=self.ready)

    async def _models(self, request: web.Request) -> web.Response:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.Response(status=401)
        return web.json_response({"object": "list", "data": [{"id": name, "of": self.name} for name in self.models]})

    async def _any(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.requests.append((request.method, request.raw_path, headers, await request.read()))
        return await self.handle(request)


class Distributing:
    """A running distributor."""

    def __init__(self, distributor: Distributor, url: str, http: aiohttp.ClientSession) -> None:
        self.distributor = distributor
        self.url = url
        self.http = http

    def node(self, fake: FakeNode) -> Node:
        """What it knows of a node."""
        found = self.distributor.nodes.get(fake.url)
        assert found is not None
        return found

    async def post(self, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        """Status and JSON of a POST."""
        async with self.http.post(self.url + path, json=body or {"model": "m"}, **options) as response:
            return response.status, await response.json()

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        """Status and JSON of a GET."""
        async with self.http.get(self.url + path, **options) as response:
            return response.status, await response.json()

    async def names(self, count: int, body: Any = None) -> list[str]:
        """Which nodes answer so many requests, one after the other."""
        return [(await self.post(CHAT, body))[1]["name"] for _ in range(count)]


@asynccontextmanager
async def distributing(*nodes: FakeNode, started: bool = True, **config: Any) -> AsyncIterator[Distributing]:
    """Distribute to the nodes, all of which are started here and ready unless `started` is false. `config`: fields of
    DistributorConfig."""
    async with AsyncExitStack() as running:
        if started:
            for node in nodes:
                await running.enter_async_context(node)
        settings = {"server_port": 0, "health_interval": OFTEN_S, "nodes": [node.url for node in nodes], **config}
        with bind(DistributorConfig(server_port=0)) as listener:
            port = listener.getsockname()[1]
            distributor = await asyncio.to_thread(open_distributor, DistributorConfig(**settings), port)
            listens = asyncio.Event()
            serving = asyncio.create_task(serve_until_stopped(distributor, listener, lambda address: listens.set()))
            http = await running.enter_async_context(aiohttp.ClientSession())
            try:
                await listens.wait()
                if started:
                    await until(lambda: all(node.ready for node in distributor.nodes))
                yield Distributing(distributor, f"http://127.0.0.1:{port}", http)
            finally:
                await http.close()
                distributor.state.stop.set()
                distributor.state.stop_now.set()
                await serving
