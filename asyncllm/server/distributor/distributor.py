"""Distributor: the parts that a distributor consists of, and their life."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from aiohttp import web

from asyncllm.config import DistributorConfig
from asyncllm.server.distributor.dispatch import Dispatcher
from asyncllm.server.distributor.forwarding import Forwarding
from asyncllm.server.distributor.health import HealthChecks
from asyncllm.server.distributor.metrics import DistributorMetrics
from asyncllm.server.distributor.node_file import NodeFile
from asyncllm.server.distributor.nodes import Node, Nodes, address_of_node
from asyncllm.server.distributor.pins import Pins
from asyncllm.server.distributor.strategies import strategy_named
from asyncllm.server.distributor.upstream import open_session
from asyncllm.server.http.access import Access, read_admin_keys, read_key, read_keys
from asyncllm.server.http.server_state import ServerState

__all__ = ["DISTRIBUTOR", "Distributor", "distributor_of", "open_distributor"]

logger = logging.getLogger("asyncllm.server")


class Distributor:
    """What all handlers share."""

    def __init__(self, config: DistributorConfig, access: Access, kept: Sequence[Node], file: NodeFile | None) -> None:
        """`kept`: the nodes of the node file."""
        self.config = config
        self.access = access
        self.state = ServerState()
        self.nodes = Nodes()
        for url in config.nodes or ():
            self.nodes.add(Node(address_of_node(url), configured=True))
        for node in kept:
            if self.nodes.get(node.url) is None:
                self.nodes.add(node)
        self.pins = Pins(self.nodes, config.session_ttl)
        self.dispatcher = Dispatcher(self.nodes, self.pins, strategy_named(config.routing_strategy), config)
        self.metrics = DistributorMetrics(self.nodes, self.dispatcher)
        self.file = file
        self.node_key = read_key(config.node_key_file, "node_key_file")
        self.forwarding: Forwarding
        """Set, like `checks`, while `running`."""
        self.checks: HealthChecks

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Check the nodes and keep connections to them during the block."""
        async with open_session(self.config) as session:
            self.checks = HealthChecks(session, self.nodes, self.config, self.node_key)
            self.forwarding = Forwarding(
                session,
                self.nodes,
                self.dispatcher,
                self.pins,
                self.metrics,
                self.config,
                self.node_key,
                self.access.num_keys,
            )
            for node in self.nodes:
                self.checks.watch(node)
            try:
                yield
            finally:
                await self.checks.close()

    async def save(self) -> None:
        """Write the node file, if there is one. The log tells of a failure, since the nodes serve nevertheless."""
        if self.file is not None:
            try:
                await self.file.write(list(self.nodes))
            except OSError as error:
                logger.error("The list of nodes cannot be kept: %s", error)


def open_distributor(config: DistributorConfig, port: int) -> Distributor:
    """Return the distributor that listens on this port. Blocks on files. Raises InvalidParameter."""
    config = config.checked()
    file = NodeFile(config.state_folder, port) if config.state_folder is not None else None
    kept = file.read() if file is not None else ()
    return Distributor(config, Access(config, read_keys(config), read_admin_keys(config)), kept, file)


DISTRIBUTOR = web.AppKey("DISTRIBUTOR", Distributor)


def distributor_of(request: web.Request) -> Distributor:
    return request.app[DISTRIBUTOR]
