"""GET, DELETE, cancel and GET input_items for responses that are kept or in progress in the background.

Documented at https://platform.openai.com/docs/api-reference/responses.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from asyncllm.server.http.access import KEY
from asyncllm.server.http.errors import ApiError
from asyncllm.server.http.responses import CLIENT_LEFT, OUTCOME, Connection, begin, encode, json_response
from asyncllm.server.responses.background import BackgroundResponse
from asyncllm.server.responses.event_log import EventLog
from asyncllm.server.service import service_of
from asyncllm.server.sse import HEADERS, SSE

__all__ = [
    "LISTING",
    "DeletedResponse",
    "InputItems",
    "cancel_response",
    "delete_response",
    "follow",
    "list_input_items",
    "show_response",
]


class InputItems(msgspec.Struct, kw_only=True):
    """The input items of a request."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    object: str = "list"
    has_more: bool = False


class DeletedResponse(msgspec.Struct, kw_only=True):
    """The deleted response."""

    id: str
    object: str = "response"
    deleted: bool = True


async def follow(request: web.Request, log: EventLog, number: int) -> web.StreamResponse:
    """Reply with the events of a response from this number on. The response continues if the client leaves."""
    config = service_of(request).config
    log.check(number)
    response = web.StreamResponse(headers={"Content-Type": SSE.content_type, **HEADERS})
    connection = Connection(request, response, config.write_timeout)
    try:
        await begin(request, response)
        async for events in log.read(number, config.ping_interval):
            await connection.write(events or SSE.ping)
    except ConnectionError:
        request[OUTCOME] = CLIENT_LEFT
        response.force_close()
    except ApiError:
        # The client is too slow; it can still ask for the response itself.
        response.force_close()
    return response


async def show_response(request: web.Request) -> web.StreamResponse:
    """A response that is kept or in progress, or its events after the one numbered `starting_after`."""
    service, response_id = service_of(request), request.match_info["response_id"]
    found = service.background.find(request[KEY], response_id) or service.responses.get(request[KEY], response_id)
    streamed, after = _asked_events(request)
    if not streamed:
        return web.Response(body=encode(found.body), content_type="application/json")
    log = found.log if isinstance(found, BackgroundResponse) else found.events
    if log is None:
        raise ApiError(
            400,
            "The response has no events: they are kept where background and stream were both true. Ask for it without "
            "stream.",
            code="invalid_value",
            param="stream",
        )
    return await follow(request, log, after + 1)


def _asked_events(request: web.Request) -> tuple[bool, int]:
    """Return whether the client wants events, and the number of the last event it has (-1: none). Raises ApiError."""
    stream, after = request.query.get("stream", "false"), request.query.get("starting_after")
    if stream not in ("true", "false"):
        raise ApiError(400, "stream is true or false.", code="invalid_value", param="stream")
    if after is None:
        return stream == "true", -1
    if stream == "false" or not (after.isascii() and after.isdigit() and len(after) < 16):
        raise ApiError(
            400,
            "starting_after is the sequence_number of an event, beside stream=true.",
            code="invalid_value",
            param="starting_after",
        )
    return True, int(after)


async def cancel_response(request: web.Request) -> web.StreamResponse:
    """Cancel a background response and return it in its final state. A finished response stays as it is."""
    service, response_id = service_of(request), request.match_info["response_id"]
    job = service.background.find(request[KEY], response_id)
    if job is not None:
        await job.cancel()
        return web.Response(body=encode(job.body), content_type="application/json")
    kept = service.responses.get(request[KEY], response_id)
    if not kept.body["background"]:
        raise ApiError(
            400,
            "Only background responses can be cancelled. To end another one, close its connection.",
            code="invalid_value",
        )
    return web.Response(body=encode(kept.body), content_type="application/json")


async def delete_response(request: web.Request) -> web.StreamResponse:
    """Delete a response. If it is in progress, stop it."""
    service, response_id = service_of(request), request.match_info["response_id"]
    job = service.background.find(request[KEY], response_id)
    if job is not None:
        await job.cancel()
    service.responses.delete(request[KEY], response_id)
    return json_response(DeletedResponse(id=response_id))


LISTING: dict[str, Any] = {
    "order": {"type": "string", "enum": ["desc", "asc"], "default": "desc"},
    "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
    "after": {"type": "string"},
}


async def list_input_items(request: web.Request) -> web.StreamResponse:
    """List the input items of a kept response, newest first unless `order` is asc, without earlier turns: `limit` of
    them behind the one whose id is `after`."""
    service, response_id = service_of(request), request.match_info["response_id"]
    found = service.background.find(request[KEY], response_id) or service.responses.get(request[KEY], response_id)
    order, limit, after = (request.query.get(name, each.get("default")) for name, each in LISTING.items())
    if order not in LISTING["order"]["enum"]:
        raise ApiError(400, "order is asc or desc.", code="invalid_value", param="order")
    count = int(limit) if str(limit).isascii() and str(limit).isdigit() and len(str(limit)) < 4 else 0
    if not 1 <= count <= 100:
        raise ApiError(400, "limit is a number from 1 to 100.", code="invalid_value", param="limit")
    items = found.input_items if order == "asc" else found.input_items[::-1]
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise ApiError(400, f"The response has no input item {after[:64]!r}.", code="invalid_value", param="after")
    begin = 0 if after is None else ids.index(after) + 1
    shown = [_listed(item) for item in items[begin : begin + count]]
    ends = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    more = begin + count < len(items)
    return json_response(InputItems(data=shown, first_id=ends[0], last_id=ends[1], has_more=more))


def _listed(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item in the form of OpenAI's lists, where a message has its text in parts."""
    text = item.get("content")
    if item.get("type", "message") != "message" or not isinstance(text, str):
        return item
    part: dict[str, Any] = {"type": "input_text", "text": text}
    if item.get("role") == "assistant":
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "status": "completed", **item, "content": [part]}
