"""Server-sent events: the answers of generations as `data:` lines, ended by exactly one `data: [DONE]`.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html, with OpenAI's last line.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from aiohttp import ClientConnectionResetError, web

from asyncllm.engine.generation import Generation
from asyncllm.server.errors import as_api_error, body_of
from asyncllm.server.service import Service
from asyncllm.types import Chunk

__all__ = ["DONE", "Events", "event", "send", "stream"]

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"

SMALL = 2**14
"""Bytes that an empty write buffer takes without the transport asking to wait (64 KiB, asyncio's and uvloop's)."""

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def event(data: bytes) -> bytes:
    """One event; `data` is JSON, which has no line break."""
    return b"data: " + data + b"\n\n"


class Events(Protocol):
    """Writes the chunks of an answer down in a route's format."""

    def chunk(self, chunk: Chunk) -> bytes:
        """The events of one chunk, as bytes."""

    def closing(self) -> bytes:
        """The events after the last chunk, `DONE` not among them."""


class _Connection:
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
    """Write a whole response, or the end of a stream. A client that has left or does not read is no error."""
    with contextlib.suppress(ConnectionError):
        if not response.prepared:
            await response.prepare(request)
        await _Connection(request, response, write_timeout).end()


async def stream(
    request: web.Request, service: Service, generations: Sequence[Generation], events: Events
) -> web.StreamResponse:
    """Answer with the chunks of `generations` as they come. They have been started, so that errors in the request
    have become HTTP errors; what fails from here on is an event, after which the connection is closed."""
    response = web.StreamResponse(headers=HEADERS)
    connection = _Connection(request, response, service.config.write_timeout)
    try:
        await response.prepare(request)
        await _pump(connection, generations, events, service.config.ping_interval)
        await connection.write(events.closing() + DONE)
    except ConnectionError:
        response.force_close()
    except Exception as error:
        response.force_close()
        with contextlib.suppress(ConnectionError):
            await connection.write(event(body_of(as_api_error(error))) + DONE)
    finally:
        for generation in generations:
            generation.cancel()
    return response


async def _pump(
    connection: _Connection, generations: Sequence[Generation], events: Events, ping_interval: float
) -> None:
    """Write chunks until all generations have ended. A reader who is slower finds their chunks merged."""
    news = asyncio.Event()
    loop = asyncio.get_running_loop()
    silent = False
    timer: asyncio.TimerHandle | None = None

    def remind() -> None:
        nonlocal silent, timer
        silent = timer is not None
        timer = loop.call_later(ping_interval, remind)
        news.set()

    remind()
    for generation in generations:
        generation.listen(news.set)
    open_ones = list(generations)
    try:
        while True:
            news.clear()
            written = False
            for generation in list(open_ones):
                ended = generation.ended
                while (chunk := generation.poll()) is not None:
                    if chunk.finish_reason == "error":
                        chunk.finish_reason = None  # the event that follows says so
                    await connection.write(events.chunk(chunk))
                    written = True
                if ended:
                    open_ones.remove(generation)
            if not open_ones:
                return
            if silent and not written:
                await connection.write(PING)
            silent = False
            await news.wait()
    finally:
        if timer is not None:
            timer.cancel()
