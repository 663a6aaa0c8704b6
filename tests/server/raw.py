"""HTTP/1.1 over a bare socket, for requests that no client library would send and clients that behave badly."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tests.server.serving import Served

__all__ = ["Answer", "Wire", "connected", "events_of", "head", "post", "until"]

PATIENCE_S = 5.0
"""Longer than anything here may take."""


async def until(condition: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    """Wait for the condition; it is what happens that counts, and not when."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - a server does not announce that it has forgotten a client
            await asyncio.sleep(0.001)


def events_of(body: bytes) -> list[Any]:
    """The events of a stream, which ends with exactly one `[DONE]`; comments left out."""
    *lines, done = [line for line in body.decode().split("\n\n") if line and not line.startswith(":")]
    assert done == "data: [DONE]"
    assert body.endswith(b"data: [DONE]\n\n")
    assert "data: [DONE]" not in lines
    return [json.loads(line.removeprefix("data: ")) for line in lines]


class Answer(NamedTuple):
    """A response; names of headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def head(method: str, path: str, headers: Mapping[str, str | bytes] | None = None) -> bytes:
    """The head of a request, with Host unless it is given."""
    lines = [f"{method} {path} HTTP/1.1".encode()]
    for name, value in {"Host": "localhost", **(headers or {})}.items():
        lines.append(name.encode() + b": " + (value if isinstance(value, bytes) else value.encode()))
    return b"\r\n".join(lines) + b"\r\n\r\n"


def post(path: str, body: Any, headers: Mapping[str, str | bytes] | None = None) -> bytes:
    """A whole POST; `body` is bytes, or is written as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}
    return head("POST", path, fields) + data


class Wire:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def line(self) -> bytes:
        """The next line, with its end; empty at the end of the connection."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.readline()

    async def answer(self, *, to_head: bool = False) -> Answer:
        """The next response. Raises ConnectionError when the connection ends instead."""
        async with asyncio.timeout(PATIENCE_S):
            status, headers = await self.answer_head()
            body = b""
            if to_head or status in (100, 204):
                pass
            elif headers.get("transfer-encoding") == "chunked":
                while piece := await self.piece():
                    body += piece
            elif "content-length" in headers:
                body = await self.reader.readexactly(int(headers["content-length"]))
            else:
                body = await self.reader.read()
            return Answer(status, headers, body)

    async def answer_head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the next response."""
        first = await self.reader.readline()
        if not first:
            raise ConnectionResetError("closed")
        headers = {}
        while (line := await self.reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        return int(first.split()[1]), headers

    async def piece(self) -> bytes:
        """The next chunk of a chunked body; empty at its end."""
        line = await self.reader.readline()
        if not line.endswith(b"\r\n"):
            raise ConnectionResetError("closed inside a body")
        size = int(line, 16)
        return (await self.reader.readexactly(size + 2))[:size]

    async def closed(self, seconds: float = PATIENCE_S) -> bytes:
        """Wait until the server closes the connection. -> what came until then."""
        try:
            async with asyncio.timeout(seconds):
                return await self.reader.read()
        except ConnectionError:
            return b""

    def abort(self, *, reset: bool = False) -> None:
        """Leave without a word; with `reset`, as a machine that does not know of the connection."""
        if reset:
            found = self.writer.get_extra_info("socket")
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@asynccontextmanager
async def connected(served: Served, *, receive_buffer: int | None = None) -> AsyncIterator[Wire]:
    """Connect to a server of plain HTTP. `receive_buffer`: bytes that the kernel keeps for a client that reads late."""
    place = urlsplit(served.url)
    own = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    own.setblocking(False)
    if receive_buffer is not None:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    try:
        await asyncio.get_running_loop().sock_connect(own, (place.hostname, place.port))
    except OSError:
        own.close()
        raise
    reader, writer = await asyncio.open_connection(sock=own, limit=2**16)
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()
        await asyncio.sleep(0)
