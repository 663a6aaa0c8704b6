"""Runs a distributor: listens, and shuts down so that answers finish."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial

from asyncllm.config import DistributorConfig
from asyncllm.printable import to_stderr
from asyncllm.server.distributor.app import build_app
from asyncllm.server.distributor.distributor import Distributor, open_distributor
from asyncllm.server.http.acceptor import raise_limit
from asyncllm.server.http.listening import address_of, bind, calling_at_signals, first_of, listening, tls_context
from asyncllm.server.http.server_state import Phase
from asyncllm.server.observe.access_log import logging_to_stderr

__all__ = ["run", "serve_until_stopped"]


async def run(config: DistributorConfig, announce: Callable[[str], None] | None = None) -> None:
    """Distribute requests until SIGTERM, SIGINT or SIGHUP: the first lets answers finish, the second does not.

    `announce` receives the address; without it, two lines on standard error announce it. Raises InvalidParameter.
    """
    config = config.checked()
    with logging_to_stderr(config.log_level):
        await asyncio.to_thread(raise_limit, 2 * config.max_connections)
        with bind(config) as listener:
            port = listener.getsockname()[1]
            distributor = await asyncio.to_thread(open_distributor, config, port)
            with calling_at_signals(distributor.state.ask_to_stop):
                greet = announce or partial(_greet, distributor)
                await serve_until_stopped(distributor, listener, greet)


async def serve_until_stopped(
    distributor: Distributor, listener: socket.socket, announce: Callable[[str], None]
) -> None:
    """Serve until `state.stop` is set. Then new requests are refused, and running ones have `drain_timeout`
    seconds to finish; setting `stop_now` cuts this short."""
    config, state = distributor.config, distributor.state
    tls = await asyncio.to_thread(tls_context, config)
    async with listening(build_app(distributor), config, listener, tls) as stop_accepting:
        announce(address_of(config, listener))
        await state.stop.wait()
        state.phase = Phase.DRAINING
        stop_accepting()
        await first_of(config.drain_timeout, state.stop_now, state.idle)


def _greet(distributor: Distributor, address: str) -> None:
    keys = distributor.access.num_keys
    to_stderr(
        f"distributor at {address}/v1 ({f'{keys} key(s)' if keys else 'no key needed'}; "
        f"{len(distributor.nodes)} node(s); nodes: {address}/nodes/status)\n"
        f"Ctrl-C lets answers finish, twice stops at once."
    )
