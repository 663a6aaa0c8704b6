"""The way to one client, which may read slowly, not at all, or have left."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from aiohttp import ClientConnectionResetError, web

__all__ = ["CLIENT_LEFT", "OUTCOME", "Connection", "send"]

CLIENT_LEFT = 499
"""The status that is logged and counted, after nginx, for a request whose client left before its end."""
OUTCOME = web.RequestKey("OUTCOME", int)
"""The status by which a request ended, where it is not its response's: CLIENT_LEFT, or that of the error which broke
off a stream that had begun with 200. Written by whoever meets it first, read by the entrance."""

SMALL = 2**14
"""Bytes that an empty write buffer takes without the transport asking to wait (64 KiB, asyncio's and uvloop's)."""


class Connection:
    """The way to a client that may read slowly or not at all."""

    def __init__(self, request: web.Request, response: web.StreamResponse, write_timeout: float) -> None:
        self._transport = request.transport
        self._response = response
        self._write_timeout = write_timeout

    async def write(self, data: bytes) -> None:
        """Send a piece. Raises ConnectionError when the client has left. One that reads nothing for `write_timeout`
        seconds is dropped, which cancels the handler."""
        await self._pass(self._response.write, len(data), data)

    async def end(self) -> None:
        """Send what has not been sent, and the end of the body. As `write`."""
        body = self._response.body if isinstance(self._response, web.Response) else None
        await self._pass(self._response.write_eof, len(body) if isinstance(body, bytes) else 0)

    async def _pass(self, write: Callable[..., Awaitable[None]], size: int, *data: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ClientConnectionResetError("The client has left.")
        if size <= SMALL and not transport.get_write_buffer_size():
            await write(*data)
            return
        watch = _Watch(transport, self._write_timeout)
        try:
            await write(*data)
        finally:
            watch.stop()


class _Watch:
    """Drops a connection whose client reads nothing for `patience` seconds; its handler is cancelled with it."""

    def __init__(self, transport: asyncio.WriteTransport, patience: float) -> None:
        self._transport = transport
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._unread = math.inf
        """Bytes in the write buffer when it was last seen to have shrunk, at `_since`."""
        self._since = self._loop.time()
        self._timer = self._loop.call_later(patience / 4, self._look)

    def _look(self) -> None:
        unread = self._transport.get_write_buffer_size()
        if unread < self._unread:
            self._unread, self._since = unread, self._loop.time()
        elif self._loop.time() - self._since >= self._patience:
            self._transport.abort()
            return
        self._timer = self._loop.call_later(self._patience / 4, self._look)

    def stop(self) -> None:
        self._timer.cancel()


async def send(request: web.Request, response: web.StreamResponse, write_timeout: float) -> None:
    """Write a whole response, or the end of a stream. A client that has left is no error, but an `OUTCOME`."""
    try:
        if not response.prepared:
            await response.prepare(request)
        await Connection(request, response, write_timeout).end()
    except ConnectionError:
        request.setdefault(OUTCOME, CLIENT_LEFT)
