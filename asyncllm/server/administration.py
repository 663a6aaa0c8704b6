"""Administration routes of LMDeploy, vLLM and SGLang: sleep and wake the model, pause and resume answers, and drop the
prefix cache, all while the server stays up; stop the server."""

from __future__ import annotations

from typing import Any, Literal, cast

import msgspec
from aiohttp import web

from asyncllm.server.http.errors import ApiError
from asyncllm.server.http.responses import json_response
from asyncllm.server.service import service_of

__all__ = [
    "LEVEL",
    "PAUSE",
    "RESET",
    "TAGS",
    "Paused",
    "Pausing",
    "Reset",
    "Sleeping",
    "Terminating",
    "flush_cache",
    "is_paused",
    "is_sleeping",
    "pause",
    "reset_prefix_cache",
    "resume",
    "sleep",
    "terminate",
    "wakeup",
]

LEVEL: dict[str, Any] = {"type": "integer", "enum": [1, 2], "default": 1}
TAGS: dict[str, Any] = {"type": "array", "items": {"enum": ["weights", "kv_cache"]}}
PAUSE: dict[str, Any] = {
    "mode": {"type": "string", "enum": ["abort", "wait", "keep"], "default": "abort"},
    "clear_cache": {"type": "boolean", "default": True},
    "wait_for_inflight_requests": {"type": "boolean", "default": False},
}
RESET: dict[str, Any] = {
    "reset_running_requests": {"type": "boolean", "default": False},
    "reset_external": {"type": "boolean", "default": False},
}


class Sleeping(msgspec.Struct, kw_only=True):
    """Whether the model or a part of it sleeps."""

    is_sleeping: bool


def _check_query(request: web.Request, *names: str) -> None:
    """Raise ApiError 400 for a query parameter other than `names`."""
    for other in request.query:
        if other not in names:
            known = f"only {', '.join(map(repr, names))}" if names else "and no other"
            raise ApiError(
                400,
                f"There is no parameter {other[:64]!r} here, {known}.",
                code="unknown_parameter",
                param=other[:64],
            )


def _choice(request: web.Request, name: str, choices: tuple[str, ...]) -> str:
    """Return the value of a query parameter, the first of `choices` if it is absent. Raises ApiError 400."""
    values = request.query.getall(name, [choices[0]])
    if len(values) != 1 or values[0] not in choices:
        raise ApiError(400, f"{name} must be one of {', '.join(choices)}.", code="invalid_value", param=name)
    return values[0]


def _flag(request: web.Request, name: str, *, default: bool) -> bool:
    choices = ("true", "1", "false", "0") if default else ("false", "0", "true", "1")
    return _choice(request, name, choices) in ("true", "1")


def _state(request: web.Request) -> web.Response:
    return json_response(Sleeping(is_sleeping=bool(service_of(request).engine.sleep_level)))


async def sleep(request: web.Request) -> web.Response:
    """Release the device's memory until /wakeup. Level 1 moves the weights to host memory; level 2 drops them and reads
    the checkpoint again. Running answers pause and continue afterwards; new requests get a 503."""
    _check_query(request, "level")
    await service_of(request).engine.sleep(int(_choice(request, "level", ("1", "2"))))
    return _state(request)


async def wakeup(request: web.Request) -> web.Response:
    """Take the memory back: everything, or the parts named by `tags`, weights before kv_cache."""
    _check_query(request, "tags")
    await service_of(request).engine.wake(request.query.getall("tags", []) or None)
    return _state(request)


class Pausing(msgspec.Struct, kw_only=True):
    """What /pause and /resume have done, in vLLM's words."""

    status: Literal["paused", "resumed"]


async def pause(request: web.Request) -> web.Response:
    """Compute nothing until /resume. New requests wait in the queue. Open answers end (`abort`, the default), are
    completed first (`wait`), or go on afterwards (`keep`). Except with `keep`, the prefix cache is dropped, unless
    `clear_cache` is false."""
    _check_query(request, *PAUSE)
    mode = cast("Literal['abort', 'wait', 'keep']", _choice(request, "mode", ("abort", "wait", "keep")))
    if _flag(request, "wait_for_inflight_requests", default=False):
        mode = "wait"
    clears = _flag(request, "clear_cache", default=True)
    engine = service_of(request).engine
    await engine.pause(mode)
    if clears and mode != "keep":
        await engine.reset_prefix_cache()
    return json_response(Pausing(status="paused"))


async def resume(request: web.Request) -> web.Response:
    """End a pause."""
    _check_query(request)
    await service_of(request).engine.resume()
    return json_response(Pausing(status="resumed"))


class Paused(msgspec.Struct, kw_only=True):
    """Whether the engine is paused."""

    is_paused: bool


async def is_paused(request: web.Request) -> web.Response:
    """Return whether the engine is paused."""
    return json_response(Paused(is_paused=service_of(request).engine.paused))


class Reset(msgspec.Struct, kw_only=True):
    """Whether the prefix cache was dropped, as in vLLM. A failure is an error."""

    success: bool


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """Drop all cached prefixes, in host memory too. Running answers are computed again from their tokens and lose
    nothing, so both parameters have no effect."""
    _check_query(request, *RESET)
    for name in RESET:
        _flag(request, name, default=False)
    await service_of(request).engine.reset_prefix_cache()
    return json_response(Reset(success=True))


async def flush_cache(request: web.Request) -> web.Response:
    """SGLang's name for /reset_prefix_cache."""
    await service_of(request).engine.reset_prefix_cache()
    return web.Response(text="Cache flushed.\n")


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
    service.state.stop.set()
    return json_response(Terminating(running=service.state.in_work))


async def is_sleeping(request: web.Request) -> web.Response:
    """Return whether the model sleeps."""
    return _state(request)
