"""LMDeploy's administration routes: put the model to sleep and wake it while the server stays up, and stop the
server."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from asyncllm.server.http.errors import ApiError
from asyncllm.server.http.responses import json_response
from asyncllm.server.service import service_of

__all__ = [
    "LEVEL",
    "TAGS",
    "Sleeping",
    "Terminating",
    "is_sleeping",
    "sleep",
    "terminate",
    "wakeup",
]

LEVEL: dict[str, Any] = {"type": "integer", "enum": [1, 2], "default": 1}
TAGS: dict[str, Any] = {"type": "array", "items": {"enum": ["weights", "kv_cache"]}}


class Sleeping(msgspec.Struct, kw_only=True):
    """Whether the model or a part of it sleeps."""

    is_sleeping: bool


def _query(request: web.Request, name: str) -> list[str]:
    """Return the values of the route's only parameter. Raises ApiError 400 for any other parameter."""
    for other in request.query:
        if other != name:
            raise ApiError(
                400,
                f"There is no parameter {other[:64]!r} here, only {name!r}.",
                code="unknown_parameter",
                param=other[:64],
            )
    return request.query.getall(name, [])


def _state(request: web.Request) -> web.Response:
    return json_response(Sleeping(is_sleeping=bool(service_of(request).engine.sleep_level)))


async def sleep(request: web.Request) -> web.Response:
    """Release the device's memory until /wakeup. Level 1 moves the weights to host memory; level 2 drops them and reads
    the checkpoint again. Running answers pause and continue afterwards; new requests get a 503."""
    levels = _query(request, "level") or ["1"]
    if levels not in (["1"], ["2"]):
        raise ApiError(400, "level must be 1 or 2.", code="invalid_value", param="level")
    await service_of(request).engine.sleep(int(levels[0]))
    return _state(request)


async def wakeup(request: web.Request) -> web.Response:
    """Take the memory back: everything, or the parts named by `tags`, weights before kv_cache."""
    await service_of(request).engine.wake(_query(request, "tags") or None)
    return _state(request)


class Terminating(msgspec.Struct, kw_only=True):
    """The work left before the server stops."""

    running: int
    """Running requests, which have `drain_timeout` to finish."""


async def terminate(request: web.Request) -> web.Response:
    """Stop the server as SIGTERM does: running answers finish, new requests are refused. Requests from another site's
    page are refused, since a mere link or image can send a GET."""
    if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        raise ApiError(403, "A page of another site may not stop the server.", code="cross_site")
    service = service_of(request)
    service.entrance.stop.set()
    return json_response(Terminating(running=service.entrance.in_work))


async def is_sleeping(request: web.Request) -> web.Response:
    """Return whether the model sleeps."""
    return _state(request)
