"""LMDeploy's routes by which the model sleeps and wakes, with the server up all the while."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from asyncllm.server.encode import json_response
from asyncllm.server.errors import ApiError
from asyncllm.server.service import service_of

__all__ = ["LEVEL", "TAGS", "Sleeping", "is_sleeping", "sleep", "wakeup"]

LEVEL: dict[str, Any] = {"type": "integer", "enum": [1, 2], "default": 1}
TAGS: dict[str, Any] = {"type": "array", "items": {"enum": ["weights", "kv_cache"]}}


class Sleeping(msgspec.Struct, kw_only=True):
    """Whether the model sleeps, all of it or a part."""

    is_sleeping: bool


def _query(request: web.Request, name: str) -> list[str]:
    """The values of the one parameter that the route takes. Raises ApiError 400 for another one."""
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
    return json_response(Sleeping(is_sleeping=bool(service_of(request).engine.running().sleep_level)))


async def sleep(request: web.Request) -> web.Response:
    """Give the device's memory back until /wakeup: weights go to host memory (level 1), or are dropped (2) and come
    from the checkpoint again. Running answers wait, and go on afterwards; new requests get a 503."""
    levels = _query(request, "level") or ["1"]
    if levels not in (["1"], ["2"]):
        raise ApiError(400, "level must be 1 or 2.", code="invalid_value", param="level")
    await service_of(request).engine.sleep(int(levels[0]))
    return _state(request)


async def wakeup(request: web.Request) -> web.Response:
    """Take the memory again: everything, or what `tags` name, weights before kv_cache."""
    await service_of(request).engine.wake(_query(request, "tags") or None)
    return _state(request)


async def is_sleeping(request: web.Request) -> web.Response:
    """Whether the model sleeps."""
    return _state(request)
