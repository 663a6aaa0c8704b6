"""Runs the server: socket, TLS, signals, and a shutdown that lets answers finish."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path

from aiohttp import web

from asyncllm.config import ServerConfig
from asyncllm.engine.async_engine import AsyncEngine
from asyncllm.errors import InvalidParameter, ModelError
from asyncllm.server.app import build_app
from asyncllm.server.http.acceptor import Acceptor, connections_for, raise_limit
from asyncllm.server.http.access import Access, read_admin_keys, read_keys
from asyncllm.server.http.protocol import HttpProtocol, http_logger
from asyncllm.server.observe.access_log import logging_to_stderr
from asyncllm.server.request.arguments import OPENAI_DEFAULTS, defaults_of
from asyncllm.server.service import Phase, Service
from asyncllm.server.supervisor import Supervisor
from asyncllm.shown import complain

__all__ = ["bind", "fastest_loop", "loaded_objects_set_aside", "open_service", "run", "serve_until_stopped"]

logger = logging.getLogger("asyncllm.server")

BACKLOG = 1024
"""Maximum number of connections that the kernel queues until they are accepted."""
LINGER_S = 2.0
"""Seconds during which the rest of a refused body is read and dropped before its connection is closed. Otherwise a
client that is still sending would get a reset, possibly before the answer."""


def open_service(
    engine: AsyncEngine, config: ServerConfig, make_engine: Callable[[], AsyncEngine] | None = None
) -> Service:
    """Return the service of an engine, started or not. Blocks on files, and on the hub for a model that has to be
    downloaded.

    `make_engine` makes another engine like it when it dies; without it, the engine is not replaced.

    Raises InvalidParameter for invalid settings.
    """
    config = config.checked()
    access = Access(config, read_keys(config), read_admin_keys(config))
    defaults = OPENAI_DEFAULTS
    if config.generation_config == "auto":
        defaults = defaults_of(_checkpoint_defaults(engine.model_path))
    return Service(engine, config, access, defaults, make_engine)


def _checkpoint_defaults(model_path: str) -> dict[str, object]:
    """Return the entries of a model's generation_config.json; empty for a model without a folder."""
    from asyncllm.locate import locate
    from asyncllm.text.checkpoint_files import read_json_object

    try:
        folder = locate(model_path)
    except ModelError:
        return {}
    return read_json_object(Path(folder) / "generation_config.json")


def bind(config: ServerConfig) -> socket.socket:
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


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
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
    service: Service, listener: socket.socket, tls: ssl.SSLContext | None
) -> AsyncIterator[Callable[[], None]]:
    """Accept connections. Yields a function that stops accepting; open connections end with the block."""
    config = service.config
    runner = web.AppRunner(
        build_app(service),
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
    most = await asyncio.to_thread(connections_for, config.max_connections)
    if most < config.max_connections:
        logger.warning(
            "At most %d connections are taken, not the %d of max_connections: the process may open no more files. "
            "Raise its limit (ulimit -n).",
            most,
            config.max_connections,
        )
    acceptor = Acceptor(listener, make_protocol, most, tls, config.keep_alive_timeout)
    try:
        acceptor.start()
        try:
            yield acceptor.stop
        finally:
            await acceptor.close()
    finally:
        await runner.cleanup()


async def serve_until_stopped(service: Service, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
    """Serve until `service.stop` is set. Then /health/ready reports that the server is leaving, and after `drain_delay`
    seconds it drains: it refuses new requests, lets running ones finish for `drain_timeout` seconds, and ends the rest
    with an error event. Setting `service.stop_now` cuts this short.

    Raises EngineDead if the engine has died and is not replaced, after all requests have received their errors.
    """
    async with listening(service, listener, tls) as stop_accepting:
        await _serve(service, stop_accepting)


async def _serve(service: Service, stop_accepting: Callable[[], None]) -> None:
    async with service.supervisor.keeping() as gave_up:
        await _first_of(None, service.stop, gave_up)
        if service.config.drain_delay and not gave_up.is_set():
            service.phase = Phase.LEAVING
            await _first_of(service.config.drain_delay, service.stop_now, gave_up)
        service.phase = Phase.DRAINING
        stop_accepting()
        await _first_of(service.config.drain_timeout, service.stop_now, service.idle, gave_up)
        # Requests still running now receive their error event; their handlers end by themselves.
        await service.supervisor.close()
        await _first_of(service.config.write_timeout, service.stop_now, service.idle)


async def _first_of(seconds: float | None, *events: asyncio.Event) -> None:
    """Wait for the first of the events, or until the time has passed; None: no limit."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def run(
    make_engine: Callable[[], AsyncEngine], config: ServerConfig, announce: Callable[[str], None] | None = None
) -> None:
    """Load the model, serve it, and stop at SIGTERM, SIGINT or SIGHUP: the first signal lets answers finish, the second
    does not. SIGHUP never counts as the second, because a closing terminal may send it twice, and systemd sends it
    after SIGTERM; if it is ignored, as under nohup, it stays ignored.

    An engine that dies is replaced by a new one from `make_engine`. `announce` receives the address once the model is
    loaded; without it, two lines on standard error announce it. Logs of `log_level` and above go to stderr; a program
    with its own logging calls `serve_until_stopped`. Raises InvalidParameter, ModelError, and EngineDead after too many
    deaths or if the device is lost (`Supervisor`).
    """
    service = await asyncio.to_thread(open_service, make_engine(), config, make_engine)
    with logging_to_stderr(service.config.log_level):
        await _run(service, announce or partial(_greet, service))


async def _run(service: Service, announce: Callable[[str], None]) -> None:
    tls = await asyncio.to_thread(tls_context, service.config)
    await asyncio.to_thread(raise_limit, service.config.max_connections)
    listener = bind(service.config)
    address = _address(service, listener)
    task = asyncio.current_task()
    assert task is not None
    loading = True

    def asked_to_stop(may_be_second: bool) -> None:
        if loading:
            if may_be_second or not task.cancelling():
                task.cancel()
        elif not service.stop.is_set():
            service.stop.set()
        elif may_be_second:
            service.stop_now.set()

    with _calling_at_signals(asked_to_stop), listener:
        try:
            # A request that arrives while the model is loading gets an answer that says so.
            async with listening(service, listener, tls) as stop_accepting, service.supervisor:
                loading = False
                with loaded_objects_set_aside(service.supervisor):
                    announce(address)
                    await _serve(service, stop_accepting)
        except asyncio.CancelledError:
            if not loading or task.uncancel():
                raise


@contextmanager
def _calling_at_signals(asked_to_stop: Callable[[bool], None]) -> Iterator[None]:
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


@contextmanager
def loaded_objects_set_aside(supervisor: Supervisor) -> Iterator[None]:
    """Exclude the objects that exist before the first request, and again after a restart, from garbage collection: a
    full collection over half a million objects of torch and a model stops the event loop for 0.15 to 0.27 s."""

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
    complain(
        f"{service.engine.model_name} at {address}/v1 ({auth}; routes: {address}/)\n"
        f"Ctrl-C lets answers finish, twice stops at once."
    )


def fastest_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return a function that makes uvloop's event loop if it is installed, otherwise asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop
