"""Nodes: the servers to which requests are distributed, and what is known of each."""

from __future__ import annotations

import enum
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Node", "Nodes", "State", "address_of_node"]

logger = logging.getLogger("asyncllm.server")

MAX_FAILURES = 3
"""Failed connections and checks in a row after which a node gets no requests until a check succeeds."""
RECORDS = 15
"""Number of latencies that are remembered, as in LMDeploy."""


class State(enum.Enum):
    """Whether a node gets requests."""

    READY = "ready"
    NOT_READY = "not_ready"
    """It answers, but takes no new requests: it starts, drains, sleeps or restarts its engine."""
    UNREACHABLE = "unreachable"


class Node:
    """One server. Written by the health checks (models, ready, failures), by the dispatcher (unfinished), by the
    forwarding (failures, latencies) and by the node routes (speed, lease)."""

    def __init__(self, url: str, *, configured: bool = False) -> None:
        self.url = url
        self.configured = configured
        """Whether the command line names it, so that no file has to keep it."""
        self.models: dict[str, Any] = {}
        """Name -> entry of its /v1/models; empty: not known yet, or not told without a key."""
        self.speed: float | None = None
        """Its throughput in any unit that all nodes share; None: the mean of the others."""
        self.latencies: deque[tuple[float, float]] = deque(maxlen=RECORDS)
        """(time of the end on the event loop's clock, seconds) of its latest answers."""
        self.unfinished = 0
        self.failures = 0
        """Failures in a row."""
        self.accepts = False
        """Whether it takes new requests, by its latest answer to a check."""
        self.lease_end: float | None = None
        """When it is removed unless it registers again, on the event loop's clock; None: never."""

    @property
    def state(self) -> State:
        if self.failures >= MAX_FAILURES:
            return State.UNREACHABLE
        return State.READY if self.accepts else State.NOT_READY

    @property
    def ready(self) -> bool:
        return self.accepts and self.failures < MAX_FAILURES

    def serves(self, model: str | None) -> bool:
        """Return whether it has the model, as far as its models are known; None: any."""
        return model is None or not self.models or model in self.models

    def failed(self, error: Exception) -> None:
        """Record a failed connection or check."""
        self.failures += 1
        if self.failures == MAX_FAILURES:
            kind = type(error).__name__
            logger.warning("The node %s gets no requests (%s: %s) until it answers a check.", self.url, kind, error)

    def answered(self, *, accepts: bool) -> None:
        """Record the answer to a check."""
        if self.failures >= MAX_FAILURES:
            logger.warning("The node %s answers again.", self.url)
        self.failures = 0
        self.accepts = accepts


class Nodes:
    """The nodes by address."""

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}
        self.on_change: list[Callable[[], None]] = []
        """Functions to call when a node has been added, removed, or become ready."""

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node: Node) -> bool:
        return self._nodes.get(node.url) is node

    def get(self, url: str) -> Node | None:
        """Return the node with this address."""
        return self._nodes.get(url)

    def add(self, node: Node) -> None:
        """Add a node, or replace the one with its address."""
        self._nodes[node.url] = node
        self.changed()

    def remove(self, node: Node) -> None:
        """Remove a node, whose running requests finish."""
        self._nodes.pop(node.url, None)
        self.changed()

    def changed(self) -> None:
        """Tell the observers."""
        for call in self.on_change:
            call()


def address_of_node(url: str) -> str:
    """Return a node's address without the slash or /v1 that clients write at the end."""
    return url.rstrip("/").removesuffix("/v1")
