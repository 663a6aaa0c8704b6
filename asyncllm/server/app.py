"""The aiohttp application: the routes, and the entry point that every request passes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, nullcontext

from aiohttp import web

from asyncllm.server.http.access import KEY, Auth
from asyncllm.server.http.body import defer_continue
from asyncllm.server.http.errors import FORM, ErrorFormat, as_api_error, no_route
from asyncllm.server.http.protocol import working
from asyncllm.server.http.responses import (
    CLIENT_LEFT,
    OUTCOME,
    REQUEST_ID,
    add_headers,
    asks_for_anthropic,
    send,
    set_request_id,
)
from asyncllm.server.http.routing import Handler, Route, Slashes
from asyncllm.server.observe.access_log import log_request
from asyncllm.server.observe.probes import Health
from asyncllm.server.request.decode import FORM_FIELD, IGNORED, PROMPT_FIELD, named_in_a_header
from asyncllm.server.routes import ROUTES
from asyncllm.server.service import SERVICE, TABLE, Service, service_of

__all__ = ["build_app"]

OTHER = "other"
"""Method and route, in the metrics, of requests that match no route: client text must not become a label."""


def build_app(service: Service, routes: Sequence[Route] = ROUTES) -> web.Application:
    """Return the application of a started engine. Raises ValueError for a route without access rights."""
    app = web.Application(middlewares=[_measure_and_log])
    app[SERVICE] = service
    table: dict[web.AbstractRoute, Route] = {}
    for route in routes:
        if not isinstance(route.auth, Auth):
            raise ValueError(f"{route.method} {route.path} does not say who may call it.")
        switched_off = route.switch is not None and getattr(service.config, route.switch)
        switched_off |= route.only_with is not None and not getattr(service.config, route.only_with)
        if not switched_off and (route.auth is not Auth.ADMIN or service.access.has_admin):
            # Each GET route accepts HEAD too, which Ollama's program sends first.
            for method in ("GET", "HEAD") if route.method == "GET" and not route.streams else (route.method,):
                added = app.router.add_route(method, route.path, route.handler, expect_handler=defer_continue)
                table[added] = route
    app.router.register_resource(Slashes(app.router))
    app[TABLE] = table
    app.on_response_prepare.append(_add_headers)
    app.cleanup_ctx.append(_run_instruments)
    return app


async def _run_instruments(app: web.Application) -> AsyncIterator[None]:
    instruments = app[SERVICE].instruments
    with instruments.measuring() if instruments is not None else nullcontext():
        yield


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    add_headers(request, response, service_of(request).access)
    if _error_format(request, request.app[TABLE].get(request.match_info.route)) == "anthropic":
        # Its client reads the id from there.
        response.headers["request-id"] = request.get(REQUEST_ID, "")
    if ignored := request.get(IGNORED):
        response.headers["X-Ignored-Fields"] = named_in_a_header(ignored)


@web.middleware
async def _measure_and_log(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Measure a request, and write its line in the access log."""
    began = time.monotonic()
    service = service_of(request)
    route = request.app[TABLE].get(request.match_info.route)
    status = CLIENT_LEFT
    try:
        response = await _handle(request, service, route, handler)
        status = request.get(OUTCOME, response.status)
        return response
    finally:
        seconds = time.monotonic() - began
        method, path = (route.method, route.path) if route is not None else (OTHER, OTHER)
        if service.instruments is not None:
            service.instruments.answered(method, path, status, seconds)
        log_request(
            request.method,
            request.path if route is None else path,
            status,
            seconds,
            request.get(REQUEST_ID, "-"),
            request.get(KEY, -1),
        )


async def _handle(
    request: web.Request,
    service: Service,
    route: Route | None,
    handler: Handler,
) -> web.StreamResponse:
    """Check access, call the handler, and write its response, or that of an error, to the client."""
    set_request_id(request)
    try:
        service.access.check_origin(request)
        response: web.StreamResponse | None = service.access.preflight(request)
        if response is None:
            if route is None or route.answer is not Health:
                service.supervisor.check_loaded()
            if route is not None and route.auth is Auth.ADMIN:
                service.access.check_admin(request)
            # Without a key, only these exact paths are open, not others that lead to the same route.
            elif route is None or route.auth is not Auth.PUBLIC or request.path != route.path:
                request[KEY] = service.access.key_of(request)
            works = route is not None and route.work
            with ExitStack() as in_work:
                if works:
                    in_work.enter_context(service.state.work())
                    in_work.enter_context(working(request))
                    await service.request_gate.enter()
                response = await _call_handler(request, service, route, handler)
                # The request counts as work until its answer is written, because a draining server waits for that.
                await send(request, response, service.config.write_timeout)
                return response
    except Exception as error:
        response = as_api_error(error).response(_error_format(request, route))
    await send(request, response, service.config.write_timeout)
    return response


async def _call_handler(
    request: web.Request,
    service: Service,
    route: Route | None,
    handler: Handler,
) -> web.StreamResponse:
    """Call the handler. Return the response of its exception, if it raises one."""
    try:
        return await handler(request)
    except Exception as error:
        if isinstance(error, web.HTTPNotFound | web.HTTPMethodNotAllowed):
            answer = no_route(request.path, error)
        else:
            answer = as_api_error(error, request.get(PROMPT_FIELD, "messages"), request.get(FORM_FIELD, FORM))
        # aiohttp keeps the error that it raises for paths without a route, whose traceback would keep the request.
        error.__traceback__ = None
        return answer.response(_error_format(request, route))


def _error_format(request: web.Request, route: Route | None) -> ErrorFormat:
    if route is not None and route.errors is not None:
        return route.errors
    return "anthropic" if asks_for_anthropic(request) else service_of(request).config.error_format
