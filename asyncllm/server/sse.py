"""Server-sent events: the answers of generations as `data:` lines, ended by exactly one `data: [DONE]`.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html, with OpenAI's last line.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Protocol

from aiohttp import ClientConnectionResetError, web

from asyncllm.engine.generation import Generation
from asyncllm.server.errors import as_api_error, body_of
from asyncllm.server.service import Service
from asyncllm.types import Chunk

__all__ = ["DONE", "Events", "event", "stream"]

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"

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
    """The response's body, to a client that may read slowly or not at all."""

    def __init__(self, request: web.Request, response: web.StreamResponse, write_timeout: float) -> None:
        self._transport = request.transport
        self._response = response
        self._write_timeout = write_timeout

    async def write(self, data: bytes) -> None:
        """Raises ConnectionError when the client has left, or has read nothing for `write_timeout` seconds."""
        if self._transport is None or self._transport.is_closing():
            raise ClientConnectionResetError("The client has left.")
        if not self._transport.get_write_buffer_size():
            await self._response.write(data)
            return
        try:
            async with asyncio.timeout(self._write_timeout):
                await self._response.write(data)
        except TimeoutError:
            self._transport.abort()
            raise ClientConnectionResetError("The client does not read.") from None


async def stream(
    request: web.Request, service: Service, generations: Sequence[Generation], events: Events
) -> web.StreamResponse:
    """Answer with the chunks of `generations` as they come. They have been started, so that errors in the request
    have become HTTP errors; what fails from here on is an event, after which the connection is closed."""
    response = web.StreamResponse(headers=HEADERS)
    await response.prepare(request)
    connection = _Connection(request, response, service.config.write_timeout)
    try:
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
    with contextlib.suppress(ConnectionError):
        await response.write_eof()
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
