"""The aiohttp application: the routes, and the entrance that every request passes."""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from asyncllm.server.access import KEY, Auth
from asyncllm.server.connection import send
from asyncllm.server.errors import as_api_error
from asyncllm.server.routes import ROUTES, Route
from asyncllm.server.service import SERVICE, Service, service_of

__all__ = ["build_app"]

REQUEST_ID = web.RequestKey("REQUEST_ID", str)
"""The client's X-Request-Id if it is one, else a new one; the response carries it."""

GIVEN_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

_AUTH = web.AppKey("_AUTH", dict[object, Auth])
"""By handler. What has no entry, such as an unknown path, asks for a key."""


def build_app(service: Service, routes: Sequence[Route] = ROUTES) -> web.Application:
    """The application of a started engine. Raises ValueError for a route that does not say who may call it."""
    app = web.Application(middlewares=[_entrance], client_max_size=service.config.max_body_bytes)
    app[SERVICE] = service
    auth: dict[object, Auth] = {}
    for route in routes:
        if not isinstance(route.auth, Auth):
            raise ValueError(f"{route.method} {route.path} does not say who may call it.")
        app.router.add_route(route.method, route.path, route.handler)
        auth[route.handler] = route.auth
    app[_AUTH] = auth
    app.on_response_prepare.append(_add_headers)
    return app


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["X-Request-Id"] = request.get(REQUEST_ID, "")
    response.headers["X-Content-Type-Options"] = "nosniff"
    service_of(request).access.grant(request, response)


@web.middleware
async def _entrance(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Let in or refuse, count, turn whatever is raised into an answer, and write that to clients that read it."""
    given = request.headers.get("X-Request-Id", "")
    request[REQUEST_ID] = given if GIVEN_ID.fullmatch(given) else uuid.uuid4().hex
    service = service_of(request)
    try:
        service.access.check_place(request)
        asked = service.access.preflight(request)
        if asked is not None:
            response: web.StreamResponse = asked
        elif request.app[_AUTH].get(request.match_info.handler, Auth.KEY) is Auth.PUBLIC:
            response = await handler(request)
        else:
            request[KEY] = service.access.key_of(request)
            with service.work():
                response = await _answered(request, handler)
                # In work until the answer is written: a server that drains waits for that too.
                await send(request, response, service.config.write_timeout)
    except Exception as error:
        response = as_api_error(error).response()
    await send(request, response, service.config.write_timeout)
    return response


async def _answered(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except Exception as error:
        return as_api_error(error).response()
