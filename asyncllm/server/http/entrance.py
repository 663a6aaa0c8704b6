"""Entrance: admits requests, gives them ids, and counts those in work until the program may end.

The id of a request is its client's X-Request-Id, or a new one. It is in the log, and a header of the answer.
"""

from __future__ import annotations

import asyncio
import enum
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp import web

from asyncllm.server.http.access import Access
from asyncllm.server.http.errors import ApiError, retry_after

__all__ = [
    "REQUEST_ID",
    "REQUEST_ID_HEADER",
    "Entrance",
    "Phase",
    "add_headers",
    "asks_for_anthropic",
    "expect_nothing",
    "give_id",
]

REQUEST_ID_HEADER = "X-Request-Id"
REQUEST_ID = web.RequestKey("REQUEST_ID", str)
"""Set by `give_id`, which the applications call first."""

GIVEN_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Phase(enum.Enum):
    """SERVING -> LEAVING -> DRAINING, after the program has been asked to stop. LEAVING is left out without a delay."""

    SERVING = "serving"
    LEAVING = "leaving"
    """For `drain_delay` seconds /health/ready fails, while requests are still served."""
    DRAINING = "draining"


class Entrance:
    """Written by the requests (`in_work`), by signals and routes that stop the program (`stop`, `stop_now`), and by the
    function that serves (`phase`)."""

    def __init__(self, max_in_work: int = 0, check: Callable[[], None] | None = None) -> None:
        """`max_in_work`: maximum number of requests in work; 0: no limit. `check` raises ApiError for reasons of the
        program's own not to admit a request now."""
        self._max_in_work = max_in_work
        self._check = check
        self.phase = Phase.SERVING
        self.stop = asyncio.Event()
        """Set to make the program drain, as by SIGTERM."""
        self.stop_now = asyncio.Event()
        """Set to end at once, as by a second SIGTERM."""
        self.idle = asyncio.Event()
        """Set while no request is in work."""
        self.idle.set()
        self._in_work = 0

    @property
    def in_work(self) -> int:
        """Number of requests in work."""
        return self._in_work

    def ask_to_stop(self, may_be_second: bool) -> None:
        """Stop, or stop at once if this may be the second time that the owner asks."""
        if not self.stop.is_set():
            self.stop.set()
        elif may_be_second:
            self.stop_now.set()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Admit a request, and count it as work during the block. Raises ApiError 503 if the program drains, 429 if
        there are too many, and what `check` raises."""
        if self.phase is Phase.DRAINING:
            raise ApiError(
                503,
                "The server is shutting down. Send the request to another one, or come back later.",
                code="shutting_down",
                headers={"Connection": "close", **retry_after(5)},
            )
        if self._check is not None:
            self._check()
        if self._max_in_work and self._in_work >= self._max_in_work:
            raise ApiError(
                429,
                f"The server has {self._max_in_work} requests in work, the most that it takes. Come back later.",
                code="too_many_requests",
                headers=retry_after(1),
            )
        with self.more_work():
            yield

    @contextmanager
    def more_work(self) -> Iterator[None]:
        """Count the rest of a request, which continues without its handler, as work during the block."""
        self._in_work += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._in_work -= 1
            if not self._in_work:
                self.idle.set()


def give_id(request: web.Request) -> None:
    """Set the request's id, which is the client's own if that is valid."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    request[REQUEST_ID] = given if GIVEN_ID.fullmatch(given) else uuid.uuid4().hex


def asks_for_anthropic(request: web.Request) -> bool:
    """Return whether the request comes from a client of Anthropic's API."""
    return "anthropic-version" in request.headers


def add_headers(request: web.Request, response: web.StreamResponse, access: Access) -> None:
    """Add the headers of every answer."""
    response.headers[REQUEST_ID_HEADER] = request.get(REQUEST_ID, "")
    response.headers["X-Content-Type-Options"] = "nosniff"
    access.grant(request, response)


async def expect_nothing(request: web.Request) -> None:
    """Leave `Expect: 100-continue` to `read_body`, so that a refused request need not send its body."""
