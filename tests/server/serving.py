"""A server on a free port of this machine, with clients for it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai

from asyncllm.config import ServerConfig
from asyncllm.engine.async_engine import AsyncEngine
from asyncllm.server.http.listening import bind, tls_context
from asyncllm.server.run import open_service, serve_until_stopped
from asyncllm.server.service import Service

__all__ = ["Served", "serving"]


class Served:
    """A running server."""

    def __init__(self, service: Service, url: str) -> None:
        self.service = service
        self.url = url
        """Without a slash at the end."""
        self.http: aiohttp.ClientSession
        """Closed with the server."""
        self.listener: socket.socket
        self.task: asyncio.Task[None]
        """Ends when the server has drained."""

    @property
    def engine(self) -> AsyncEngine:
        """The one that serves now."""
        return self.service.engine

    def openai(self, **options: Any) -> openai.AsyncOpenAI:
        """A client of OpenAI's own package, which repeats nothing unless told to."""
        return openai.AsyncOpenAI(**{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, **options})

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        """Status and JSON of a POST."""
        async with self.http.post(self.url + path, json=body, **options) as response:
            return response.status, await response.json()

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        """Status and JSON of a GET."""
        async with self.http.get(self.url + path, **options) as response:
            return response.status, await response.json()


@asynccontextmanager
async def serving(
    engine: AsyncEngine, *, make_engine: Callable[[], AsyncEngine] | None = None, **config: Any
) -> AsyncIterator[Served]:
    """Serve `engine`, which has not been started, until the block ends, and what `make_engine` makes when it dies.
    `config`: fields of ServerConfig."""
    settings = ServerConfig(**{"server_port": 0, "generation_config": "none", **config})
    service = open_service(engine, settings, make_engine)
    tls = tls_context(service.config)
    async with service.supervisor:
        listener = bind(service.config)
        host, port = listener.getsockname()[:2]
        served = Served(service, f"{'http' if tls is None else 'https'}://{host}:{port}")
        served.listener = listener
        served.task = asyncio.create_task(serve_until_stopped(service, listener, tls))
        try:
            async with aiohttp.ClientSession() as served.http:
                yield served
        finally:
            service.state.stop.set()
            service.state.stop_now.set()
            await served.task
