"""GET /v1/models: the served models, in OpenAI's form or Anthropic's."""

from __future__ import annotations

from aiohttp import web

from asyncllm.server.anthropic.models import list_of, model_info
from asyncllm.server.http.responses import asks_for_anthropic, json_response
from asyncllm.server.http.routing import without_slashes
from asyncllm.server.openai.responses import Model, ModelList, ModelPermission
from asyncllm.server.service import Service, service_of

__all__ = ["list_models", "list_models_anthropic", "show_model"]


def _model(service: Service, name: str) -> Model:
    adapted = service.adapter_of(name) is not None
    return Model(
        id=name,
        created=service.created,
        root=name,
        parent=service.engine.model_name if adapted else None,
        permission=[ModelPermission(id=f"modelperm-{name}", created=service.created)],
        max_model_len=service.engine.session_len,
    )


def _names(service: Service) -> list[str]:
    return [service.engine.model_name, *service.engine.adapters]


async def list_models(request: web.Request) -> web.Response:
    """All models: the one the server was started with, then its adapters."""
    if asks_for_anthropic(request):
        return await list_models_anthropic(request)
    service = service_of(request)
    return json_response(ModelList(data=[_model(service, name) for name in _names(service)]))


async def list_models_anthropic(request: web.Request) -> web.Response:
    """All models in Anthropic's form."""
    service = service_of(request)
    return json_response(list_of(service, _names(service)))


async def show_model(request: web.Request) -> web.Response:
    """One model or adapter by its name."""
    service = service_of(request)
    name = without_slashes(request.match_info["id"]).removeprefix("/")
    if not name:
        return await list_models(request)
    service.check_model(name)
    if asks_for_anthropic(request):
        return json_response(model_info(service, name))
    return json_response(_model(service, name))
