"""Routes that load and unload LoRA adapters while the server runs, in vLLM's and in SGLang's form."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from asyncllm.errors import InvalidParameter, InvalidRequest, ModelError, ModelNotFound, short
from asyncllm.event_loop.in_thread import in_thread
from asyncllm.server.http.errors import ApiError
from asyncllm.server.http.responses import json_response
from asyncllm.server.request.decode import read_request
from asyncllm.server.request.fields import Body
from asyncllm.server.service import Service, service_of

__all__ = [
    "LoadAdapterRequest",
    "LoadLoRAAdapterReqInput",
    "LoadedAdapters",
    "UnloadAdapterRequest",
    "UnloadLoRAAdapterReqInput",
    "load_adapter",
    "load_adapter_sglang",
    "unload_adapter",
    "unload_adapter_sglang",
]

WEIGHTS = "adapter_model.safetensors"

Name = Annotated[str, Meta(min_length=1, max_length=256)]
FolderName = Annotated[str, Meta(min_length=1, max_length=4096)]


class LoadAdapterRequest(Body, kw_only=True):
    """The body of POST /v1/load_lora_adapter."""

    lora_name: Name
    lora_path: FolderName
    """A PEFT folder below the server's `adapters_folder`, with weights in safetensors."""
    load_inplace: bool | None = None
    """true: the name may be that of a loaded adapter; running requests keep the old one, later ones use the new one."""
    is_3d_lora_weight: bool | None = None
    """false: stacked experts have no adapters."""


class UnloadAdapterRequest(Body, kw_only=True):
    """The body of POST /v1/unload_lora_adapter."""

    lora_name: Name
    lora_int_id: int | None = None
    """vLLM's own number for it, which is ignored."""


class LoadLoRAAdapterReqInput(Body, kw_only=True):
    """The body of POST /load_lora_adapter, SGLang's."""

    lora_name: Name
    lora_path: FolderName
    """See LoadAdapterRequest."""
    pinned: bool | None = None
    """false: an adapter without requests does not stay on the device when others need its slot."""
    lora_id: str | None = None
    """SGLang's own number for it, which is ignored."""


class UnloadLoRAAdapterReqInput(Body, kw_only=True):
    """The body of POST /unload_lora_adapter, SGLang's."""

    lora_name: Name
    lora_id: str | None = None


class LoadedAdapters(msgspec.Struct, kw_only=True):
    """SGLang's answer, for accepted and refused requests."""

    success: bool
    error_message: str = ""
    loaded_adapters: dict[str, str]
    """Name -> folder of all adapters that are loaded now."""


async def load_adapter(request: web.Request) -> web.Response:
    """Load a LoRA adapter from a folder of the server, for requests that name it as their model."""
    service = service_of(request)
    body = await read_request(request, LoadAdapterRequest)
    if body.is_3d_lora_weight:
        raise _unsupported("is_3d_lora_weight", "Stacked experts take no adapters. Leave it out.")
    await _load(service, body.lora_name, body.lora_path, replace=bool(body.load_inplace))
    return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_adapter(request: web.Request) -> web.Response:
    """Unload a LoRA adapter for new requests. Running ones keep using it to their end."""
    service = service_of(request)
    body = await read_request(request, UnloadAdapterRequest)
    await _unload(service, body.lora_name)
    return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def load_adapter_sglang(request: web.Request) -> web.Response:
    """Load a LoRA adapter like /v1/load_lora_adapter, with the list of all adapters in the answer."""
    service = service_of(request)
    body = await read_request(request, LoadLoRAAdapterReqInput)
    try:
        if body.pinned:
            raise _unsupported("pinned", "Adapters share the device's slots, and none keeps its own. Leave it out.")
        await _load(service, body.lora_name, body.lora_path, replace=False)
    except (ApiError, InvalidRequest) as error:
        return _listed(service, str(error))
    return _listed(service)


async def unload_adapter_sglang(request: web.Request) -> web.Response:
    """Unload a LoRA adapter like /v1/unload_lora_adapter, with the list of the remaining adapters in the answer."""
    service = service_of(request)
    body = await read_request(request, UnloadLoRAAdapterReqInput)
    try:
        await _unload(service, body.lora_name)
    except (ApiError, InvalidRequest) as error:
        return _listed(service, str(error))
    return _listed(service)


def _listed(service: Service, error: str = "") -> web.Response:
    answer = LoadedAdapters(success=not error, error_message=error, loaded_adapters=service.engine.adapters)
    return json_response(answer, status=400 if error else 200)


async def _load(service: Service, name: str, path: str, *, replace: bool) -> None:
    """Load an adapter from a folder below `adapters_folder`. Raises ApiError, AsyncLLMError."""
    allowed = service.config.adapters_folder
    assert allowed is not None, "without it there is no such route"
    folder = await in_thread(lambda: _allowed(allowed, path))
    try:
        await service.engine.load_adapter(name, folder, replace=replace)
    except ModelError as error:
        status = 404 if isinstance(error, ModelNotFound) else 400
        raise ApiError(status, str(error), code="invalid_adapter", param="lora_path") from None
    except InvalidParameter as error:
        param = "lora_name" if error.param == "name" else "lora_path"
        raise ApiError(400, str(error), code="invalid_value", param=param) from None
    service.openapi = b""


async def _unload(service: Service, name: str) -> None:
    if name not in service.engine.adapters:
        raise ApiError(404, f"There is no adapter {short(name)}.", code="adapter_not_found", param="lora_name")
    await service.engine.unload_adapter(name)
    service.openapi = b""


def _unsupported(name: str, why: str) -> ApiError:
    return ApiError(400, f"{name} is not supported. {why}", code="unsupported_parameter", param=name)


def _allowed(root: str, path: str) -> str:
    """Return the folder that a request names, with all links resolved. Raises ApiError unless it is below `root`, has
    weights that need no code to be read, and has no link to the outside."""
    try:
        top = Path(root).resolve()
        folder = (top / path).resolve()
        found = folder.is_relative_to(top) and folder.is_dir()
        sound = found and (folder / WEIGHTS).is_file()
        sound = sound and all(file.resolve().is_relative_to(top) for file in folder.iterdir())
    except (OSError, RuntimeError, ValueError):
        found = sound = False
    if not found:
        # Do not reveal whether anything exists elsewhere.
        raise ApiError(
            404, "There is no such folder below adapters_folder.", code="adapter_not_found", param="lora_path"
        )
    if not sound:
        raise ApiError(
            400, f"The folder has no {WEIGHTS}, or a link to elsewhere.", code="invalid_adapter", param="lora_path"
        )
    return str(folder)
