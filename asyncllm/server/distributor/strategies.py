"""Strategies: which of the nodes that have room answers a request. LMDeploy's three, and `prefix`."""

from __future__ import annotations

import asyncio
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from statistics import fmean

from asyncllm.config import RoutingStrategy
from asyncllm.server.distributor.nodes import Node
from asyncllm.server.distributor.routing_fields import RoutingFields

__all__ = ["Strategy", "rendezvous", "strategy_named"]

Strategy = Callable[[Sequence[Node], RoutingFields], Node]
"""Chooses one of at least one node."""

RECENT_S = 60.0
"""Seconds for which a latency counts. A node that was slow is tried again after that."""


def strategy_named(name: RoutingStrategy) -> Strategy:
    """Return a strategy, with its own state if it has any."""
    match name:
        case "random":
            return at_random
        case "min_expected_latency":
            return min_expected_latency
        case "min_observed_latency":
            return min_observed_latency
        case "prefix":
            return PrefixAffinity()


def _speeds(nodes: Sequence[Node]) -> list[float]:
    """Return the speeds, with the mean of the known ones in place of those that are unknown or not positive."""
    known = [node.speed for node in nodes if node.speed is not None and node.speed > 0]
    mean = fmean(known) if known else 1.0
    return [node.speed if node.speed is not None and node.speed > 0 else mean for node in nodes]


def _cheapest(nodes: Sequence[Node], costs: Sequence[float]) -> Node:
    """Return a node of the least cost, any of them if there are several."""
    lowest = min(costs)
    return random.choice([node for node, cost in zip(nodes, costs, strict=True) if cost == lowest])


def at_random(nodes: Sequence[Node], fields: RoutingFields) -> Node:
    """Choose any node, in proportion to their speeds."""
    return random.choices(nodes, _speeds(nodes))[0]


def min_expected_latency(nodes: Sequence[Node], fields: RoutingFields) -> Node:
    """Choose the node that would finish its requests and this one first."""
    return _cheapest(nodes, [(node.unfinished + 1) / speed for node, speed in zip(nodes, _speeds(nodes), strict=True)])


def min_observed_latency(nodes: Sequence[Node], fields: RoutingFields) -> Node:
    """Choose the node with the least mean latency of its recent answers. An idle one without any is tried first; a busy
    one counts as the others' mean until its first answer has ended."""
    since = asyncio.get_running_loop().time() - RECENT_S
    means = [fmean(recent) if (recent := _recent(node, since)) else None for node in nodes]
    untried = [node for node, mean in zip(nodes, means, strict=True) if mean is None]
    if idle := [node for node in untried if not node.unfinished]:
        return random.choice(idle)
    known = [mean for mean in means if mean is not None]
    if not known:
        return min_expected_latency(nodes, fields)
    mean_of_all = fmean(known)
    return _cheapest(nodes, [mean_of_all if mean is None else mean for mean in means])


def _recent(node: Node, since: float) -> list[float]:
    return [seconds for ended, seconds in node.latencies if ended >= since]


def rendezvous(nodes: Sequence[Node], key: bytes) -> Node:
    """Return the same node for the same key; when the nodes change, few keys move (highest random weight)."""
    return max(nodes, key=lambda node: _digest(key + node.url.encode()))


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=8).digest()


FIRST_BYTES = 512
"""Size of the shortest beginning of a prompt that is remembered; each longer one is twice as long."""
MAX_REMEMBERED = 2**17
OVERLOAD = 1.25
"""A node whose requests would exceed their mean over all nodes by this factor is passed over."""


class PrefixAffinity:
    """Chooses the node that has answered the longest beginning of the prompt before, and has it in its prefix cache. A
    new prompt goes to the node of its rendezvous hash. If the choice is overloaded, the least loaded node answers."""

    def __init__(self) -> None:
        self._remembered: OrderedDict[bytes, Node] = OrderedDict()
        """Hash of (tenant, model, beginning of a prompt) -> node, least recently used first."""

    def __call__(self, nodes: Sequence[Node], fields: RoutingFields) -> Node:
        """Choose a node, and remember it for the beginnings of the prompt."""
        keys = _beginnings(fields)
        known = (self._remembered.get(key) for key in reversed(keys))
        node = next((node for node in known if node in nodes), None) or rendezvous(nodes, keys[0])
        limit = math.ceil(OVERLOAD * (sum(each.unfinished for each in nodes) + 1) / len(nodes))
        if node.unfinished >= limit:
            node = min_expected_latency(nodes, fields)
        for key in keys:
            if self._remembered.get(key) not in nodes:
                self._remembered[key] = node
            self._remembered.move_to_end(key)
        while len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)
        return node


def _beginnings(fields: RoutingFields) -> list[bytes]:
    """Return the hashes of the prompt's beginnings, shortest first."""
    running = blake2b(f"{fields.tenant} {fields.model} ".encode("utf-8", "surrogatepass"), digest_size=8)
    found: list[bytes] = []
    begin, end = 0, FIRST_BYTES
    while end <= len(fields.prompt) or not found:
        running.update(fields.prompt[begin:end])
        found.append(running.digest())
        begin, end = end, 2 * end
    return found
