"""Runs the server: loads the model, serves it, and shuts down so that answers finish."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

from asyncllm.config import ServerConfig
from asyncllm.engine.async_engine import AsyncEngine
from asyncllm.errors import InvalidParameter, ModelError
from asyncllm.printable import to_stderr
from asyncllm.server.app import build_app
from asyncllm.server.distributor.registration import Registration
from asyncllm.server.http.acceptor import raise_limit
from asyncllm.server.http.access import Access, read_admin_keys, read_keys
from asyncllm.server.http.listening import address_of, bind, calling_at_signals, first_of, listening, tls_context
from asyncllm.server.http.server_state import Phase
from asyncllm.server.observe.access_log import logging_to_stderr
from asyncllm.server.request.arguments import OPENAI_DEFAULTS, defaults_of
from asyncllm.server.service import Service
from asyncllm.server.supervisor import Supervisor

__all__ = ["loaded_objects_frozen", "open_service", "run", "serve_until_stopped"]

logger = logging.getLogger("asyncllm.server")


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


def _check_folder(adapters_folder: str | None) -> None:
    """Raise InvalidParameter unless the folder can be listed."""
    if adapters_folder is not None:
        try:
            os.listdir(adapters_folder)
        except OSError as error:
            reason = error.strerror or error
            raise InvalidParameter(
                f"adapters_folder {adapters_folder!r} cannot be read: {reason}. Name a folder that holds adapters, or "
                f"will hold them.",
                "adapters_folder",
            ) from None


def _checkpoint_defaults(model_path: str) -> dict[str, object]:
    """Return the entries of a model's generation_config.json; empty for a model without a folder."""
    from asyncllm.locate import locate
    from asyncllm.text.checkpoint_files import read_json_object

    try:
        folder = locate(model_path)
    except ModelError:
        return {}
    return read_json_object(Path(folder) / "generation_config.json")


async def serve_until_stopped(service: Service, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
    """Serve until `state.stop` is set. Then /health/ready reports that the server is leaving, and after
    `drain_delay` seconds it drains: it refuses new requests, lets running ones finish for `drain_timeout` seconds, and
    ends the rest with an error event. Setting `stop_now` cuts this short.

    Raises EngineDead if the engine has died and is not replaced, after all requests have received their errors.
    """
    async with listening(build_app(service), service.config, listener, tls) as stop_accepting:
        await _serve(service, stop_accepting)


async def _serve(service: Service, stop_accepting: Callable[[], None]) -> None:
    state = service.state
    async with service.supervisor.replacing() as gave_up:
        await first_of(None, state.stop, gave_up)
        if service.config.drain_delay and not gave_up.is_set():
            state.phase = Phase.LEAVING
            await first_of(service.config.drain_delay, state.stop_now, gave_up)
        state.phase = Phase.DRAINING
        stop_accepting()
        await first_of(service.config.drain_timeout, state.stop_now, state.idle, gave_up)
        # Requests still running now receive their error event; their handlers end by themselves.
        await service.supervisor.close()
        await first_of(service.config.write_timeout, state.stop_now, state.idle)


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
    await asyncio.to_thread(_check_folder, service.config.adapters_folder)
    tls = await asyncio.to_thread(tls_context, service.config)
    await asyncio.to_thread(raise_limit, service.config.max_connections)
    listener = bind(service.config)
    address = address_of(service.config, listener)
    registration = None
    if service.config.proxy_url is not None:
        registration = await asyncio.to_thread(Registration, service.config, address)
    task = asyncio.current_task()
    assert task is not None
    loading = True

    def asked_to_stop(may_be_second: bool) -> None:
        if loading:
            if may_be_second or not task.cancelling():
                task.cancel()
        else:
            service.state.ask_to_stop(may_be_second)

    with calling_at_signals(asked_to_stop), listener:
        try:
            # A request that arrives while the model is loading gets an answer that says so.
            async with (
                listening(build_app(service), service.config, listener, tls) as stop_accepting,
                service.supervisor,
                _registered(service, registration),
            ):
                loading = False
                with loaded_objects_frozen(service.supervisor):
                    announce(address)
                    await _serve(service, stop_accepting)
        except asyncio.CancelledError:
            if not loading or task.uncancel():
                raise


def _registered(service: Service, registration: Registration | None) -> AbstractAsyncContextManager[None]:
    """Return a context in which the server is registered with its distributor, until it is asked to stop."""
    if registration is None:
        return nullcontext()
    return registration.kept([service.engine.model_name, *service.engine.adapters], service.state.stop)


@contextmanager
def loaded_objects_frozen(supervisor: Supervisor) -> Iterator[None]:
    """Exclude the objects that exist before the first request, and again after a restart, from garbage collection: a
    full collection over half a million objects of torch and a model stops the event loop for 0.15 to 0.27 s."""

    def freeze() -> None:
        gc.unfreeze()
        gc.collect()
        gc.freeze()

    freeze()
    supervisor.on_replaced.append(freeze)
    try:
        yield
    finally:
        supervisor.on_replaced.remove(freeze)
        gc.unfreeze()


def _greet(service: Service, address: str) -> None:
    keys = service.access.num_keys
    auth = f"{keys} key(s)" if keys else "no key needed"
    to_stderr(
        f"{service.engine.model_name} at {address}/v1 ({auth}; routes: {address}/)\n"
        f"Ctrl-C lets answers finish, twice stops at once."
    )
