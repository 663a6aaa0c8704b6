"""ServerState: admits requests, and counts those in work until the program may end."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from asyncllm.server.http.errors import ApiError, retry_after

__all__ = ["Phase", "ServerState"]


class Phase(enum.Enum):
    """SERVING -> LEAVING -> DRAINING, after the program has been asked to stop. LEAVING is left out without a delay."""

    SERVING = "serving"
    LEAVING = "leaving"
    """For `drain_delay` seconds /health/ready fails, while requests are still served."""
    DRAINING = "draining"


class ServerState:
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
