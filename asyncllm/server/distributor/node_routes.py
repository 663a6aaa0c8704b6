"""LMDeploy's routes under /nodes, with which the owner and the servers themselves add, remove and stop nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from asyncllm.config.settings import MAX_COUNT, check_address
from asyncllm.errors import InvalidParameter
from asyncllm.server.distributor.distributor import Distributor, distributor_of
from asyncllm.server.distributor.nodes import Node, address_of_node
from asyncllm.server.http.body import read_body
from asyncllm.server.http.errors import ApiError

__all__ = ["NodeRequest", "NodeStatus", "add_node", "node_status", "remove_node", "terminate_all", "terminate_node"]

HYBRID = 1
"""LMDeploy's number for a node that computes prompts and answers."""


class NodeStatus(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """LMDeploy's description of a node."""

    role: Literal[1] | Literal["Hybrid"] | None = None
    """Prefill and Decode nodes, which hand KV blocks to each other, are not implemented."""
    models: list[str] | None = None
    """Its models, which count if it does not tell them without a key."""
    unfinished: Annotated[int, Meta(ge=0, le=0)] = 0
    """0: the distributor counts them."""
    latency: list[Annotated[float, Meta(ge=0)]] | None = None
    """Seconds of its latest answers."""
    speed: float | None = None
    """Its throughput, in the unit of all nodes; None, or nothing above 0: unknown."""


class NodeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of /nodes/add, /nodes/remove and /nodes/terminate."""

    url: Annotated[str, Meta(min_length=1, max_length=2048)]
    status: NodeStatus | None = None
    lease_seconds: Annotated[float, Meta(gt=0, le=MAX_COUNT)] | None = None
    """After that time it is removed unless it is added again; None: never."""


async def _read(request: web.Request) -> NodeRequest:
    """Return the body of a request. Raises ApiError."""
    distributor = distributor_of(request)
    if "node_url" in request.query:  # LMDeploy 0.5 has the address of /nodes/remove there.
        return NodeRequest(url=request.query["node_url"])
    data = await read_body(request, distributor.config.body_timeout, distributor.config.max_body_bytes)
    try:
        return msgspec.json.decode(data, type=NodeRequest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(
            400,
            f'The body is not a description of a node ({error}). Send {{"url": "http://host:port"}}.',
            code="invalid_value",
        ) from None


def _find(distributor: Distributor, body: NodeRequest) -> Node:
    node = distributor.nodes.get(address_of_node(body.url))
    if node is None:
        raise ApiError(
            404,
            f"There is no node {body.url[:256]!r}. GET /nodes/status lists them.",
            code="node_not_found",
            param="url",
        )
    return node


async def node_status(request: web.Request) -> web.Response:
    """All nodes: address -> LMDeploy's description, with `state`, which says whether it gets requests."""
    found: dict[str, Any] = {
        node.url: {
            "role": HYBRID,
            "models": list(node.models),
            "unfinished": node.unfinished,
            "latency": [seconds for _, seconds in node.latencies],
            "speed": node.speed,
            "state": node.state.value,
        }
        for node in distributor_of(request).nodes
    }
    return _answer(found)


async def add_node(request: web.Request) -> web.Response:
    """Add a server, or renew its lease. It has to be reachable, and gets requests as soon as it is ready."""
    distributor = distributor_of(request)
    body = await _read(request)
    url = address_of_node(body.url)
    try:
        check_address(url, "url")
    except InvalidParameter as error:
        raise ApiError(400, str(error), code="invalid_value", param="url") from None
    node = distributor.nodes.get(url)
    is_new = node is None
    if node is None:
        node = Node(url)
    if body.lease_seconds is None:
        node.lease_end = None
    elif is_new or node.lease_end is not None:  # A node that its owner has named does not leave by itself.
        node.lease_end = asyncio.get_running_loop().time() + body.lease_seconds
    _describe(node, body)
    if is_new:
        failure = await distributor.checks.check(node)
        if failure is not None:
            raise ApiError(
                400,
                f"The node {url[:256]!r} does not answer the distributor: {failure!r:.500}. Give the address at which "
                "the distributor reaches it.",
                code="node_unreachable",
                param="url",
            )
        if distributor.nodes.get(url) is None:
            distributor.nodes.add(node)
            distributor.checks.watch(node)
    if body.lease_seconds is None:
        await distributor.save()
    return _answer("Added successfully")


def _describe(node: Node, body: NodeRequest) -> None:
    if body.status is None:
        return
    if body.status.speed is not None:
        node.speed = body.status.speed if body.status.speed > 0 else None
    if body.status.models and not node.models:
        node.models = {name: {"id": name, "object": "model"} for name in body.status.models}
    for seconds in body.status.latency or ():
        node.latencies.append((asyncio.get_running_loop().time(), seconds))


async def remove_node(request: web.Request) -> web.Response:
    """Remove a server. Its running answers finish."""
    distributor = distributor_of(request)
    distributor.nodes.remove(_find(distributor, await _read(request)))
    await distributor.save()
    return _answer("Deleted successfully")


async def terminate_node(request: web.Request) -> web.Response:
    """Stop a server by its /terminate, and remove it."""
    distributor = distributor_of(request)
    await _terminate(distributor, [_find(distributor, await _read(request))])
    return _answer("Deleted successfully")


async def terminate_all(request: web.Request) -> web.Response:
    """Stop all servers, and remove them."""
    if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        raise ApiError(403, "A page of another site may not stop servers.", code="cross_site")
    distributor = distributor_of(request)
    await _terminate(distributor, list(distributor.nodes))
    return _answer("All nodes terminated successfully")


async def _terminate(distributor: Distributor, nodes: Sequence[Node]) -> None:
    """Stop servers, and remove those that have stopped. Raises ApiError if one of them has not."""
    failures = await asyncio.gather(*(distributor.checks.terminate(node) for node in nodes))
    for node, failure in zip(nodes, failures, strict=True):
        if failure is None:
            distributor.nodes.remove(node)
    await distributor.save()
    refused = [f"{node.url} ({failure})" for node, failure in zip(nodes, failures, strict=True) if failure is not None]
    if refused:
        raise ApiError(
            502,
            f"These servers do not stop: {', '.join(refused)[:1000]}. A server stops for its clients if it is started "
            "with --allow-terminate-by-client.",
            code="node_not_terminated",
        )


def _answer(what: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(what), content_type="application/json")
