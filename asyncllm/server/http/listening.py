"""Listening: the socket, TLS, connections, the signals that end a program, and its event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial

from aiohttp import web

from asyncllm.config import ListenConfig
from asyncllm.errors import InvalidParameter
from asyncllm.server.http.acceptor import Acceptor, connections_for
from asyncllm.server.http.protocol import HttpProtocol, http_logger

__all__ = ["address_of", "bind", "calling_at_signals", "fastest_loop", "first_of", "listening", "tls_context"]

logger = logging.getLogger("asyncllm.server")

BACKLOG = 1024
"""Maximum number of connections that the kernel queues until they are accepted."""
LINGER_S = 2.0
"""Seconds during which the rest of a refused body is read and dropped before its connection is closed. Otherwise a
client that is still sending would get a reset, possibly before the answer."""


def bind(config: ListenConfig) -> socket.socket:
    """Return the listening socket. Raises InvalidParameter if the address is in use or not this machine's."""
    family = socket.AF_INET6 if ":" in config.server_name else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.server_name, config.server_port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise InvalidParameter(
            f"Cannot listen on {config.server_name}:{config.server_port}: {error.strerror or error}. Choose another "
            f"server_port or server_name, or stop what uses it.",
            "server_port",
        ) from None
    return listener


def tls_context(config: ListenConfig) -> ssl.SSLContext | None:
    """Return the TLS context with certificate and key, or None without TLS. Raises InvalidParameter."""
    if not config.ssl:
        return None
    key = config.ssl_keyfile or os.environ.get("SSL_KEYFILE")
    certificate = config.ssl_certfile or os.environ.get("SSL_CERTFILE")
    if not key or not certificate:
        raise InvalidParameter(
            "ssl needs a key and a certificate: set ssl_keyfile and ssl_certfile, or the variables SSL_KEYFILE and "
            "SSL_CERTFILE.",
            "ssl",
        )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidParameter(
            f"The certificate {certificate!r} and the key {key!r} cannot be used ({type(error).__name__}: "
            f"{error.strerror or error}). Give PEM files that belong together.",
            "ssl",
        ) from None
    return context


@asynccontextmanager
async def listening(
    app: web.Application, config: ListenConfig, listener: socket.socket, tls: ssl.SSLContext | None
) -> AsyncIterator[Callable[[], None]]:
    """Accept connections. Yields a function that stops accepting; open connections end with the block."""
    runner = web.AppRunner(
        app,
        # When a client leaves, its handler is cancelled, and the answer with it.
        handler_cancellation=True,
        shutdown_timeout=1.0,
    )
    await runner.setup()
    handlers = runner.server
    assert handlers is not None
    make_protocol = partial(
        HttpProtocol,
        handlers,
        loop=asyncio.get_running_loop(),
        keepalive_timeout=config.keep_alive_timeout,
        # A body is decompressed after its request has been admitted (`read_body`).
        auto_decompress=False,
        lingering_time=LINGER_S,
        access_log=None,
        logger=http_logger(),
    )
    max_connections = await asyncio.to_thread(connections_for, config.max_connections)
    if max_connections < config.max_connections:
        logger.warning(
            "At most %d connections are taken, not the %d of max_connections: the process may open no more files. "
            "Raise its limit (ulimit -n).",
            max_connections,
            config.max_connections,
        )
    acceptor = Acceptor(listener, make_protocol, max_connections, tls, config.keep_alive_timeout)
    try:
        acceptor.start()
        try:
            yield acceptor.stop
        finally:
            await acceptor.close()
    finally:
        await runner.cleanup()


def address_of(config: ListenConfig, listener: socket.socket) -> str:
    """Return the address on which a program listens, without a slash at the end."""
    host, port = listener.getsockname()[:2]
    return f"{'https' if config.ssl else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


async def first_of(seconds: float | None, *events: asyncio.Event) -> None:
    """Wait for the first of the events, or until the time has passed; None: no limit."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


@contextmanager
def calling_at_signals(asked_to_stop: Callable[[bool], None]) -> Iterator[None]:
    """Call `asked_to_stop` at each signal to stop, with whether it may count as the owner's second one."""
    loop = asyncio.get_running_loop()
    signals = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    for number in signals:
        loop.add_signal_handler(number, asked_to_stop, number != signal.SIGHUP)
    try:
        yield
    finally:
        for number in signals:
            with suppress(ValueError):
                loop.remove_signal_handler(number)


def fastest_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return a function that makes uvloop's event loop if it is installed, otherwise asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop
