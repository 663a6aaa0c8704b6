"""HealthChecks: asks each node at intervals whether it takes requests, and which models it has.

A node that fails is asked less and less often, and gets requests again as soon as it answers, without being added
again. A node that registers itself holds a lease, and is removed when it has not renewed it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp

from asyncllm.config import DistributorConfig
from asyncllm.server.distributor.nodes import MAX_FAILURES, Node, Nodes

__all__ = ["HealthChecks", "pause_before"]

logger = logging.getLogger("asyncllm.server")

MAX_INTERVAL_S = 30.0
"""Maximum number of seconds between two checks of a node that does not answer."""
JITTER = 0.2
"""Fraction of the interval by which checks are spread."""


def pause_before(interval: float, failures: int) -> float:
    """Return the seconds until the next check of a node that has failed so many times."""
    longer: float = interval * 2 ** min(10, max(0, failures - MAX_FAILURES))
    return max(interval, min(MAX_INTERVAL_S, longer)) * random.uniform(1 - JITTER, 1 + JITTER)


class HealthChecks:
    """One task per node, from `watch` until the node is removed or `close`."""

    def __init__(
        self, session: aiohttp.ClientSession, nodes: Nodes, config: DistributorConfig, node_key: str | None
    ) -> None:
        self._session = session
        self._nodes = nodes
        self._interval = config.health_interval
        self._timeout = aiohttp.ClientTimeout(total=config.connect_timeout)
        self._headers = {} if node_key is None else {"Authorization": f"Bearer {node_key}"}
        self._watches: set[asyncio.Task[None]] = set()
        self._closed_to_us: set[str] = set()
        """Addresses of nodes that do not tell their models without a key, as the log has said."""

    def watch(self, node: Node) -> None:
        """Check the node at intervals, beginning now unless it has been checked, as long as it is among the nodes."""
        task = asyncio.get_running_loop().create_task(self._watch(node), name=f"asyncllm-watch {node.url}")
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)

    async def close(self) -> None:
        """Stop all checks."""
        for task in self._watches:
            task.cancel()
        if self._watches:
            await asyncio.wait(self._watches)

    async def check(self, node: Node) -> Exception | None:
        """Ask a node once, and record its answer. Returns why it did not answer."""
        was_ready, before = node.ready, node.models
        try:
            async with self._get(node, "/health/ready") as response:
                # Servers of other makes lack this route, and answer 404 while they live.
                if response.status not in (200, 404, 503):
                    raise ValueError(f"its /health/ready has the status {response.status}")
                accepts = response.status != 503
            if accepts:
                await self._ask_models(node)
        except (aiohttp.ClientError, TimeoutError, ValueError, OSError) as error:
            node.failed(error)
            return error
        node.answered(accepts=accepts)
        if node in self._nodes and (node.ready > was_ready or node.models.keys() != before.keys()):
            self._nodes.changed()
        return None

    async def terminate(self, node: Node) -> str | None:
        """Ask a node to stop. Returns why it does not."""
        try:
            async with self._get(node, "/terminate", headers=self._headers) as response:
                return None if response.status == 200 else f"status {response.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return repr(error)

    async def _ask_models(self, node: Node) -> None:
        """Read the models of a node. Raises ClientError or ValueError for an answer that is not a list of models."""
        async with self._get(node, "/v1/models", headers=self._headers, auto_decompress=True) as response:
            if response.status in (401, 403):
                if node.url not in self._closed_to_us:
                    self._closed_to_us.add(node.url)
                    logger.warning(
                        "The node %s does not tell its models without a key. Start the distributor with "
                        "--node-key-file; until then it gets requests for any model.",
                        node.url,
                    )
                return
            if response.status != 200:
                raise ValueError(f"its /v1/models has the status {response.status}")
            listed = await response.json()
        if not isinstance(listed, dict) or not isinstance(listed.get("data"), list):
            raise ValueError("its /v1/models is not a list of models")
        node.models = {entry["id"]: entry for entry in listed["data"] if isinstance(entry, dict) and "id" in entry}

    def _get(self, node: Node, path: str, **options: Any) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Call a node itself: a redirect would lead to an address that no owner has named."""
        return self._session.get(node.url + path, timeout=self._timeout, allow_redirects=False, **options)

    async def _watch(self, node: Node) -> None:
        loop = asyncio.get_running_loop()
        if not node.accepts:
            await self.check(node)
        while True:
            await asyncio.sleep(pause_before(self._interval, node.failures))
            if node not in self._nodes:
                return
            if node.lease_end is not None and loop.time() > node.lease_end:
                logger.warning("The node %s has not registered again, and is removed.", node.url)
                self._nodes.remove(node)
                return
            await self.check(node)
