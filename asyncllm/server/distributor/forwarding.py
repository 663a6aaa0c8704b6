"""Forwarding: passes a request to a node and its answer back, byte by byte.

A request goes to another node only while none has begun to answer. A stream that breaks off ends with an error event
in its route's format and a closed connection, never as if it were complete.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web
from yarl import URL

from asyncllm.config import DistributorConfig
from asyncllm.server.distributor.dispatch import Dispatcher
from asyncllm.server.distributor.metrics import DistributorMetrics
from asyncllm.server.distributor.nodes import Node, Nodes
from asyncllm.server.distributor.pins import Pins
from asyncllm.server.distributor.routing_fields import RESPONSES, RoutingFields, read_fields, with_own_session
from asyncllm.server.distributor.upstream import request_headers, response_headers
from asyncllm.server.http.access import KEY
from asyncllm.server.http.body import read_body
from asyncllm.server.http.errors import ApiError, ErrorFormat, event_of, retry_after
from asyncllm.server.http.responses import CLIENT_LEFT, OUTCOME, REQUEST_ID, REQUEST_ID_HEADER, Connection, begin
from asyncllm.server.http.routing import without_slashes

__all__ = ["Forwarding", "error_format"]

OF_ONE_SERVER = frozenset(
    {
        "/sleep",
        "/wakeup",
        "/wake_up",
        "/is_sleeping",
        "/abort_request",
        "/pause",
        "/resume",
        "/is_paused",
        "/reset_prefix_cache",
        "/flush_cache",
        "/server_info",
        "/get_server_info",
        "/terminate",
        "/load_lora_adapter",
        "/unload_lora_adapter",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    }
)
"""Routes that change one server or tell its state, so that any one of them will not do."""

FULL = (429, 503)
"""Statuses with which a node refuses a request before it has begun."""
NEVER_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
"""Failures before a node has got anything of the request."""
BROKEN = 502
"""Status, in the log, of an answer that broke off."""

RESPONSE_ID = re.compile(rb'"id": ?"(resp_[A-Za-z0-9_-]{1,128})"')
ID_WITHIN = 2**16
"""Bytes of an answer within which a response's id stands."""

WHOLE_BYTES = 2**18
"""Maximum size of an answer of known length that is read whole, so that it needs one write."""

SSE, NDJSON = "text/event-stream", "application/x-ndjson"
BETWEEN_EVENTS = {SSE: (b"\n\n", b"\r\n\r\n"), NDJSON: (b"\n",)}
"""Content type of a stream -> how its events end."""


def error_format(path: str) -> ErrorFormat:
    """Return the format of errors on a path."""
    if path.startswith("/v1/messages"):
        return "anthropic"
    return "ollama" if path.startswith("/api/") else "openai"


def _broke_off() -> ApiError:
    return ApiError(502, "The server that gave this answer broke off. Send the request again.", code="node_failed")


@dataclass(kw_only=True, slots=True)
class _Passing:
    """A request on its way."""

    request: web.Request
    path: str
    """Without superfluous slashes."""
    body: bytes
    fields: RoutingFields
    tried: list[Node] = field(default_factory=list)
    sent: float = 0.0
    """When it was sent to the latest node, on the event loop's clock."""


class Forwarding:
    """Passes requests through one pool of connections."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        nodes: Nodes,
        dispatcher: Dispatcher,
        pins: Pins,
        metrics: DistributorMetrics,
        config: DistributorConfig,
        node_key: str | None,
        num_tenants: int,
    ) -> None:
        """`num_tenants`: the number of the clients' keys."""
        self._session = session
        self._nodes = nodes
        self._dispatcher = dispatcher
        self._pins = pins
        self._metrics = metrics
        self._config = config
        self._node_key = node_key
        self._num_tenants = num_tenants
        self._loop = asyncio.get_running_loop()

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Answer with a node's answer. Raises ApiError if there is none."""
        passing = await self._read(request)
        began = self._loop.time()
        fields = passing.fields
        try:
            if fields.response is not None and self._pins.get("response", fields.tenant, fields.response) is None:
                await self._locate(passing, fields.response)
            node = await self._dispatcher.take(fields)
        except ApiError as error:
            self._metrics.refused(error.code or "")
            raise
        self._metrics.sent(self._loop.time() - began)
        while True:
            passing.tried.append(node)
            try:
                outcome = await self._try(passing, node)
            finally:
                self._dispatcher.give_back(node)
            if isinstance(outcome, web.StreamResponse):
                return outcome
            self._metrics.retried(node.url)
            node = outcome

    async def _read(self, request: web.Request) -> _Passing:
        """Read a request. Raises ApiError."""
        path = without_slashes(request.rel_url.raw_path)
        if path in OF_ONE_SERVER:
            raise ApiError(
                404,
                "This route concerns one server. Call that server itself; GET /nodes/status lists their addresses.",
                code="not_distributed",
            )
        body = b""
        if request.body_exists:
            body = await read_body(request, self._config.body_timeout, self._config.max_body_bytes, undeclared=True)
        fields = read_fields(request.method, path, body, request[KEY])
        body = with_own_session(body, fields, self._num_tenants)
        return _Passing(request=request, path=path, body=body, fields=fields)

    async def _try(self, passing: _Passing, node: Node) -> web.StreamResponse | Node:
        """Return the node's answer, written up to its end, or another node for the request, taken. Raises ApiError if
        the node gives no answer and no other may."""
        passing.sent = self._loop.time()
        try:
            answer = await self._ask(passing, node, passing.request.method, passing.request.rel_url.raw_path_qs)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            node.failed(error)
            self._metrics.ended(node.url, "unreachable")
            if passing.fields.repeatable or isinstance(error, NEVER_SENT):
                another = self._dispatcher.take_another(passing.fields, passing.tried)
                if another is not None:
                    return another
            raise ApiError(
                502,
                "The server that had the request does not answer, and no other may have it. Send it again.",
                code="node_failed",
                headers=retry_after(self._config.health_interval),
            ) from error
        try:
            if answer.status == 503:
                node.accepts = False  # It drains or starts; the next check says when that is over.
            if answer.status in FULL:
                another = self._dispatcher.take_another(passing.fields, passing.tried)
                if another is not None:
                    self._metrics.ended(node.url, str(answer.status))
                    return another
            if answer.ok:
                self._note_session(passing.fields, node)
            size = answer.content_length
            is_small = size is not None and size <= WHOLE_BYTES and passing.request.method != "HEAD"
            return await (self._relay_whole if is_small else self._relay)(passing, node, answer)
        finally:
            # If the answer has not ended, because the client has left, this ends it.
            answer.close()

    async def _ask(self, passing: _Passing, node: Node, method: str, path: str) -> aiohttp.ClientResponse:
        headers = request_headers(passing.request.headers, self._node_key)
        headers[REQUEST_ID_HEADER] = passing.request[REQUEST_ID]
        body = passing.body if method == passing.request.method else b""
        url = URL(node.url + path, encoded=True)
        return await self._session.request(method, url, data=body or None, headers=headers, allow_redirects=False)

    async def _relay_whole(self, passing: _Passing, node: Node, answer: aiohttp.ClientResponse) -> web.Response:
        """Return an answer that is sent with its headers in one piece. Raises ApiError if it breaks off."""
        outcome = "client_left"
        try:
            body = await answer.read()
            outcome = str(answer.status)
        except (aiohttp.ClientError, OSError) as error:
            outcome = "broken"
            node.failed(error)
            raise _broke_off() from error
        finally:
            self._metrics.ended(node.url, outcome)
        self._metrics.first_byte(node.url, self._loop.time() - passing.sent)
        self._note_latency(passing, node, answer)
        if answer.ok and passing.path == RESPONSES:
            self._note_response(passing.fields, node, bytearray(), body)
        headers = response_headers(answer.headers)
        del headers["Content-Length"]
        return web.Response(status=answer.status, reason=answer.reason, headers=headers, body=body)

    async def _relay(self, passing: _Passing, node: Node, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        """Write the node's answer as it comes."""
        request = passing.request
        response = web.StreamResponse(
            status=answer.status, reason=answer.reason, headers=response_headers(answer.headers)
        )
        begun_with = bytearray() if answer.ok and passing.path == RESPONSES else None
        connection = Connection(request, response, self._config.write_timeout)
        tail, outcome = b"", "client_left"
        try:
            await begin(request, response)
            async for piece in answer.content.iter_any():
                if not tail:
                    self._metrics.first_byte(node.url, self._loop.time() - passing.sent)
                if begun_with is not None and self._note_response(passing.fields, node, begun_with, piece):
                    begun_with = None
                tail = piece[-4:] if len(piece) >= 4 else (tail + piece)[-4:]
                await connection.write(piece)
            outcome = str(answer.status)
            self._note_latency(passing, node, answer)
        except (aiohttp.ClientError, OSError) as error:
            response.force_close()
            if answer.content.exception() is None:
                request[OUTCOME] = CLIENT_LEFT
            else:
                outcome = "broken"
                node.failed(error)
                await self._break_off(passing, response, answer.content_type, tail)
        finally:
            self._metrics.ended(node.url, outcome)
        return response

    async def _break_off(self, passing: _Passing, response: web.StreamResponse, content_type: str, tail: bytes) -> None:
        """End an answer that its node does not continue: with an error where one can stand, otherwise by cutting the
        connection."""
        request = passing.request
        request[OUTCOME] = BROKEN
        if content_type in BETWEEN_EVENTS and (not tail or tail.endswith(BETWEEN_EVENTS[content_type])):
            data = event_of(_broke_off(), error_format(passing.path))
            if content_type == NDJSON:
                event = data + b"\n"
            else:
                # Events of these APIs have names.
                named = passing.path.startswith(("/v1/messages", RESPONSES))
                event = (b"event: error\n" if named else b"") + b"data: " + data + b"\n\n"
            try:
                await response.write(event)
                return
            except ConnectionError:
                request[OUTCOME] = CLIENT_LEFT
        if request.transport is not None:
            request.transport.abort()

    def _note_latency(self, passing: _Passing, node: Node, answer: aiohttp.ClientResponse) -> None:
        if answer.ok:
            now = self._loop.time()
            node.latencies.append((now, now - passing.sent))

    def _note_session(self, fields: RoutingFields, node: Node) -> None:
        if fields.session is not None:
            self._pins.put("session", fields.tenant, fields.session, node)
        elif fields.label is not None:
            self._pins.put("session", fields.tenant, fields.label, node, holds=False)

    def _note_response(self, fields: RoutingFields, node: Node, begun_with: bytearray, piece: bytes) -> bool:
        """Look for the response's id in the beginning of an answer, and pin it; returns whether the search is over."""
        begun_with += piece
        found = RESPONSE_ID.search(begun_with)
        if found is not None:
            self._pins.put("response", fields.tenant, found[1].decode(), node)
        return found is not None or len(begun_with) > ID_WITHIN

    async def _locate(self, passing: _Passing, response_id: str) -> None:
        """Ask all nodes for a stored response that this distributor has not passed on, and pin the one that has it."""
        nodes = [node for node in self._nodes if node.ready]
        if len(nodes) > 1:
            has = await asyncio.gather(*(self._has(passing, node, response_id) for node in nodes))
            for node in (node for node, found in zip(nodes, has, strict=True) if found):
                self._pins.put("response", passing.fields.tenant, response_id, node)

    async def _has(self, passing: _Passing, node: Node, response_id: str) -> bool:
        path = f"{RESPONSES}/{response_id}"
        try:
            async with asyncio.timeout(self._config.connect_timeout):
                answer = await self._ask(passing, node, "GET", URL.build(path=path).raw_path)
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False
        answer.close()
        return answer.status == 200
