"""HttpProtocol: a connection that notices when its client has left, and bounds the bytes that it buffers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError

__all__ = ["HttpProtocol", "http_logger", "is_last", "working"]

MAX_HEAD_BYTES = 2**16
"""Maximum size of a request's line and headers that arrive in pieces."""
HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class HttpProtocol(web.RequestHandler):
    """One connection.

    aiohttp stops reading when another request waits, and then does not notice that the client has left. Therefore,
    while a request is being worked on, another one is dropped, the current answer is the connection's last, and reading
    continues.
    """

    __slots__ = ("_head_bytes", "_on_lost", "_working")

    def __init__(self, manager: web.Server, on_lost: Callable[[HttpProtocol], None], **options: Any) -> None:
        super().__init__(manager, **options)
        self._on_lost = on_lost
        self._working = False
        """Whether a request is being worked on."""
        self._head_bytes = 0
        """Bytes received since the last complete request."""

    @property
    def is_last(self) -> bool:
        """Whether the connection ends with the current answer."""
        return self._close or self._force_close

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the current request as work during the block."""
        self._working = True
        self._let_nothing_wait()
        try:
            yield
        finally:
            self._working = False

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._working:
            self._let_nothing_wait()
        elif self._messages or (self._request_count and self._waiter is None):
            self._head_bytes = 0
        else:  # No request is being read or answered.
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and self.transport is not None:
                self.transport.write(HEAD_TOO_LARGE)
                self.force_close()

    def _let_nothing_wait(self) -> None:
        if not (self._messages or self._message_tail) or self.is_last:
            return
        self.close()
        if self.transport is not None:
            # Further bytes are read and dropped until the connection ends.
            self.transport.resume_reading()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._on_lost(self)


def working(request: web.Request) -> AbstractContextManager[None]:
    """Count the request as work during the block; no effect if another server runs the application."""
    protocol = request.protocol
    return protocol.working() if isinstance(protocol, HttpProtocol) else nullcontext()


def is_last(request: web.Request) -> bool:
    """Return whether the connection ends with the answer to this request."""
    return isinstance(request.protocol, HttpProtocol) and request.protocol.is_last


def http_logger() -> logging.Logger:
    """Return aiohttp's logger without broken requests and connections: with a traceback for each, any client could fill
    the log."""
    found = logging.getLogger("asyncllm.server.http")
    found.addFilter(_is_ours)
    return found


def _is_ours(record: logging.LogRecord) -> bool:
    return not (
        record.exc_info
        and isinstance(record.exc_info[1], (HttpProcessingError, web.RequestPayloadError, ConnectionError))
    )
