"""Running the server: socket, TLS, signals, and an end that lets answers finish."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path

from aiohttp import web
from aiohttp.http import HttpProcessingError

from asyncllm.config import ServerConfig
from asyncllm.engine.async_engine import AsyncEngine
from asyncllm.errors import InvalidParameter, ModelError
from asyncllm.server.access import Access, read_admin_keys, read_keys
from asyncllm.server.access_log import logging_to_stderr
from asyncllm.server.app import build_app
from asyncllm.server.sampling import OPENAI_DEFAULTS, defaults_of
from asyncllm.server.service import Phase, Service
from asyncllm.server.supervisor import Supervisor

__all__ = ["bind", "loaded_objects_set_aside", "open_service", "run", "serve_until_stopped"]

logger = logging.getLogger("asyncllm.server")

BACKLOG = 1024
"""Connections that the kernel keeps until they are accepted."""


def open_service(
    engine: AsyncEngine, config: ServerConfig, make_engine: Callable[[], AsyncEngine] | None = None
) -> Service:
    """The service of an engine, started or not. Blocks on files, and on the hub for a model that is not here yet.

    `make_engine` makes another of its kind when it dies; without it, that one is not replaced.

    Raises InvalidParameter for settings that do not hold.
    """
    config = config.checked()
    access = Access(config, read_keys(config), read_admin_keys(config))
    defaults = OPENAI_DEFAULTS
    if config.generation_config == "auto":
        defaults = defaults_of(_checkpoint_defaults(engine.model_path))
    return Service(engine, config, access, defaults, make_engine)


def _checkpoint_defaults(model_path: str) -> dict[str, object]:
    """generation_config.json of a model on disk; nothing for an engine whose model has no folder."""
    from asyncllm.locate import locate
    from asyncllm.text.checkpoint_files import read_json_object

    try:
        folder = locate(model_path)
    except ModelError:
        return {}
    return read_json_object(Path(folder) / "generation_config.json")


def bind(config: ServerConfig) -> socket.socket:
    """The listening socket. Raises InvalidParameter when the address is taken or not this machine's."""
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


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """The certificate and key to serve https with. Raises InvalidParameter."""
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
    service: Service, listener: socket.socket, tls: ssl.SSLContext | None
) -> AsyncIterator[Callable[[], None]]:
    """Accept connections. Yields what stops accepting further ones; the open ones end with the block."""
    config = service.config
    runner = web.AppRunner(
        build_app(service),
        # A client that leaves cancels its handler, and with it the answer.
        handler_cancellation=True,
        keepalive_timeout=config.keep_alive_timeout,
        access_log=None,
        logger=_http_logger(),
        shutdown_timeout=1.0,
    )
    await runner.setup()
    handlers = runner.server
    assert handlers is not None

    def accept() -> asyncio.BaseProtocol:
        return handlers() if len(handlers.connections) < config.max_connections else _Refused()

    try:
        handshake_timeout = config.keep_alive_timeout if tls is not None else None
        server = await asyncio.get_running_loop().create_server(
            accept, sock=listener, backlog=BACKLOG, ssl=tls, ssl_handshake_timeout=handshake_timeout
        )
        try:
            yield server.close
        finally:
            server.close()
    finally:
        await runner.cleanup()


def _http_logger() -> logging.Logger:
    """aiohttp's, less broken requests and connections: with a traceback for each, anybody could fill the log."""
    found = logging.getLogger("asyncllm.server.http")
    found.addFilter(_is_ours)
    return found


def _is_ours(record: logging.LogRecord) -> bool:
    return not (
        record.exc_info
        and isinstance(record.exc_info[1], (HttpProcessingError, web.RequestPayloadError, ConnectionError))
    )


class _Refused(asyncio.Protocol):
    """A connection above `max_connections`."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


async def serve_until_stopped(service: Service, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
    """Serve until `service.stop` is set. Then leave, as /health/ready says from now on, and after `drain_delay` seconds
    drain: refuse new requests, let the running ones finish for `drain_timeout` seconds, and end what is left with an
    error event. Setting `service.stop_now` cuts that short.

    Raises EngineDead, when all requests have got their errors, once the engine has died and is not to be replaced.
    """
    async with listening(service, listener, tls) as stop_accepting, service.supervisor.keeping() as gave_up:
        await _first_of(None, service.stop, gave_up)
        if service.config.drain_delay and not gave_up.is_set():
            service.phase = Phase.LEAVING
            await _first_of(service.config.drain_delay, service.stop_now, gave_up)
        service.phase = Phase.DRAINING
        stop_accepting()
        await _first_of(service.config.drain_timeout, service.stop_now, service.idle, gave_up)
        # What still runs gets its error event now; the handlers end by themselves.
        await service.supervisor.close()
        await _first_of(service.config.write_timeout, service.stop_now, service.idle)


async def _first_of(seconds: float | None, *events: asyncio.Event) -> None:
    """Wait for the first of the events, or for the time to pass; None: however long it takes."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def run(
    make_engine: Callable[[], AsyncEngine], config: ServerConfig, announce: Callable[[str], None] | None = None
) -> None:
    """Load the model, serve it, and stop at SIGTERM or SIGINT: the first lets answers finish, the second does not.

    An engine that dies is replaced by another that `make_engine` makes. `announce` gets the address once the model is
    loaded; without it, two lines on standard error tell it. What is logged goes to stderr, from `log_level` up; a
    program with logging of its own calls `serve_until_stopped`. Raises InvalidParameter, ModelError, and EngineDead
    after too many deaths or when the device is lost (`Supervisor`).
    """
    service = await asyncio.to_thread(open_service, make_engine(), config, make_engine)
    with logging_to_stderr(service.config.log_level):
        await _run(service, announce or partial(_greet, service))


async def _run(service: Service, announce: Callable[[str], None]) -> None:
    tls = await asyncio.to_thread(tls_context, service.config)
    listener = bind(service.config)
    task = asyncio.current_task()
    assert task is not None
    loading = True

    def asked_to_stop() -> None:
        if loading:
            task.cancel()
        elif service.stop.is_set():
            service.stop_now.set()
        else:
            service.stop.set()

    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, asked_to_stop)
    try:
        with listener:
            try:
                async with service.supervisor:
                    loading = False
                    with loaded_objects_set_aside(service.supervisor):
                        announce(_address(service, listener))
                        await serve_until_stopped(service, listener, tls)
            except asyncio.CancelledError:
                if not loading or task.uncancel():
                    raise
    finally:
        for number in signals:
            with suppress(ValueError):
                loop.remove_signal_handler(number)


@contextmanager
def loaded_objects_set_aside(supervisor: Supervisor) -> Iterator[None]:
    """Spare the garbage collector what is there before the first request, and again after a restart: looking through
    half a million objects of torch and a model, in every full collection, stops the event loop for 0.15 to 0.27 s."""

    def set_aside() -> None:
        gc.unfreeze()
        gc.collect()
        gc.freeze()

    set_aside()
    supervisor.on_replaced.append(set_aside)
    try:
        yield
    finally:
        supervisor.on_replaced.remove(set_aside)
        gc.unfreeze()


def _address(service: Service, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"{'https' if service.config.ssl else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _greet(service: Service, address: str) -> None:
    keys = service.access.num_keys
    auth = f"{keys} key(s)" if keys else "no key needed"
    print(
        f"{service.engine.model_name} at {address}/v1 ({auth}; routes: {address}/)\n"
        f"Ctrl-C lets answers finish, twice stops at once.",
        file=sys.stderr,
        flush=True,
    )
