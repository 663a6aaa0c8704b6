"""POST /abort_request of LMDeploy and SGLang: end running answers by their `session_id` or id, or all of them."""

from __future__ import annotations

import re
from typing import Annotated

from aiohttp import web
from msgspec import Meta

from asyncllm.config import MAX_COUNT
from asyncllm.server.http.access import KEY
from asyncllm.server.http.errors import ApiError
from asyncllm.server.request.arguments import label_of
from asyncllm.server.request.decode import read_request
from asyncllm.server.request.fields import Body, SessionName
from asyncllm.server.service import service_of

__all__ = ["AbortRequest", "abort_request"]


PREFIX = re.compile("^(chat)?cmpl-")


class AbortRequest(Body, kw_only=True):
    """The body of POST /abort_request."""

    session_id: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | SessionName | None = None
    """-1: none."""
    rid: Annotated[str, Meta(max_length=256)] | None = None
    """The id of an answer of /generate in SGLang's form, or the `rid` or `request_id` that a chat or completion was
    given. Empty: none, as SGLang's client sends it."""
    abort_all: bool | None = None
    """All answers of the server, which has no other clients: it must have at most one key."""


async def abort_request(request: web.Request) -> web.Response:
    """End the answers of a `session_id` or `rid` with the text so far, or all with `abort_all`. Their finish_reason is
    'abort'. An id without running answers is no error."""
    service = service_of(request)
    body = await read_request(request, AbortRequest)
    if body.abort_all:
        if service.access.num_keys > 1:
            raise ApiError(
                403,
                "abort_all would end the answers of other keys. Send session_id or rid; the server's owner may POST "
                "/pause and /resume.",
                code="forbidden",
                param="abort_all",
            )
        paused = service.engine.paused
        await service.engine.pause("abort")
        if not paused:
            await service.engine.resume()
        return web.Response()
    session = label_of(request, body.session_id)
    if session is None and not body.rid:
        raise ApiError(400, "Send session_id, rid or abort_all.", code="missing_required_parameter", param="session_id")
    kept = service.sessions.get(request[KEY], body.session_id) if isinstance(body.session_id, int) else None
    name = None if not body.rid else PREFIX.sub("", body.rid)
    labels = [session, label_of(request, None, name), None if kept is None else kept.session.id]
    for label in labels:
        if label is not None:
            await service.engine.stop_session(label)
    return web.Response()
