"""GET /health, /health/live, /health/ready, /load and /metrics, for orchestrators, balancers and Prometheus.

Being alive, accepting requests and making progress are three separate questions.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web

from asyncllm.errors import EngineError
from asyncllm.server.http.errors import retry_after
from asyncllm.server.http.responses import json_response
from asyncllm.server.http.server_state import Phase
from asyncllm.server.service import Service, service_of

__all__ = ["Health", "Load", "health", "live", "load", "metrics", "ready"]


class Health(msgspec.Struct, kw_only=True):
    """The body of the first three routes."""

    status: Literal["starting", "healthy", "sleeping", "paused", "draining", "stalled", "restarting", "dead"]
    running: int = 0
    """Sequences in the batch."""
    waiting: int = 0
    """Sequences in the queue."""
    seconds_since_progress: float = 0.0
    """Seconds since the last completed step while there is work."""


def _health(service: Service) -> Health:
    if not service.supervisor.loaded:
        return Health(status="starting")
    if service.supervisor.restarting:
        return Health(status="restarting")
    try:
        stats = service.engine.stats()
    except EngineError:
        return Health(status="dead")
    status: Literal["draining", "stalled", "sleeping", "paused", "healthy"] = "healthy"
    if stats.seconds_since_progress > service.config.progress_timeout:
        status = "stalled"
    elif service.state.phase is not Phase.SERVING:
        status = "draining"
    elif stats.sleep_level:
        status = "sleeping"
    elif service.engine.paused:
        status = "paused"
    return Health(
        status=status,
        running=stats.running,
        waiting=stats.waiting,
        seconds_since_progress=stats.seconds_since_progress,
    )


def _answer(found: Health, well: bool) -> web.Response:
    response = json_response(found, 200 if well else 503)
    if not well:
        response.headers.update(retry_after(5))
    return response


async def live(request: web.Request) -> web.Response:
    """200 while the process should be kept: its event loop responds, the model is loaded, and the engine has not failed
    for good. A long queue is not a reason to kill it."""
    found = _health(service_of(request))
    return _answer(found, found.status not in ("starting", "dead"))


async def ready(request: web.Request) -> web.Response:
    """200 while the server accepts new requests and answers them; 503 once it has been asked to stop, and while the
    model sleeps or is paused."""
    found = _health(service_of(request))
    return _answer(found, found.status == "healthy")


async def health(request: web.Request) -> web.Response:
    """200 while the engine makes progress: if it has work, a step has finished within `progress_timeout`."""
    found = _health(service_of(request))
    return _answer(found, found.status in ("healthy", "sleeping", "paused", "draining"))


class Load(msgspec.Struct, kw_only=True):
    """The body of /load."""

    server_load: int
    """Requests in progress that generate, embed or score."""


async def load(request: web.Request) -> web.Response:
    """The number of requests in progress, in the format vLLM gives load balancers."""
    return json_response(Load(server_load=service_of(request).state.in_work))


async def metrics(request: web.Request) -> web.Response:
    """The server's metrics in Prometheus' text format, or in OpenMetrics for clients that accept it."""
    instruments = service_of(request).instruments
    assert instruments is not None, "the route is left out without them"
    body, content_type = await instruments.scrape(request.headers.get("Accept", ""))
    return web.Response(body=body, headers={"Content-Type": content_type})
