"""Route: an entry in the table of routes. Paths with superfluous slashes find their route."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from aiohttp import web

from asyncllm.server.http.access import Auth
from asyncllm.server.http.errors import ErrorFormat

__all__ = ["Handler", "Route", "Slashes", "without_slashes"]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Route:
    """One route. The docstring of its handler is its description."""

    method: str
    path: str
    handler: Handler
    auth: Auth
    _: KW_ONLY
    body: type[Any] | None = None
    """The Struct of the request's JSON; None: no body."""
    answer: type[Any] | None = None
    """The Struct of the answer's JSON; None: another format, or none."""
    content_type: str | None = None
    """Content type of an answer in another format."""
    query: Mapping[str, Any] = field(default_factory=dict)
    """Name of a query parameter -> its JSON schema."""
    also: tuple[int, ...] = ()
    """Statuses other than 200 that carry the answer's Struct rather than an error."""
    work: bool = True
    """Whether a request counts as work. Others are answered at once, even if the server is full or draining."""
    switch: str | None = None
    """The field of ServerConfig that disables the route when it is set."""
    only_with: str | None = None
    """The field of ServerConfig without which the route is disabled."""
    streams: bool = False
    """Whether `stream: true` turns the answer into events of `stream_type`."""
    stream_type: str = "text/event-stream"
    errors: ErrorFormat | None = None
    """The format of its errors, if not the server's."""


def without_slashes(path: str) -> str:
    """Return the path without empty segments: a base URL that ends with a slash produces `//v1/models`."""
    return "/" + re.sub("/{2,}", "/", path).strip("/")


class Slashes(web.PlainResource):
    """Handles paths that no other resource matches, by matching the path without superfluous slashes."""

    def __init__(self, router: web.UrlDispatcher) -> None:
        # The router tries the resources of "/" last, whatever the path.
        super().__init__("/")
        self._router = router

    async def resolve(self, request: web.Request) -> tuple[web.UrlMappingMatchInfo | None, set[str]]:
        """Return the match, and the methods that the path supports."""
        path = without_slashes(request.rel_url.raw_path)
        if path == request.rel_url.raw_path:
            return None, set()
        tidy = request.clone(rel_url=request.rel_url.with_path(path, encoded=True, keep_query=True))
        found = await self._router.resolve(tidy)
        if isinstance(found.http_exception, web.HTTPMethodNotAllowed):
            return None, found.http_exception.allowed_methods
        return (found if found.http_exception is None else None), set()
