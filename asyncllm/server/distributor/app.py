"""The distributor's aiohttp application: its own routes, and one that passes everything else to the nodes."""

from __future__ import annotations

import enum
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack

from aiohttp import web

from asyncllm.server.distributor import node_routes, own_routes
from asyncllm.server.distributor.distributor import DISTRIBUTOR, Distributor, distributor_of
from asyncllm.server.distributor.forwarding import error_format
from asyncllm.server.http.access import KEY
from asyncllm.server.http.body import defer_continue
from asyncllm.server.http.errors import ApiError, as_api_error
from asyncllm.server.http.protocol import working
from asyncllm.server.http.responses import CLIENT_LEFT, OUTCOME, REQUEST_ID, add_headers, send, set_request_id
from asyncllm.server.http.routing import Handler, Slashes, without_slashes
from asyncllm.server.observe.access_log import log_request

__all__ = ["build_app"]

FORWARDED = "/{path:.*}"
PAGE = "/"
"""A node's page, which shows nothing without a key."""


class _Rights(enum.Enum):
    """Which key a handler of the distributor's own asks for."""

    PUBLIC = "public"
    CLIENT = "client"
    OWNER = "owner"


RIGHTS: Mapping[Handler, _Rights] = {
    own_routes.health: _Rights.PUBLIC,
    own_routes.ready: _Rights.PUBLIC,
    node_routes.node_status: _Rights.OWNER,
    node_routes.add_node: _Rights.OWNER,
    node_routes.remove_node: _Rights.OWNER,
    node_routes.terminate_node: _Rights.OWNER,
    node_routes.terminate_all: _Rights.OWNER,
}
"""All others, and everything that is forwarded, ask for a client's key."""


def build_app(distributor: Distributor) -> web.Application:
    """Return the application of a distributor, which runs as long as the application does."""
    app = web.Application(middlewares=[_answer_and_log])
    app[DISTRIBUTOR] = distributor
    routes: list[tuple[str, str, Handler]] = [
        ("GET", "/v1/models", own_routes.models),
        ("GET", "/health", own_routes.health),
        ("GET", "/health/live", own_routes.health),
        ("GET", "/health/ready", own_routes.ready),
        ("GET", "/health_generate", own_routes.health),
        ("GET", "/ping", own_routes.health),
        ("POST", "/ping", own_routes.health),
        ("GET", "/load", own_routes.load),
        ("GET", "/metrics", own_routes.no_metrics if distributor.config.disable_metrics else own_routes.metrics),
        ("GET", "/nodes/status", node_routes.node_status),
        ("POST", "/nodes/add", node_routes.add_node),
        ("POST", "/nodes/remove", node_routes.remove_node),
        ("POST", "/nodes/terminate", node_routes.terminate_node),
        ("GET", "/nodes/terminate_all", node_routes.terminate_all),
    ]
    for method, path, handler in routes:
        # As in the server, HEAD asks for the headers of GET; but no HEAD stops servers.
        also_head = method == "GET" and handler is not node_routes.terminate_all
        for each in (method, "HEAD") if also_head else (method,):
            app.router.add_route(each, path, handler, expect_handler=defer_continue)
    app.router.register_resource(Slashes(app.router))
    app.router.add_route("*", FORWARDED, _forward, expect_handler=defer_continue)
    app.on_response_prepare.append(_add_headers)
    app.cleanup_ctx.append(_run)
    return app


async def _run(app: web.Application) -> AsyncIterator[None]:
    async with app[DISTRIBUTOR].running():
        yield


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    add_headers(request, response, distributor_of(request).access)


async def _forward(request: web.Request) -> web.StreamResponse:
    """Pass a request of any other route to a node."""
    if f"{without_slashes(request.path)}/".startswith("/nodes/"):
        raise ApiError(
            404,
            "There is no such route. Nodes are listed by GET /nodes/status, and changed by POST /nodes/add, "
            "/nodes/remove and /nodes/terminate.",
            code="unknown_route",
        )
    distributor = distributor_of(request)
    with ExitStack() as in_work:
        in_work.enter_context(distributor.state.work())
        in_work.enter_context(working(request))
        response = await distributor.forwarding.forward(request)
        # The request counts as work until its answer is written, because a draining distributor waits for that.
        await send(request, response, distributor.config.write_timeout)
        return response


@web.middleware
async def _answer_and_log(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Check access, answer, turn every exception into an answer, and write a line in the access log."""
    began = time.monotonic()
    distributor = distributor_of(request)
    set_request_id(request)
    status = CLIENT_LEFT
    try:
        try:
            response = await _answer(request, distributor, handler)
        except Exception as error:
            response = as_api_error(error).response(error_format(request.path))
        if not response.prepared:
            await send(request, response, distributor.config.write_timeout)
        status = request.get(OUTCOME, response.status)
        return response
    finally:
        seconds = time.monotonic() - began
        log_request(request.method, request.path, status, seconds, request[REQUEST_ID], request.get(KEY, -1))


async def _answer(request: web.Request, distributor: Distributor, handler: Handler) -> web.StreamResponse:
    access = distributor.access
    access.check_origin(request)
    response = access.preflight(request)
    if response is not None:
        return response
    request[KEY] = -1
    rights = RIGHTS.get(request.match_info.handler, _Rights.CLIENT)
    if rights is _Rights.OWNER and access.has_admin:
        access.check_admin(request)
    elif rights is not _Rights.PUBLIC and not (request.path == PAGE and request.method in ("GET", "HEAD")):
        request[KEY] = access.key_of(request)
    return await handler(request)
