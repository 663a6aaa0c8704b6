"""EventLog: the events of a background response that is streamed.

A client whose connection broke can continue after the last event it has seen.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable

from asyncllm.server.http.errors import ApiError

__all__ = ["EventLog"]

MAX_BYTES = 4 * 2**20
"""Maximum size of the events of one response, in bytes."""


class EventLog:
    """The events of one response, numbered from 0. Of a very long response only the latest are kept."""

    def __init__(self) -> None:
        self._events: deque[bytes] = deque()
        self._first = 0
        """The number of the oldest event kept."""
        self._size = 0
        self._readers: set[asyncio.Event] = set()
        self.ended = False

    @property
    def size(self) -> int:
        """Bytes of all events kept."""
        return self._size

    def add(self, events: Iterable[bytes]) -> None:
        """Add events and wake the readers that wait for them."""
        for event in events:
            self._events.append(event)
            self._size += len(event)
        while self._size > MAX_BYTES:
            self._size -= len(self._events.popleft())
            self._first += 1
        self._wake()

    def end(self) -> None:
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        for reader in self._readers:
            reader.set()

    def check(self, number: int) -> None:
        """Raise ApiError 400 unless the event with this number is kept or still to come."""
        if number < self._first:
            raise ApiError(
                400,
                f"The events before number {self._first} are not kept any more. Ask for the response without stream.",
                code="invalid_value",
                param="starting_after",
            )

    async def read(self, number: int, patience: float) -> AsyncIterator[bytes]:
        """Yield the events from this number to the last, several at a time, and empty bytes if none arrives for
        `patience` seconds. Raises ApiError as `check` does if the reader is too slow."""
        changed = asyncio.Event()
        self._readers.add(changed)
        try:
            while True:
                changed.clear()
                self.check(number)
                found = [self._events[place] for place in range(number - self._first, len(self._events))]
                if found:
                    number += len(found)
                    yield b"".join(found)
                    continue
                if self.ended:
                    return
                try:
                    await asyncio.wait_for(changed.wait(), patience)
                except TimeoutError:
                    yield b""
        finally:
            self._readers.discard(changed)
