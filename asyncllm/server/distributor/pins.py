"""Pins: which node holds a conversation or a stored response, since only that one can continue it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Literal, NamedTuple

from asyncllm.server.distributor.nodes import Node, Nodes

__all__ = ["Pins"]

MAX_PINS = 2**16

Kind = Literal["session", "response"]


class _Pin(NamedTuple):
    node: Node
    holds: bool
    """Whether the node has the conversation itself; otherwise it only computes an answer that may be stopped by its
    session_id."""
    used: float


class Pins:
    """Pins by tenant and id, least recently used first. Each is forgotten `ttl` seconds after its last use, when its
    node is removed, or to make room for others."""

    def __init__(self, nodes: Nodes, ttl: float) -> None:
        self._nodes = nodes
        self._ttl = ttl
        self._pins: OrderedDict[tuple[Kind, int, str | int], _Pin] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pins)

    def get(self, kind: Kind, tenant: int, name: str | int) -> Node | None:
        """Return the node, or None if none is known."""
        place = kind, tenant, name
        pin = self._pins.get(place)
        if pin is None:
            return None
        now = asyncio.get_running_loop().time()
        if pin.used + self._ttl < now or pin.node not in self._nodes:
            del self._pins[place]
            return None
        self._pins[place] = pin._replace(used=now)
        self._pins.move_to_end(place)
        return pin.node

    def put(self, kind: Kind, tenant: int, name: str | int, node: Node, *, holds: bool = True) -> None:
        """Record the node. One that merely computes an answer does not replace one that holds a conversation."""
        if not holds and self.get(kind, tenant, name) is not None and self._pins[kind, tenant, name].holds:
            return
        place = kind, tenant, name
        self._pins[place] = _Pin(node, holds, asyncio.get_running_loop().time())
        self._pins.move_to_end(place)
        if len(self._pins) > MAX_PINS:
            self._pins.popitem(last=False)
