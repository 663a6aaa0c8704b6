"""GET /v1/models: what is served."""

from __future__ import annotations

from aiohttp import web

from asyncllm.server.encode import json_response
from asyncllm.server.responses import Model, ModelList
from asyncllm.server.service import Service, service_of

__all__ = ["list_models", "show_model"]


def _model(service: Service) -> Model:
    return Model(
        id=service.engine.model_name, created=service.created, max_model_len=service.engine.admission.session_len
    )


async def list_models(request: web.Request) -> web.Response:
    """All models: the one that the server was started with."""
    return json_response(ModelList(data=[_model(service_of(request))]))


async def show_model(request: web.Request) -> web.Response:
    """One model by its name."""
    service = service_of(request)
    service.check_model(request.match_info["id"])
    return json_response(_model(service))
