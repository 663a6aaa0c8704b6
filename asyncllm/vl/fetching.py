"""Fetches a trusted URL within bounds of time and size, which hold for everything that servers send: heads, redirects
and contents."""

from __future__ import annotations

import http.client
import io
import socket
import time
import urllib.request
from functools import partial
from typing import Any

__all__ = ["fetch"]

_PIECE = 2**16
_MAX_HEAD = 2**20


def fetch(url: str, *, seconds: float, max_bytes: int) -> bytes:
    """Return the content, cut after more than `max_bytes`. Follows redirects, and uses the proxies of the environment.

    Raises OSError, also TimeoutError after so many seconds, ValueError, and HTTPException.
    """
    deadline = time.monotonic() + seconds
    opener = urllib.request.build_opener(_Http(deadline, max_bytes), _Https(deadline, max_bytes))
    request = urllib.request.Request(url, headers={"User-Agent": "asyncllm"})
    content = bytearray()
    with opener.open(request, timeout=seconds) as answer:
        while len(content) <= max_bytes and (piece := answer.read1(_PIECE)):
            content += piece
    return bytes(content)


class _Bounded(urllib.request.AbstractHTTPHandler):
    def __init__(self, deadline: float, max_bytes: int) -> None:
        super().__init__()
        self._deadline = deadline
        self._max_bytes = max_bytes

    def do_open(self, http_class: Any, req: Any, **http_conn_args: Any) -> http.client.HTTPResponse:
        def connect(host: str, **options: Any) -> Any:
            connection = http_class(host, **options)
            connection.response_class = partial(_response, self._deadline, self._max_bytes)
            return connection

        return super().do_open(connect, req, **http_conn_args)


class _Http(_Bounded, urllib.request.HTTPHandler):
    pass


class _Https(_Bounded, urllib.request.HTTPSHandler):
    pass


def _response(deadline: float, max_bytes: int, sock: socket.socket, *args: Any, **named: Any) -> Any:
    return http.client.HTTPResponse(_Socket(sock, deadline, max_bytes), *args, **named)  # type: ignore[arg-type]


class _Socket:
    """What HTTPResponse needs of a socket."""

    def __init__(self, sock: socket.socket, deadline: float, max_bytes: int) -> None:
        self._reading = sock, deadline, max_bytes

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Received(*self._reading))


class _Received(io.RawIOBase):
    """The bytes of one answer. Raises TimeoutError at the deadline, and OSError for far too many."""

    def __init__(self, sock: socket.socket, deadline: float, max_bytes: int) -> None:
        self._sock = sock
        """urllib closes it at the end of the head; the file keeps the connection open."""
        self._file = sock.makefile("rb", buffering=0)
        self._deadline = deadline
        self._left = max_bytes + _MAX_HEAD
        """Bytes that may still come. `fetch` cuts the content, but urllib reads the whole content of a redirect."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        try:
            return self._read(buffer)
        except OSError:
            # urllib does not close a redirect whose content fails.
            self._file.close()
            raise

    def _read(self, buffer: Any) -> int | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it takes too long")
        if self._left <= 0:
            raise OSError("it is too much")
        self._sock.settimeout(left)
        count = self._file.readinto(buffer)
        self._left -= count or 0
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
