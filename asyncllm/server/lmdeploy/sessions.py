"""SessionStore: the conversations that /v1/chat/interactive keeps between requests, within limits.

A conversation is forgotten after `session_ttl` idle seconds, or to make room: `max_sessions` limits the number of
conversations and `max_session_tokens` the total length of their histories. To make room, the key that uses most of the
scarce resource loses its least recently used conversation, so that a client with many or long conversations loses its
own. If the engine fails, all conversations are lost. The next request of a forgotten conversation gets 410 once, so
that no client mistakes a new conversation for a continued one; the request after that begins a new conversation.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from asyncllm.config import ServerConfig
from asyncllm.engine.requests.generation import Session
from asyncllm.server.http.errors import ApiError, retry_after
from asyncllm.server.supervisor import Supervisor

__all__ = ["SessionStore", "StoredSession"]

MAX_FORGOTTEN_IDS = 1024
"""Maximum number of forgotten ids per key whose next request gets 410. Older ones are not remembered."""


class StoredSession:
    """One conversation."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.in_work = 0
        """Requests that currently use it."""
        self.last_used = 0.0
        """When it was last used, on the event loop's clock."""

    @property
    def idle(self) -> bool:
        return not self.in_work and not self.session.busy


class _Owner:
    """The conversations of one key."""

    def __init__(self) -> None:
        self.stored: OrderedDict[int, StoredSession] = OrderedDict()
        """The client's session id -> conversation, least recently used first."""
        self.forgotten: OrderedDict[int, None] = OrderedDict()
        """Forgotten ids whose client has not received a 410 yet, oldest first."""

    def conversations(self) -> int:
        return len(self.stored)

    def tokens(self) -> int:
        """The total number of tokens of all histories."""
        return sum(stored.session.step for stored in self.stored.values())

    def forget(self, session_id: int) -> None:
        self.stored.pop(session_id).session.close()
        self.forgotten[session_id] = None
        if len(self.forgotten) > MAX_FORGOTTEN_IDS:
            self.forgotten.popitem(last=False)


class SessionStore:
    """Conversations by key and session id, so that two keys can use the same id. Written by the route's handler."""

    def __init__(self, supervisor: Supervisor, config: ServerConfig) -> None:
        self._supervisor = supervisor
        self._config = config
        supervisor.on_replaced.append(self._forget_all)
        self._owners: dict[int, _Owner] = {}

    def __len__(self) -> int:
        return sum(len(owner.stored) for owner in self._owners.values())

    def get(self, key: int, session_id: int) -> StoredSession | None:
        """Return the conversation, or None if it is not stored."""
        owner = self._owners.get(key)
        return owner.stored.get(session_id) if owner is not None else None

    def enter(self, key: int, session_id: int, *, start: bool) -> StoredSession | None:
        """Return the conversation, which `leave` gives back. If there is none, begin one if `start`, otherwise return
        None.

        Raises ApiError 410 if it has been forgotten, 429 if there is no room for a new one.
        """
        now = asyncio.get_running_loop().time()
        self._forget_expired(now)
        owner = self._owners.setdefault(key, _Owner())
        if session_id in owner.forgotten:
            del owner.forgotten[session_id]
            raise ApiError(
                410,
                f"Session {session_id} is forgotten: it was idle for {self._config.session_ttl:g} seconds, others "
                f"needed its room, or the engine was restarted. Send the request again to begin a new conversation.",
                code="session_expired",
                param="session_id",
                headers={"x-should-retry": "false"},
            )
        stored = owner.stored.get(session_id)
        if stored is None:
            if not start:
                return None
            self._make_room()
            stored = owner.stored[session_id] = StoredSession(self._supervisor.engine.session())
        stored.in_work += 1
        stored.last_used = now
        owner.stored.move_to_end(session_id)
        return stored

    def leave(self, key: int, session_id: int, stored: StoredSession, *, end: bool) -> None:
        """Give the conversation back at the end of a request. Forget it if `end`, or if it never had a turn."""
        stored.in_work -= 1
        stored.last_used = asyncio.get_running_loop().time()
        owner = self._owners[key]
        known = owner.stored.get(session_id) is stored
        empty = stored.idle and not stored.session.turns
        if end or empty or stored.session.closed:
            stored.session.close()
            if known:
                del owner.stored[session_id]
        elif known:
            owner.stored.move_to_end(session_id)

    def end(self, key: int, session_id: int) -> int:
        """Stop and forget the conversation, if it is stored, and return its number of tokens."""
        owner = self._owners.get(key)
        if owner is None:
            return 0
        owner.forgotten.pop(session_id, None)
        stored = owner.stored.pop(session_id, None)
        if stored is None:
            return 0
        stored.session.close()
        return stored.session.step

    def _forget_all(self) -> None:
        """Forget all conversations, since their engine is gone."""
        for owner in self._owners.values():
            for session_id in list(owner.stored):
                owner.forget(session_id)

    def _forget_expired(self, now: float) -> None:
        for owner in self._owners.values():
            for session_id, stored in list(owner.stored.items()):
                if stored.last_used + self._config.session_ttl > now:
                    break
                if stored.idle:
                    owner.forget(session_id)

    def _make_room(self) -> None:
        """Forget others until a new conversation fits. Raises ApiError 429 if all of them are in a turn."""
        while (short := self._short_of()) is not None:
            owners = sorted(self._owners.values(), key=short, reverse=True)
            idle = (
                (owner, session_id) for owner in owners for session_id, stored in owner.stored.items() if stored.idle
            )
            victim = next(idle, None)
            if victim is None:
                raise ApiError(
                    429,
                    f"The server keeps {len(self)} sessions, its maximum (max_sessions, max_session_tokens), "
                    f"and all of them are in a turn. Come back later.",
                    code="too_many_sessions",
                    headers=retry_after(1),
                )
            owner, session_id = victim
            owner.forget(session_id)

    def _short_of(self) -> Callable[[_Owner], int] | None:
        """Return a function that tells how much a key uses of the resource that a new conversation lacks, or None if
        there is room."""
        if sum(map(_Owner.tokens, self._owners.values())) >= self._config.max_session_tokens:
            return _Owner.tokens
        return _Owner.conversations if len(self) >= self._config.max_sessions else None
