"""ResponseStore: the responses of each key that later requests may continue, within limits.

Responses are kept in memory only: one is forgotten `session_ttl` seconds after its last use, or to make room for
others, and all are lost when the server stops.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from asyncllm.server.http.errors import ApiError
from asyncllm.server.responses.event_log import EventLog
from asyncllm.types import Message

__all__ = ["ResponseStore", "StoredResponse"]

MAX_KEPT = 4096
MAX_BYTES = 256 * 2**20
"""Maximum total size of the kept responses' conversations in bytes. Each counts in full."""


class StoredResponse(NamedTuple):
    """One response."""

    body: dict[str, Any]
    """The response as it was sent."""
    input_items: list[dict[str, Any]]
    """The input items of its request."""
    messages: list[Message]
    """The conversation with its answer, without instructions."""
    size: int
    """Estimated size of these fields in bytes."""
    events: EventLog | None = None
    """The events, if the response was streamed in the background."""

    @property
    def items(self) -> list[dict[str, Any]]:
        """The items that a later request may refer to."""
        return [*self.input_items, *self.body.get("output", ())]


class ResponseStore:
    """Responses by key and id. Belongs to one event loop."""

    def __init__(self, ttl: float) -> None:
        self._ttl = ttl
        self._kept: OrderedDict[tuple[int, str], tuple[StoredResponse, float]] = OrderedDict()
        """(key, id) -> the response and the time of its last use, least recently used first."""
        self._items: dict[tuple[int, str], dict[str, Any]] = {}
        """(key, item id) -> input or output item of a kept response."""
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, key: int, response: StoredResponse) -> None:
        """Keep a response, and forget others to make room. A response that exceeds the limit by itself is not kept."""
        now = asyncio.get_running_loop().time()
        self._kept[key, response.body["id"]] = response, now
        self._items |= {(key, item["id"]): item for item in response.items}
        self._bytes += response.size
        self._forget(now)

    def get(self, key: int, response_id: str, param: str | None = None) -> StoredResponse:
        """Return a response. Raises ApiError 404, or 400 if the id is the request's field `param`, as OpenAI does."""
        now = asyncio.get_running_loop().time()
        self._forget(now)
        found = self._kept.get((key, response_id))
        if found is None:
            raise ApiError(
                404 if param is None else 400,
                f"There is no response {response_id[:128]!r}: it was not stored, was deleted, or others needed its "
                f"room. Send the conversation itself as input.",
                code="response_not_found" if param is None else "previous_response_not_found",
                param=param,
            )
        self._kept[key, response_id] = found[0], now
        self._kept.move_to_end((key, response_id))
        return found[0]

    def resolved(self, key: int, items: str | Sequence[dict[str, Any]]) -> str | list[dict[str, Any]]:
        """Return input items with each `item_reference` replaced by its item. Raises ApiError 404."""
        if isinstance(items, str):
            return items
        self._forget(asyncio.get_running_loop().time())
        return [self._item(key, item) if item.get("type") == "item_reference" else item for item in items]

    def _item(self, key: int, reference: dict[str, Any]) -> dict[str, Any]:
        item_id = str(reference.get("id"))
        found = self._items.get((key, item_id))
        if found is None:
            raise ApiError(
                404,
                f"There is no item {item_id[:128]!r}: its response was not stored, was deleted, or others needed its "
                f"room. Send the item itself.",
                code="item_not_found",
                param="input",
            )
        return found

    def delete(self, key: int, response_id: str) -> None:
        """Delete a response. Raises ApiError 404."""
        self.get(key, response_id)
        self._drop((key, response_id))

    def _forget(self, now: float) -> None:
        while self._kept:
            oldest, (_, used) = next(iter(self._kept.items()))
            if used + self._ttl > now and len(self._kept) <= MAX_KEPT and self._bytes <= MAX_BYTES:
                return
            self._drop(oldest)

    def _drop(self, place: tuple[int, str]) -> None:
        response, _ = self._kept.pop(place)
        self._bytes -= response.size
        for item in response.items:
            if self._items.get((place[0], item["id"])) is item:
                del self._items[place[0], item["id"]]
