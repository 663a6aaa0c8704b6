"""The table of routes: path, who may call, what goes in and comes out. App, documentation and tests read it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from asyncllm.server.access import Auth
from asyncllm.server.chat import chat_completions
from asyncllm.server.completions import completions
from asyncllm.server.docs import docs
from asyncllm.server.health import Health, health, live, ready
from asyncllm.server.metrics import metrics
from asyncllm.server.models import list_models, show_model
from asyncllm.server.openapi import openapi_json
from asyncllm.server.requests import ChatRequest, CompletionRequest
from asyncllm.server.responses import ChatResponse, CompletionResponse, Model, ModelList

__all__ = ["ROUTES", "Route"]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, kw_only=True)
class Route:
    """One route. Its handler's docstring is its description."""

    method: str
    path: str
    handler: Handler
    auth: Auth
    body: type[Any] | None = None
    """The Struct of the request's JSON; None: no body."""
    answer: type[Any] | None = None
    """The Struct of the answer's JSON; None: another format, or none."""
    content_type: str | None = None
    """Of an answer in another format."""
    also: tuple[int, ...] = ()
    """Statuses beside 200 that come with the answer's Struct and not with an error."""
    work: bool = True
    """Whether it is counted as work. What is not answers at once, also when the server is full or drains."""
    switch: str | None = None
    """The field of ServerConfig that leaves the route out when it is set."""
    streams: bool = False
    """Whether `stream: true` turns the answer into server-sent events."""


ROUTES: tuple[Route, ...] = (
    Route(
        method="POST",
        path="/v1/chat/completions",
        handler=chat_completions,
        auth=Auth.KEY,
        body=ChatRequest,
        answer=ChatResponse,
        streams=True,
    ),
    Route(
        method="POST",
        path="/v1/completions",
        handler=completions,
        auth=Auth.KEY,
        body=CompletionRequest,
        answer=CompletionResponse,
        streams=True,
    ),
    Route(method="GET", path="/v1/models", handler=list_models, auth=Auth.KEY, work=False, answer=ModelList),
    # A hub id has a slash in it.
    Route(method="GET", path="/v1/models/{id:.+}", handler=show_model, auth=Auth.KEY, work=False, answer=Model),
    Route(
        method="GET",
        path="/metrics",
        handler=metrics,
        auth=Auth.KEY,
        content_type="text/plain",
        work=False,
        switch="disable_metrics",
    ),
    Route(method="GET", path="/health", handler=health, auth=Auth.PUBLIC, answer=Health, also=(503,), work=False),
    Route(method="GET", path="/health/live", handler=live, auth=Auth.PUBLIC, answer=Health, also=(503,), work=False),
    Route(method="GET", path="/health/ready", handler=ready, auth=Auth.PUBLIC, answer=Health, also=(503,), work=False),
    # It names the model and the server's limits.
    Route(
        method="GET",
        path="/openapi.json",
        handler=openapi_json,
        auth=Auth.KEY,
        content_type="application/json",
        work=False,
        switch="disable_docs",
    ),
    Route(
        method="GET",
        path="/",
        handler=docs,
        auth=Auth.PUBLIC,
        content_type="text/html",
        work=False,
        switch="disable_docs",
    ),
)
