"""A client of a soak: HTTP/1.1 over a bare socket, which can leave at any moment and knows what it has sent."""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlsplit

from soak_books import Record, outcome_of
from soak_requests import Asked

__all__ = ["Asking"]

PATIENCE_S = 600.0
"""Beyond which an answer is taken for lost: the last priority waits long on a machine that has other things to do."""


class _Left(Exception):
    """The client leaves, as it was told to."""


class Asking:
    """One client, with a connection that it keeps while it can."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self._place = (place.hostname or "", place.port or 80)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._heard = False
        self._pieces = 0

    async def ask(self, asked: Asked) -> Record | None:
        """Send a request and read its answer, or leave. None: it was left before its head was sent, so it was none."""
        writer = await self._connected()
        data = asked.data()
        self._heard, self._pieces = False, 0
        head = data.index(b"\r\n\r\n") + 4
        sent = {"in the head": head // 2, "in the body": head + len(asked.body) // 2}.get(asked.leaves or "", len(data))
        try:
            writer.write(data[:sent])
            await writer.drain()  # until the kernel has it all
        except ConnectionError:
            self.leave()
            return Record(asked, "failed", 0, False, complaint="the server did not read the request")
        if asked.leaves == "in the head":
            self.leave()
            return None
        try:
            if asked.leaves in ("in the body", "at once"):
                raise _Left
            deadline = asked.delay if asked.leaves == "waiting" else PATIENCE_S
            async with asyncio.timeout(deadline):
                return await self._read(asked)
        except (_Left, TimeoutError):
            left_at = time.monotonic()
            self.leave()
            complaint = f"no whole answer within {PATIENCE_S:g} s" if asked.leaves is None else ""
            return Record(asked, "cancelled", 0, self._heard, left_at, complaint)
        except (ConnectionError, asyncio.IncompleteReadError, ValueError) as error:
            self.leave()
            return Record(asked, "failed", 0, self._heard, complaint=f"the connection ended in the answer: {error!r}")

    def leave(self) -> None:
        """Close the connection without a word."""
        if self._writer is not None:
            self._writer.transport.abort()
            self._reader = self._writer = None

    async def _connected(self) -> asyncio.StreamWriter:
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(*self._place)
            self._writer.transport.set_write_buffer_limits(high=0)
        return self._writer

    async def _read(self, asked: Asked) -> Record:
        assert self._reader is not None
        line = await self._reader.readline()
        if not line:
            raise ConnectionResetError("it was closed")
        self._heard = True
        status = int(line.split()[1])
        headers = {}
        while (line := await self._reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        body = await self._body(asked, headers)
        outcome, complaint = outcome_of(status), ""
        if headers.get("x-request-id") != asked.id:
            complaint = f"the answer has the id {headers.get('x-request-id')}"
        elif asked.bad != (outcome == "rejected") and not _may_be_so(asked, status, body):
            complaint = f"a {'bad' if asked.bad else 'good'} request got {status}: {body[:200]!r}"
        if status == 503 or b'"code":"engine_unavailable"' in body:
            complaint = f"the engine has died: {body[-200:]!r}"
        if status == 200 and b'{"error":{' in body:
            outcome = "failed"  # in the middle of a stream
        elif headers.get("content-type", "").startswith("text/event-stream") and not body.endswith(b"data: [DONE]\n\n"):
            complaint = f"a stream without its end: {body[-200:]!r}"
        if outcome == "failed" or asked.closes or headers.get("connection") == "close":
            self.leave()
        return Record(asked, outcome, status, True, complaint=complaint)

    async def _body(self, asked: Asked, headers: dict[str, str]) -> bytes:
        assert self._reader is not None
        body = b""
        if headers.get("transfer-encoding") != "chunked":
            return await self._reader.readexactly(int(headers["content-length"]))
        while True:
            size = int(await self._reader.readline(), 16)
            piece = await self._reader.readexactly(size + 2)
            if not size:
                return body
            body += piece[:-2]
            self._pieces += 1
            if asked.leaves == "in the answer" and self._pieces >= asked.pieces:
                raise _Left


def _may_be_so(asked: Asked, status: int, body: bytes) -> bool:
    """Whether that is no wonder: a good request may find the server busy, or its conversation forgotten or too long,
    and a bad one may meet a planned fault before it is found out."""
    if asked.bad:
        return status == 500
    if status == 400:
        return asked.kind.startswith("conversation") and b'"context_length_exceeded"' in body
    return status in (409, 410, 429)
