"""Dispatcher: gives each request a node, within each node's bound, first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from asyncllm.config import DistributorConfig
from asyncllm.server.distributor.nodes import Node, Nodes
from asyncllm.server.distributor.pins import Pins
from asyncllm.server.distributor.routing_fields import RoutingFields
from asyncllm.server.distributor.strategies import Strategy, rendezvous
from asyncllm.server.http.errors import ApiError, retry_after

__all__ = ["Dispatcher"]


@dataclass(eq=False, slots=True)
class _Waiting:
    """A request that waits until one of its nodes has room."""

    fields: RoutingFields
    node: asyncio.Future[Node]


class Dispatcher:
    """Counts the unfinished requests of each node: `take` and `take_another` add one, `give_back` takes it away."""

    def __init__(self, nodes: Nodes, pins: Pins, strategy: Strategy, config: DistributorConfig) -> None:
        self._nodes = nodes
        self._pins = pins
        self._strategy = strategy
        self._config = config
        self._waiting: deque[_Waiting] = deque()
        nodes.on_change.append(self._serve_waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def take(self, fields: RoutingFields) -> Node:
        """Return a node with room for the request, after waiting for one if necessary. Raises ApiError 404 if no node
        has the model, 503 if none that has it takes requests, or if all stay full."""
        node = self._choose(self._candidates(fields), fields)
        return node if node is not None else await self._wait(fields)

    def take_another(self, fields: RoutingFields, tried: Sequence[Node]) -> Node | None:
        """Return a node with room that has not been tried; None if there is none, or if another one lacks the
        conversation that the request continues."""
        if self._pinned(fields) is not None:
            return None
        return self._choose([node for node in self._ready(fields) if node not in tried], fields)

    def give_back(self, node: Node) -> None:
        """Record the end of a request, and give its room to the first that waits for it."""
        node.unfinished -= 1
        for waiting in list(self._waiting):
            if self._serve(waiting):
                return

    def _pinned(self, fields: RoutingFields) -> Node | None:
        if fields.response is not None:
            return self._pins.get("response", fields.tenant, fields.response)
        if fields.session is not None:
            return self._pins.get("session", fields.tenant, fields.session)
        return None

    def _ready(self, fields: RoutingFields) -> list[Node]:
        return [node for node in self._nodes if node.ready and node.serves(fields.model)]

    def _candidates(self, fields: RoutingFields) -> list[Node]:
        """Return the nodes that may answer, full ones included; at least one. Raises ApiError."""
        pinned = self._pinned(fields)
        if pinned is not None:
            if pinned.ready:
                return [pinned]
            raise ApiError(
                503,
                "The server that holds this conversation takes no requests now. Come back later, or send the whole "
                "conversation as a new one.",
                code="conversation_unavailable",
                headers=retry_after(2 * self._config.health_interval),
            )
        ready = self._ready(fields)
        if ready:
            return ready
        if len(self._nodes) and not any(node.serves(fields.model) for node in self._nodes):
            raise ApiError(
                404,
                f"No server has the model {str(fields.model)[:128]!r}. GET /v1/models lists what is served.",
                code="model_not_found",
                param="model",
            )
        raise ApiError(
            503,
            "No server takes requests now. Come back later; GET /nodes/status tells the owner what is wrong."
            if len(self._nodes)
            else "There is no server yet. Its owner adds one with --nodes, POST /nodes/add, or a server's --proxy-url.",
            code="no_node",
            headers=retry_after(2 * self._config.health_interval),
        )

    def _choose(self, candidates: Sequence[Node], fields: RoutingFields) -> Node | None:
        """Return one of the nodes that have room, and count the request as its own; None if all are full."""
        if fields.session is not None and candidates:
            # A distributor that has been started again finds the conversation by the same hash.
            candidates = [rendezvous(candidates, b"%d %d" % (fields.tenant, fields.session))]
        free = [node for node in candidates if node.unfinished < self._config.max_unfinished]
        if not free:
            return None
        node = self._strategy(free, fields) if len(free) > 1 else free[0]
        node.unfinished += 1
        return node

    async def _wait(self, fields: RoutingFields) -> Node:
        if len(self._waiting) >= self._config.max_waiting:
            raise self._full()
        waiting = _Waiting(fields, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(self._config.wait_timeout):
                return await waiting.node
        except BaseException as error:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif waiting.node.done() and not waiting.node.cancelled() and waiting.node.exception() is None:
                self.give_back(waiting.node.result())
            if isinstance(error, TimeoutError):
                raise self._full() from None
            raise

    def _full(self) -> ApiError:
        return ApiError(
            503,
            "All servers have as many requests as they may, and others wait. Come back later.",
            code="nodes_full",
            headers=retry_after(1),
        )

    def _serve(self, waiting: _Waiting) -> bool:
        """Give a waiting request its node or its error, and remove it; returns whether it got a node."""
        if waiting.node.done():  # It has been cancelled, or its time is over.
            return False
        try:
            node = self._choose(self._candidates(waiting.fields), waiting.fields)
        except ApiError as error:
            self._waiting.remove(waiting)
            waiting.node.set_exception(error)
            return False
        if node is None:
            return False
        self._waiting.remove(waiting)
        waiting.node.set_result(node)
        return True

    def _serve_waiting(self) -> None:
        for waiting in list(self._waiting):
            self._serve(waiting)
