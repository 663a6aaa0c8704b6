"""What the distributor answers itself: the models of all nodes, its health, its load and its metrics."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from asyncllm.server.distributor.distributor import distributor_of
from asyncllm.server.http.errors import ApiError, retry_after
from asyncllm.server.http.server_state import Phase

__all__ = ["health", "load", "metrics", "models", "no_metrics", "ready"]


def _json(answer: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(answer), content_type="application/json")


async def models(request: web.Request) -> web.StreamResponse:
    """The models of all nodes that take requests, each once."""
    distributor = distributor_of(request)
    if "anthropic-version" in request.headers:
        return await distributor.forwarding.forward(request)
    found: dict[str, Any] = {}
    for node in distributor.nodes:
        if node.ready:
            found |= {name: entry for name, entry in node.models.items() if name not in found}
    return _json({"object": "list", "data": list(found.values())})


def _counts(request: web.Request) -> dict[str, Any]:
    nodes = list(distributor_of(request).nodes)
    return {"nodes": len(nodes), "ready": sum(node.ready for node in nodes)}


def _leaves(request: web.Request) -> bool:
    return distributor_of(request).state.phase is not Phase.SERVING


async def health(request: web.Request) -> web.Response:
    """200 while the distributor lives, whatever its nodes do."""
    return _json({"status": "draining" if _leaves(request) else "healthy", **_counts(request)})


async def ready(request: web.Request) -> web.Response:
    """200 while there is a node that takes requests; 503 otherwise, and once the distributor has been asked to stop."""
    counts = _counts(request)
    if _leaves(request) or not counts["ready"]:
        status = "draining" if _leaves(request) else "no_node"
        response = _json({"status": status, **counts}, 503)
        response.headers.update(retry_after(5))
        return response
    return _json({"status": "healthy", **counts})


async def load(request: web.Request) -> web.Response:
    """The number of unfinished requests of all nodes, as a server tells its own."""
    return _json({"server_load": sum(node.unfinished for node in distributor_of(request).nodes)})


async def metrics(request: web.Request) -> web.Response:
    """The distributor's metrics for Prometheus."""
    body, content_type = await distributor_of(request).metrics.scrape(request.headers.get("Accept", ""))
    return web.Response(body=body, headers={"Content-Type": content_type})


async def no_metrics(request: web.Request) -> web.Response:
    """404: those of any one node would be misleading."""
    raise ApiError(404, "The metrics are switched off by --disable-metrics.", code="unknown_route")
