"""Server-sent events: the chunks of generations as `data:` lines, ended by exactly one `data: [DONE]`.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html, with OpenAI's final line. LMDeploy's interactive
route streams plain lines of JSON in the same way (`NDJSON`).

A chunk goes from the engine's loop to the socket without waking a task: the generation's taker encodes it and passes it
to the transport, which costs half as much as a coroutine per token (BENCHLOG.md, streams). The handler's task wakes
only for the end, an error, a ping, and a client that falls behind.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from aiohttp import web

from asyncllm.engine.async_engine import AsyncEngine
from asyncllm.engine.requests.generation import Generation
from asyncllm.server.http.errors import ApiError, as_api_error, event_of
from asyncllm.server.http.responses import CLIENT_LEFT, OUTCOME, Connection, begin
from asyncllm.server.request.decode import PROMPT_FIELD
from asyncllm.server.service import Service
from asyncllm.types import Chunk

__all__ = ["DONE", "HEADERS", "NDJSON", "SSE", "Events", "Framing", "event", "stream"]

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"

HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

LARGE = 2048
"""Maximum number of tokens and log-probabilities in a chunk that the taker encodes, about 5 ms; larger chunks are left
to the handler's task."""

UNSENT_BYTES = 16 * 1024
"""Bytes in the transport's buffer beyond which a client counts as slow."""


def event(data: bytes) -> bytes:
    """Return one event; `data` is JSON without line breaks."""
    return b"data: " + data + b"\n\n"


@dataclass(frozen=True, kw_only=True)
class Framing:
    """How a stream of JSON objects is written."""

    content_type: str
    frame: Callable[[bytes], bytes]
    """Returns the bytes of one object, which has no line breaks."""
    ping: bytes
    """The ping of a silent stream; empty for none."""
    done: bytes
    """The end of the stream."""


SSE = Framing(content_type="text/event-stream; charset=utf-8", frame=event, ping=PING, done=DONE)
NDJSON = Framing(content_type="application/x-ndjson", frame=lambda data: data + b"\n", ping=b"", done=b"")


class Events(Protocol):
    """Writes the chunks of an answer in a route's format."""

    def chunk(self, chunk: Chunk) -> bytes:
        """Return the events of one chunk, as bytes."""

    def size(self, chunk: Chunk) -> int:
        """Return the number of tokens and log-probabilities in the events of a chunk."""

    def closing(self) -> bytes:
        """Return the events after the last chunk, except those of the framing."""


async def stream(
    request: web.Request,
    service: Service,
    generations: Sequence[Generation],
    events: Events,
    framing: Framing = SSE,
    failed: Callable[[ApiError], bytes] | None = None,
) -> web.StreamResponse:
    """Answer with the chunks of `generations` as they arrive. They have already been started, so that errors in the
    request have become HTTP errors; later failures are events. If the engine is gone the connection is closed
    afterwards; an error of this answer alone leaves it open for the client's next request. `failed` writes the event of
    a failure, if that is not an object with the key `error`."""
    response = web.StreamResponse(headers={"Content-Type": framing.content_type, **HEADERS})
    config = service.config
    connection = Connection(request, response, config.write_timeout)
    try:
        await begin(request, response)
        await _Stream(request, response, connection, generations, events, service.engine).run(
            config.ping_interval, framing.ping
        )
        if ending := events.closing() + framing.done:
            await connection.write(ending)
    except ConnectionError:
        request[OUTCOME] = CLIENT_LEFT
        response.force_close()
    except Exception as error:
        answer = as_api_error(error, request.get(PROMPT_FIELD, "messages"))
        request[OUTCOME] = answer.status
        if answer.status == 503:
            response.force_close()
        with contextlib.suppress(ConnectionError):
            told = failed(answer) if failed else framing.frame(event_of(answer, config.error_format))
            await connection.write(told + framing.done)
    finally:
        for generation in generations:
            generation.cancel()
    return response


class _Stream:
    """The body of one response. A chunk is written as it arrives if the transport has space; otherwise it waits in its
    generation, merged with other chunks, until the handler's task writes it at the client's pace."""

    def __init__(
        self,
        request: web.Request,
        response: web.StreamResponse,
        connection: Connection,
        generations: Sequence[Generation],
        events: Events,
        engine: AsyncEngine,
    ) -> None:
        self._transport = request.transport
        self._engine = engine
        self._connection = connection
        self._chunked = response.headers.get("Transfer-Encoding") == "chunked"
        """Whether the body is chunked. HTTP/1.0 has no chunks: there, closing the connection ends the body."""
        self._events = events
        self._open = list(generations)
        self._in_thread = False
        """Whether a large chunk is being encoded, while further chunks wait."""
        self._silent = False
        """Whether nothing has been written since the last ping was due."""
        self._ping_due = False
        self._wake = asyncio.Event()

    async def run(self, ping_interval: float, ping: bytes) -> None:
        """Write until all generations have ended. Raises their errors, and ConnectionError if the client has left."""
        for generation in self._open:
            generation.listen(self._wake.set, partial(self._take, generation.index))
        # For chunks that arrived earlier.
        self._wake.set()
        loop = asyncio.get_running_loop()
        timer = loop.call_later(ping_interval, self._remind)
        try:
            while self._open:
                await self._wake.wait()
                self._wake.clear()
                await self._catch_up()
                if self._ping_due:
                    self._ping_due = False
                    if self._silent and ping:
                        await self._write(ping)
                    self._silent = True
                    timer = loop.call_later(ping_interval, self._remind)
        finally:
            timer.cancel()

    def _remind(self) -> None:
        self._ping_due = True
        self._wake.set()

    def _take(self, index: int, chunk: Chunk) -> bool:
        """Write a chunk of the generation with this index, as its taker, or leave it to `_catch_up`. Runs inside the
        engine's turn, so it must not raise."""
        transport = self._transport
        if self._in_thread or transport is None or transport.is_closing():
            return False
        if transport.get_write_buffer_size() > UNSENT_BYTES:
            return False
        chunk.index = index
        try:
            if self._events.size(chunk) > LARGE:
                return False
            data = self._encoded(chunk)
            if not data:
                # The chunk has no event yet, and an empty piece would end the body.
                return True
            transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        except Exception:
            # The handler's task encounters the error again, and may raise it.
            return False
        self._silent = False
        return True

    async def _catch_up(self) -> None:
        """Write the waiting chunks at the client's pace, and drop generations that have ended."""
        for generation in list(self._open):
            ended = generation.ended
            while (chunk := generation.poll()) is not None:
                self._in_thread = True
                try:
                    data = await self._engine.offload(partial(self._encoded, chunk), self._events.size(chunk))
                finally:
                    self._in_thread = False
                await self._write(data)
            if ended:
                self._open.remove(generation)

    async def _write(self, data: bytes) -> None:
        if not data:
            return
        self._silent = False
        await self._connection.write(data)

    def _encoded(self, chunk: Chunk) -> bytes:
        if chunk.finish_reason == "error":
            chunk.finish_reason = None  # The following event reports it.
        return self._events.chunk(chunk)
