"""DistributorMetrics: what the distributor does, for Prometheus. Labels are the nodes' addresses and fixed words."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from asyncllm.server.distributor.dispatch import Dispatcher
from asyncllm.server.distributor.nodes import Nodes, State

__all__ = ["DistributorMetrics"]

PREFIX = "asyncllm:distributor_"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
SHORT_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 1.0)

_Row = tuple[str, str, int, int]
"""A node's address, its state, its unfinished requests, its models."""


class _NodeReadings(Collector):
    """The state of the nodes at each scrape."""

    def __init__(self) -> None:
        self.rows: list[_Row] = []
        """Set before each scrape, like `waiting`."""
        self.waiting = 0

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        waiting = GaugeMetricFamily(f"{PREFIX}requests_waiting", "Requests that wait for a node with room.")
        waiting.add_metric([], self.waiting)
        yield waiting
        nodes = GaugeMetricFamily(f"{PREFIX}nodes", "Nodes by state.", labels=["state"])
        for state in State:
            nodes.add_metric([state.value], sum(row[1] == state.value for row in self.rows))
        yield nodes
        unfinished = GaugeMetricFamily(f"{PREFIX}requests_unfinished", "Requests that a node has.", labels=["node"])
        models = GaugeMetricFamily(f"{PREFIX}node_models", "Models that a node is known to have.", labels=["node"])
        for url, _, requests, count in self.rows:
            unfinished.add_metric([url], requests)
            models.add_metric([url], count)
        yield unfinished
        yield models


class DistributorMetrics:
    """One registry per distributor. The event loop writes it, a thread reads it."""

    def __init__(self, nodes: Nodes, dispatcher: Dispatcher) -> None:
        self._nodes = nodes
        self._dispatcher = dispatcher
        self._registry = CollectorRegistry()
        self._readings = _NodeReadings()
        self._registry.register(self._readings)
        ProcessCollector(registry=self._registry)
        self._requests = Counter(
            f"{PREFIX}requests",
            "Requests that were sent to a node, by the status of their answer; unreachable: there was none; broken: it "
            "broke off; client_left: the client did not wait for its end.",
            ["node", "outcome"],
            registry=self._registry,
        )
        self._retries = Counter(
            f"{PREFIX}retries", "Requests that another node got after this one.", ["node"], registry=self._registry
        )
        self._refused = Counter(
            f"{PREFIX}requests_refused",
            "Requests that no node got, by the error's code.",
            ["code"],
            registry=self._registry,
        )
        self._first_byte = Histogram(
            f"{PREFIX}time_to_first_byte_seconds",
            "From a request's sending to the first byte of the node's answer after its headers.",
            ["node"],
            registry=self._registry,
            buckets=SECONDS,
        )
        self._overhead = Histogram(
            f"{PREFIX}overhead_seconds",
            "From the end of a request's body to its sending to a node, with the wait for room.",
            registry=self._registry,
            buckets=SHORT_SECONDS,
        )
        nodes.on_change.append(self._forget_removed)
        self._labelled: set[tuple[str, str]] = set()
        """Labels of the series by node and outcome."""

    def sent(self, seconds: float) -> None:
        """Record the seconds before a request was sent for the first time."""
        self._overhead.observe(seconds)

    def first_byte(self, node: str, seconds: float) -> None:
        """Record the beginning of an answer."""
        self._first_byte.labels(node).observe(seconds)

    def ended(self, node: str, outcome: str) -> None:
        """Record the end of a request that a node got."""
        self._labelled.add((node, outcome))
        self._requests.labels(node, outcome).inc()

    def retried(self, node: str) -> None:
        """Record that another node gets a request."""
        self._retries.labels(node).inc()

    def refused(self, code: str) -> None:
        """Record a request that no node got. `code`: from a fixed set."""
        self._refused.labels(code).inc()

    def _forget_removed(self) -> None:
        """Remove the series of nodes that are gone: nodes in containers get a new address with each start."""
        for node, outcome in list(self._labelled):
            if self._nodes.get(node) is None:
                self._labelled.discard((node, outcome))
                self._requests.remove(node, outcome)
                for series in (self._retries, self._first_byte):
                    series.remove_by_labels({"node": node})

    async def scrape(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics in the format that the Accept header asks for, and the content type."""
        rows = [(node.url, node.state.value, node.unfinished, len(node.models)) for node in self._nodes]
        waiting = self._dispatcher.num_waiting
        encode, content_type = choose_encoder(accept)

        def write() -> bytes:
            self._readings.rows, self._readings.waiting = rows, waiting
            return encode(self._registry)

        return await asyncio.to_thread(write), content_type
