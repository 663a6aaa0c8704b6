"""GET /metrics."""

from __future__ import annotations

from aiohttp import web

from asyncllm.server.service import service_of

__all__ = ["metrics"]


async def metrics(request: web.Request) -> web.Response:
    """What the server measures, in Prometheus' text format, or in OpenMetrics' for clients that accept it."""
    instruments = service_of(request).instruments
    assert instruments is not None, "the route is left out without them"
    body, content_type = await instruments.scrape(request.headers.get("Accept", ""))
    return web.Response(body=body, headers={"Content-Type": content_type})
