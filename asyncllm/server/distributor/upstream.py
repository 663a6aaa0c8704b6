"""The client side of the distributor: one pool of connections to all nodes, and the headers that are passed on."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import aiohttp
from multidict import CIMultiDict

from asyncllm.config import DistributorConfig

__all__ = ["open_session", "request_headers", "response_headers"]

KEEP_ALIVE_S = 4.0
"""Seconds for which an idle connection is kept: less than any server does, so that no request meets a closing one."""

IDLE_S, BETWEEN_S, PROBES = 15, 5, 3
"""The kernel asks a silent node after the first, then so often and so many times, before it ends the connection: a
machine without power sends no reset."""

HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Headers that concern one connection (RFC 9110, section 7.6.1)."""
NOT_SENT = HOP_BY_HOP | {"host", "content-length", "content-encoding", "expect", "origin"}
"""The body is passed on decompressed and whole, and the client's page has been checked here."""
NOT_RETURNED = HOP_BY_HOP | {
    f"access-control-{name}"
    for name in ("allow-origin", "allow-credentials", "allow-methods", "allow-headers", "expose-headers")
}
"""What a page may read is granted here."""


def open_session(config: DistributorConfig) -> aiohttp.ClientSession:
    """Return the client of all nodes. It waits for an answer as long as the request's client does."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, socket_factory=_open_socket),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
    )


def _open_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", IDLE_S), ("TCP_KEEPINTVL", BETWEEN_S), ("TCP_KEEPCNT", PROBES)):
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


def request_headers(given: Mapping[str, str], key: str | None) -> CIMultiDict[str]:
    """Return the headers for a node. `key`: the node's own, which takes the place of the client's."""
    found = _without(given, NOT_SENT | _named_by_connection(given))
    for name in [name for name in found if name.lower().startswith("sec-fetch-")]:
        found.popall(name, None)
    if key is not None:
        found.popall("x-api-key", None)
        found["Authorization"] = f"Bearer {key}"
    return found


def response_headers(given: Mapping[str, str]) -> CIMultiDict[str]:
    """Return the headers of a node's answer for the client."""
    return _without(given, NOT_RETURNED | _named_by_connection(given))


def _named_by_connection(given: Mapping[str, str]) -> set[str]:
    return {name.strip().lower() for name in given.get("Connection", "").split(",")}


def _without(given: Mapping[str, str], names: frozenset[str] | set[str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in given.items() if name.lower() not in names)
