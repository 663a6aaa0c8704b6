"""LMDeploy's routes to put the model to sleep, wake it, and end the server; vLLM's to load and unload LoRA adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from asyncllm.errors import ModelError, ModelNotFound, short
from asyncllm.event_loop.in_thread import in_thread
from asyncllm.server.http.errors import ApiError
from asyncllm.server.http.responses import json_response
from asyncllm.server.request.decode import read_request
from asyncllm.server.request.fields import Body
from asyncllm.server.service import service_of

__all__ = [
    "LEVEL",
    "TAGS",
    "LoadAdapterRequest",
    "Sleeping",
    "Terminating",
    "UnloadAdapterRequest",
    "is_sleeping",
    "load_adapter",
    "sleep",
    "terminate",
    "unload_adapter",
    "wakeup",
]

WEIGHTS = "adapter_model.safetensors"

Name = Annotated[str, Meta(min_length=1, max_length=256)]
LEVEL: dict[str, Any] = {"type": "integer", "enum": [1, 2], "default": 1}
TAGS: dict[str, Any] = {"type": "array", "items": {"enum": ["weights", "kv_cache"]}}


class Sleeping(msgspec.Struct, kw_only=True):
    """Whether the model, or a part of it, sleeps."""

    is_sleeping: bool


def _query(request: web.Request, name: str) -> list[str]:
    """Return the values of the one parameter that the route takes. Raises ApiError 400 for another one."""
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


class Terminating(msgspec.Struct, kw_only=True):
    """The work left before the server ends."""

    running: int
    """Running requests, which may finish within `drain_timeout`."""


async def terminate(request: web.Request) -> web.Response:
    """End the server as SIGTERM does: running answers finish, new requests are refused. A page of another site may not,
    as a mere link or image asks with GET."""
    if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        raise ApiError(403, "A page of another site may not stop the server.", code="cross_site")
    service = service_of(request)
    service.stop.set()
    return json_response(Terminating(running=service.in_work))


async def is_sleeping(request: web.Request) -> web.Response:
    """Return whether the model sleeps."""
    return _state(request)


class LoadAdapterRequest(Body, kw_only=True):
    """The body of POST /v1/load_lora_adapter."""

    lora_name: Name
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """A folder of PEFT's, below the server's `adapters_folder`; with weights in safetensors."""
    load_inplace: bool | None = None
    """false: a loaded name has to be unloaded first. Nothing else is implemented."""


class UnloadAdapterRequest(Body, kw_only=True):
    """The body of POST /v1/unload_lora_adapter."""

    lora_name: Name
    lora_int_id: int | None = None
    """vLLM's own number of it, which says nothing here."""


async def load_adapter(request: web.Request) -> web.Response:
    """Load a LoRA adapter from a folder of the server, for requests that name it as their model."""
    service = service_of(request)
    body = await read_request(request, LoadAdapterRequest)
    if body.load_inplace:
        raise ApiError(
            400,
            "load_inplace is not supported. Unload the adapter first: open requests keep what they have.",
            code="unsupported_parameter",
            param="load_inplace",
        )
    allowed = service.config.adapters_folder
    assert allowed is not None, "without it there is no such route"
    folder = await in_thread(lambda: _allowed(allowed, body.lora_path))
    try:
        await service.engine.load_adapter(body.lora_name, folder)
    except ModelError as error:
        status = 404 if isinstance(error, ModelNotFound) else 400
        raise ApiError(status, str(error), code="invalid_adapter", param="lora_path") from None
    service.openapi = b""
    return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_adapter(request: web.Request) -> web.Response:
    """Unload a LoRA adapter. Running requests keep it to their end."""
    service = service_of(request)
    body = await read_request(request, UnloadAdapterRequest)
    if body.lora_name not in service.engine.adapters:
        raise ApiError(
            404, f"There is no adapter {short(body.lora_name)}.", code="adapter_not_found", param="lora_name"
        )
    await service.engine.unload_adapter(body.lora_name)
    service.openapi = b""
    return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _allowed(root: str, path: str) -> str:
    """Return the folder that a request names, with all links resolved. Raises ApiError unless it is below `root` and
    has weights that load without running code."""
    try:
        top = Path(root).resolve()
        folder = (top / path).resolve()
        found = folder.is_relative_to(top) and folder.is_dir()
        sound = found and (folder / WEIGHTS).resolve().is_relative_to(top) and (folder / WEIGHTS).is_file()
    except (OSError, RuntimeError, ValueError):
        found = sound = False
    if not found:
        # The error does not tell whether the path exists elsewhere.
        raise ApiError(
            404, "There is no such folder below adapters_folder.", code="adapter_not_found", param="lora_path"
        )
    if not sound:
        raise ApiError(400, f"The folder has no {WEIGHTS}.", code="invalid_adapter", param="lora_path")
    return str(folder)
