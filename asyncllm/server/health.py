"""Whether the server is alive, takes requests, and gets on with them: three questions, which have different answers."""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web

from asyncllm.errors import EngineError
from asyncllm.server.encode import json_response
from asyncllm.server.service import Phase, Service, service_of

__all__ = ["Health", "health", "live", "ready"]


class Health(msgspec.Struct, kw_only=True):
    """The body of all three."""

    status: Literal["healthy", "sleeping", "draining", "stalled", "restarting", "dead"]
    running: int = 0
    """Sequences in the batch."""
    waiting: int = 0
    """Sequences in the queue."""
    seconds_since_progress: float = 0.0
    """How long there has been work and no step has completed."""


def _health(service: Service) -> Health:
    if service.supervisor.restarting:
        return Health(status="restarting")
    try:
        stats = service.engine.stats()
    except EngineError:
        return Health(status="dead")
    status: Literal["draining", "stalled", "sleeping", "healthy"] = "healthy"
    if stats.seconds_since_progress > service.config.progress_timeout:
        status = "stalled"
    elif service.phase is not Phase.SERVING:
        status = "draining"
    elif stats.sleep_level:
        status = "sleeping"
    return Health(
        status=status,
        running=stats.running,
        waiting=stats.waiting,
        seconds_since_progress=stats.seconds_since_progress,
    )


def _answer(found: Health, well: bool) -> web.Response:
    return json_response(found, 200 if well else 503)


async def live(request: web.Request) -> web.Response:
    """200 while the process is worth keeping: its event loop answers, and the engine has not died for good. A long
    queue is no reason to kill it."""
    found = _health(service_of(request))
    return _answer(found, found.status != "dead")


async def ready(request: web.Request) -> web.Response:
    """200 while new requests are taken; 503 from the moment that the server has been asked to stop, and while the model
    sleeps."""
    found = _health(service_of(request))
    return _answer(found, found.status == "healthy")


async def health(request: web.Request) -> web.Response:
    """200 while the engine makes progress: with work at hand, a step has finished within `progress_timeout`."""
    found = _health(service_of(request))
    return _answer(found, found.status in ("healthy", "sleeping", "draining"))
