"""Responses: their headers, JSON bodies, and writing them to clients that read slowly, not at all, or have left."""

from __future__ import annotations

import asyncio
import math
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from aiohttp import ClientConnectionResetError, web

from asyncllm.server.http.access import Access
from asyncllm.server.http.protocol import is_last

if TYPE_CHECKING:
    from asyncllm.engine.async_engine import AsyncEngine

__all__ = [
    "CLIENT_LEFT",
    "OUTCOME",
    "REQUEST_ID",
    "REQUEST_ID_HEADER",
    "Connection",
    "add_headers",
    "asks_for_anthropic",
    "begin",
    "built_response",
    "encode",
    "encoded_alone",
    "json_response",
    "send",
    "set_request_id",
]

Part = TypeVar("Part", bound=msgspec.Struct)

encode = msgspec.json.Encoder().encode

CLIENT_LEFT = 499
"""nginx's status, logged and counted for a request whose client left before its end."""
OUTCOME = web.RequestKey("OUTCOME", int)
"""The status by which a request ended, if not its response's: CLIENT_LEFT, or that of an error in a stream that had
begun with 200. Written by the first function that notices it, read by the entry point."""

REQUEST_ID_HEADER = "X-Request-Id"
REQUEST_ID = web.RequestKey("REQUEST_ID", str)
"""The id of a request, which is in the log and in a header of the answer: its client's, or a new one. Set by
`set_request_id`, which the applications call first."""
VALID_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

SMALL = 2**14
"""Bytes that an empty write buffer accepts before the transport asks to wait (64 KiB in asyncio and uvloop)."""


def set_request_id(request: web.Request) -> None:
    """Set the request's id, which is the client's own if that is valid."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    request[REQUEST_ID] = given if VALID_REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def add_headers(request: web.Request, response: web.StreamResponse, access: Access) -> None:
    """Add the headers of every response."""
    response.headers[REQUEST_ID_HEADER] = request.get(REQUEST_ID, "")
    response.headers["X-Content-Type-Options"] = "nosniff"
    access.grant(request, response)


def asks_for_anthropic(request: web.Request) -> bool:
    """Return whether the request comes from a client of Anthropic's API."""
    return "anthropic-version" in request.headers


def json_response(answer: msgspec.Struct, status: int = 200) -> web.Response:
    """Return an answer that is sent whole."""
    return web.Response(status=status, body=encode(answer), content_type="application/json")


async def built_response(engine: AsyncEngine, build: Callable[[], msgspec.Struct], size: int) -> web.Response:
    """Return the answer of `build`, sent whole. With many tokens (`size`) it is built and encoded in a thread."""
    body = await engine.offload(lambda: encode(build()), size)
    return web.Response(body=body, content_type="application/json")


def encoded_alone(part: Part) -> Part:
    """Return a part of an answer as raw JSON. Large answers are encoded part by part, because encoding holds the
    interpreter lock."""
    raw: Any = msgspec.Raw(encode(part))
    found: Part = raw
    return found


class Connection:
    """Writes to a client that may read slowly or not at all."""

    def __init__(self, request: web.Request, response: web.StreamResponse, write_timeout: float) -> None:
        self._transport = request.transport
        self._response = response
        self._write_timeout = write_timeout

    async def write(self, data: bytes) -> None:
        """Send a piece. Raises ConnectionError if the client has left. A client that reads nothing for `write_timeout`
        seconds is dropped, which cancels the handler."""
        await self._pass(self._response.write, len(data), data)

    async def end(self) -> None:
        """Send the rest and the end of the body, like `write`."""
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
    """Drops a connection whose client reads nothing for `patience` seconds, and thereby cancels its handler."""

    def __init__(self, transport: asyncio.WriteTransport, patience: float) -> None:
        self._transport = transport
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._unread = math.inf
        """Bytes in the write buffer when it last shrank, at `_since`."""
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


async def begin(request: web.Request, response: web.StreamResponse) -> None:
    """Send the head of a response. Raises ConnectionError."""
    if is_last(request) or not request.content.is_eof():
        response.force_close()
    await response.prepare(request)


async def send(request: web.Request, response: web.StreamResponse, write_timeout: float) -> None:
    """Write a whole response, or the end of a stream. If the client has left, set `OUTCOME` instead of raising. If the
    rest of a refused body is still to come, close the connection."""
    try:
        if not response.prepared:
            await begin(request, response)
        await Connection(request, response, write_timeout).end()
    except ConnectionError:
        request.setdefault(OUTCOME, CLIENT_LEFT)
