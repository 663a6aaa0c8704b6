"""Acceptor: accepts connections from a listening socket, up to a number that includes unfinished TLS handshakes.

asyncio's own server has no limit, and when the process runs out of descriptors, it retries a thousand times per
iteration of the event loop and logs a line for every attempt. Here the limit follows from the number of descriptors
that the process may open.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable

from asyncllm.server.http.protocol import HttpProtocol

try:
    import resource
except ImportError:  # Windows, where sockets are not descriptors.
    resource = None  # type: ignore[assignment]

__all__ = ["Acceptor", "connections_for", "raise_limit"]

logger = logging.getLogger("asyncllm.server")

MAX_PER_ITERATION = 128
"""Maximum number of connections accepted in one iteration of the event loop."""
PAUSE_S = 0.5
"""Seconds without accepting after the system has refused; meanwhile the kernel queues connections."""
LOG_INTERVAL_S = 60.0
"""Minimum seconds between two log lines about that."""

NOTHING_THERE = (BlockingIOError, InterruptedError, ConnectionAbortedError)


class Acceptor:
    """Accepts in the running event loop from `start` to `stop`, and holds open connections until `close`."""

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[Callable[[HttpProtocol], None]], HttpProtocol],
        max_connections: int,
        tls: ssl.SSLContext | None,
        handshake_timeout: float,
    ) -> None:
        """`make_protocol` makes the protocol of a connection, given a function to call when the connection is lost."""
        self._listener = listener
        self._make_protocol = make_protocol
        self._max_connections = max_connections
        self._tls = tls
        self._handshake_timeout = handshake_timeout
        self._loop = asyncio.get_running_loop()
        self._open: set[HttpProtocol] = set()
        """Protocols of the connections, from their acceptance on."""
        self._connecting: set[asyncio.Task[None]] = set()
        """One task for each connection that has no transport yet."""
        self._resuming: asyncio.TimerHandle | None = None
        self._logged_at = -LOG_INTERVAL_S

    def start(self) -> None:
        """Begin or continue to accept."""
        self._resuming = None
        self._loop.add_reader(self._listener, self._accept)

    def stop(self) -> None:
        """Stop accepting, and close the listening socket. Idempotent."""
        if self._resuming is not None:
            self._resuming.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()

    async def close(self) -> None:
        """Stop, and cancel unfinished handshakes."""
        self.stop()
        for task in self._connecting:
            task.cancel()
        if self._connecting:
            await asyncio.wait(self._connecting)

    def _accept(self) -> None:
        for _ in range(MAX_PER_ITERATION):
            try:
                connection, _ = self._listener.accept()
            except NOTHING_THERE:
                return
            except OSError as error:
                self._pause(error)
                return
            if len(self._open) >= self._max_connections:
                connection.close()
                continue
            connection.setblocking(False)
            protocol = self._make_protocol(self._open.discard)
            self._open.add(protocol)
            task = self._loop.create_task(self._connect(connection, protocol))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    def _pause(self, error: OSError) -> None:
        """Pause, because the system has no descriptor or memory for a connection. Meanwhile the listener is not
        watched, because it stays readable."""
        self._loop.remove_reader(self._listener)
        self._resuming = self._loop.call_later(PAUSE_S, self.start)
        if time.monotonic() - self._logged_at >= LOG_INTERVAL_S:
            self._logged_at = time.monotonic()
            logger.error(
                "No connection can be accepted (%s) while %d are open; the next ones wait. Raise the limit of the "
                "process (ulimit -n), or lower max_connections.",
                error.strerror or error,
                len(self._open),
            )

    async def _connect(self, connection: socket.socket, protocol: HttpProtocol) -> None:
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake_timeout if self._tls is not None else None,
            )
        except OSError:
            pass  # no handshake
        finally:
            if not protocol.connected:
                self._open.discard(protocol)


RESERVE = 128
"""Descriptors reserved for other uses: files of a checkpoint, the device, a restart of the engine."""


def connections_for(wanted: int) -> int:
    """Return how many of the `wanted` connections the process's limit allows; at least one."""
    if resource is None:
        return wanted
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, limit - _in_use() - min(RESERVE, limit // 4)))


def raise_limit(wanted: int) -> None:
    """Raise the process's own limit, as far as the system allows, to `wanted` connections."""
    if resource is None or connections_for(wanted) == wanted:
        return
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _in_use() + RESERVE
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(
            resource.RLIMIT_NOFILE,
            (needed if hard_limit == resource.RLIM_INFINITY else min(needed, hard_limit), hard_limit),
        )


def _in_use() -> int:
    for folder in ("/proc/self/fd", "/dev/fd"):
        with contextlib.suppress(OSError):
            return len(os.listdir(folder))
    return 64
