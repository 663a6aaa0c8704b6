"""GET /api/tags, /api/ps and /api/version, and POST /api/show: the served models in Ollama's format. Routes that pull,
create or delete models are refused."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from asyncllm import __version__
from asyncllm.server.http.errors import ApiError
from asyncllm.server.http.responses import json_response
from asyncllm.server.ollama.answers import now
from asyncllm.server.ollama.requests import ShowRequest
from asyncllm.server.request.decode import read_request
from asyncllm.server.service import Service, service_of
from asyncllm.text.checkpoint_files import read_json_object

__all__ = [
    "OllamaModels",
    "OllamaShown",
    "OllamaVersion",
    "RunningModels",
    "ps",
    "refuse_change",
    "show",
    "tags",
    "version",
]

NEVER = "9999-12-31T23:59:59Z"
"""Expiry time of a model that stays loaded."""
WEIGHTS = (".safetensors", ".bin")
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""dtype -> Ollama's name."""


class ModelDetails(msgspec.Struct, kw_only=True):
    """The kind of a model."""

    parent_model: str = ""
    """The base model of an adapter."""
    format: str = "safetensors"
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    """BF16, F16 or F32, or the checkpoint's method with its bits."""


class OllamaModel(msgspec.Struct, kw_only=True):
    """One model or adapter."""

    name: str
    model: str
    modified_at: str
    """When the server started."""
    size: int
    """Total size of its weight files in bytes; 0 if there are none, as for fakes."""
    digest: str
    """Changes with the name, size or time of any weight file."""
    details: ModelDetails


class RunningModel(OllamaModel, kw_only=True):
    """One loaded model or adapter."""

    expires_at: str = NEVER
    size_vram: int
    """Its size, if it is on a GPU."""
    context_length: int


class OllamaModels(msgspec.Struct, kw_only=True):
    """The served models."""

    models: list[OllamaModel]


class RunningModels(msgspec.Struct, kw_only=True):
    """The loaded models."""

    models: list[RunningModel]


class OllamaShown(msgspec.Struct, kw_only=True):
    """Details of a model."""

    modified_at: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    """Some of completion, tools, thinking, vision, embedding."""


class OllamaVersion(msgspec.Struct, kw_only=True):
    """asyncllm's version."""

    version: str


async def tags(request: web.Request) -> web.Response:
    """The model and its adapters, as Ollama lists them."""
    service = service_of(request)
    fields = await asyncio.to_thread(_fields, service)
    return json_response(OllamaModels(models=[OllamaModel(**each) for each in fields]))


async def ps(request: web.Request) -> web.Response:
    """List the same models as loaded, since all of them are."""
    service = service_of(request)
    fields = await asyncio.to_thread(_fields, service)
    on_gpu = service.engine.limits.device != "cpu"
    length = service.engine.session_len
    return json_response(
        RunningModels(
            models=[
                RunningModel(size_vram=each["size"] if on_gpu else 0, context_length=length, **each) for each in fields
            ]
        )
    )


async def show(request: web.Request) -> web.Response:
    """The kind of the model and its capabilities."""
    service = service_of(request)
    body = await read_request(request, ShowRequest)
    wanted = body.model or service.engine.model_name
    fields = next(each for each in await asyncio.to_thread(_fields, service) if each["name"] == wanted)
    limits, details = service.engine.limits, fields["details"]
    return json_response(
        OllamaShown(
            modified_at=fields["modified_at"],
            details=details,
            model_info={
                "general.architecture": details.family,
                "general.parameter_count": limits.num_parameters,
                f"{details.family}.context_length": service.engine.session_len,
                f"{details.family}.embedding_length": limits.hidden_size,
            },
            capabilities=_capabilities(service, wanted),
        )
    )


async def version(request: web.Request) -> web.Response:
    """The version of asyncllm."""
    return json_response(OllamaVersion(version=__version__))


async def refuse_change(request: web.Request) -> web.Response:
    """Refuse to pull, create, copy, push or delete a model, since the server's owner chooses what it serves."""
    raise ApiError(
        400,
        f"{request.path} is not implemented: the server's owner chooses the model when it is started, and adapters by "
        f"/v1/load_lora_adapter. GET /api/tags lists what there is.",
        code="unsupported_route",
    )


def _capabilities(service: Service, model: str) -> list[str]:
    engine = service.engine
    form = engine.reply_format_of(service.adapter_of(model))
    found = []
    if engine.limits.has_head:
        found.append("completion")
        if service.template_for(model).reads_tools and form.tools is not None:
            found.append("tools")
        if form.splits:
            found.append("thinking")
        if engine.limits.takes_images:
            found.append("vision")
    else:
        found.append("embedding")
    return found


def _fields(service: Service) -> list[dict[str, Any]]:
    """Return the entries of the model and each of its adapters. Reads files."""
    engine = service.engine
    limits, folder = engine.limits, Path(engine.limits.model_path) if engine.limits.model_path else None
    config = {} if folder is None else read_json_object(folder / "config.json")
    family = config.get("model_type") or limits.architecture or "unknown"
    size, digest = _files(folder)
    found = []
    for name, path in {engine.model_name: None, **engine.adapters}.items():
        adapted = path is not None
        own_size, own_digest = _files(Path(path)) if path is not None else (size, digest)
        details = ModelDetails(
            parent_model=engine.model_name if adapted else "",
            family=family,
            families=[family],
            parameter_size=_rounded(limits.num_parameters),
            quantization_level=_level(config, limits.dtype),
        )
        found.append(
            {
                "name": name,
                "model": name,
                "modified_at": now(service.created),
                "size": own_size,
                "digest": own_digest,
                "details": details,
            }
        )
    return found


def _files(folder: Path | None) -> tuple[int, str]:
    """Return the total size of a folder's weight files, and a digest of their names, sizes and times."""
    files = [] if folder is None or not folder.is_dir() else sorted(folder.iterdir())
    stats = [(file.name, file.stat()) for file in files if file.suffix in WEIGHTS]
    listed = repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
    return sum(stat.st_size for _, stat in stats), hashlib.sha256(listed.encode()).hexdigest()


def _rounded(number: int) -> str:
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= unit:
            return f"{number / unit:.1f}{letter}"
    return str(number)


def _level(config: dict[str, Any], dtype: str) -> str:
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        return DTYPES.get(dtype, dtype)
    bits = quantization.get("bits", quantization.get("w_bit"))
    return f"{quantization.get('quant_method', 'unknown')}{'' if bits is None else f'-{bits}'}"
