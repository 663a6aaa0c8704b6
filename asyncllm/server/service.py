"""Service: the state shared by all handlers."""

from __future__ import annotations

import time
from collections.abc import Callable

from aiohttp import web

from asyncllm.config import GenerationConfig, ServerConfig
from asyncllm.engine.async_engine import AsyncEngine
from asyncllm.event_loop.request_gate import RequestGate
from asyncllm.server.http.access import Access
from asyncllm.server.http.errors import ApiError, retry_after
from asyncllm.server.http.routing import Route
from asyncllm.server.http.server_state import ServerState
from asyncllm.server.lmdeploy.sessions import SessionStore
from asyncllm.server.observe.metrics import Instruments
from asyncllm.server.responses.background import BackgroundResponses
from asyncllm.server.responses.store import ResponseStore
from asyncllm.server.supervisor import Supervisor
from asyncllm.text.chat_template import ChatTemplate

__all__ = ["SERVICE", "TABLE", "Service", "service_of", "table_of"]

MAX_BODY = 4 * 2**20
MAX_BODY_WITH_IMAGES = 32 * 2**20
"""Default maximum size of a request body: a photograph of 20 MB is 27 MB as a data: URL."""


class Service:
    """An engine behind HTTP."""

    def __init__(
        self,
        engine: AsyncEngine,
        config: ServerConfig,
        access: Access,
        defaults: GenerationConfig,
        make_engine: Callable[[], AsyncEngine] | None = None,
    ) -> None:
        self.supervisor = Supervisor(engine, config, make_engine)
        self.config = config
        self.access = access
        self.defaults = defaults
        """Default sampling parameters of requests."""
        self.instruments = None if config.disable_metrics else Instruments(self.supervisor)
        self.sessions = SessionStore(self.supervisor, config)
        self.responses = ResponseStore(config.session_ttl)
        self.background = BackgroundResponses()
        self.state = ServerState(config.max_concurrent_requests, self._check_engine)
        self.request_gate = RequestGate()
        """Lets bursts of requests start a few at a time."""
        self.created = int(time.time())
        """Start time of the server in seconds since 1970, for /v1/models."""
        self.openapi = b""
        """The document served at /openapi.json. Written by the first request for it."""

    @property
    def engine(self) -> AsyncEngine:
        """The engine in service. A restart replaces it, so a handler must not keep it longer than one request."""
        return self.supervisor.engine

    @property
    def max_body_bytes(self) -> int:
        """Maximum size of a request body in bytes."""
        if self.config.max_body_bytes is not None:
            return self.config.max_body_bytes
        limits = self.engine.limits
        return MAX_BODY_WITH_IMAGES if limits.takes_images or limits.takes_embeddings else MAX_BODY

    def _check_engine(self) -> None:
        """Raise ApiError 503 while the engine restarts or the model sleeps, and EngineError."""
        self.supervisor.check_serving()
        if self.engine.sleep_level:
            raise ApiError(
                503, "The model sleeps. Come back when it has been woken.", code="sleeping", headers=retry_after(5)
            )

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 unless `model` is the served model, one of its adapters, or None."""
        if name is not None and name != self.engine.model_name and name not in self.engine.adapters:
            raise ApiError(
                404,
                f"The model {name[:128]!r} does not exist. GET /v1/models lists what is served.",
                code="model_not_found",
                param="model",
            )

    def template_for(self, name: str | None) -> ChatTemplate:
        """Return the chat template of a request's `model`."""
        return self.engine.chat_template_of(self.adapter_of(name))

    def adapter_of(self, name: str | None) -> str | None:
        """Return the adapter of a request's `model`; None for the model itself."""
        return None if name == self.engine.model_name else name


SERVICE = web.AppKey("SERVICE", Service)
TABLE: web.AppKey[dict[web.AbstractRoute, Route]] = web.AppKey("TABLE", dict)
"""aiohttp's route -> our route. Requests without one, such as for an unknown path, need a key."""


def service_of(request: web.Request) -> Service:
    return request.app[SERVICE]


def table_of(request: web.Request) -> list[Route]:
    """Return the routes that are served, in the table's order."""
    return [route for added, route in request.app[TABLE].items() if added.method == route.method]
