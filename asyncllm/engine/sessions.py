"""SessionTable: the sessions of one engine by id, and their pins in the prefix cache."""

from __future__ import annotations

from asyncllm.engine.admission import Admission
from asyncllm.engine.loop import EngineLoop
from asyncllm.engine.prefix_cache import extend_hashes, root_hash
from asyncllm.engine.sequence import Request
from asyncllm.engine.session import ChatCall, Session
from asyncllm.errors import InvalidParameter, SessionNotFound
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.tokenizer import Tokenizer

__all__ = ["SessionTable"]


class SessionTable:
    """What sessions share, and who is open. An id is not given out twice."""

    def __init__(
        self,
        loop: EngineLoop,
        admission: Admission,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        chat: ChatCall,
        block_size: int,
    ) -> None:
        self.admission = admission
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.chat = chat
        """Starts a turn: `AsyncEngine.chat`."""
        self._loop = loop
        self._block_size = block_size
        self._sessions: dict[int, Session] = {}
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._sessions)

    def new(self) -> Session:
        """A new, empty conversation."""
        while self._next_id in self._sessions:
            self._next_id += 1
        self._next_id += 1
        return self._open(self._next_id - 1)

    def _open(self, session_id: int) -> Session:
        session = self._sessions[session_id] = Session(self, session_id)
        return session

    def get(self, session_id: int) -> Session | None:
        """The open session of this id."""
        return self._sessions.get(session_id)

    def find(self, session_id: int) -> Session:
        """The open session of this id. Raises SessionNotFound."""
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionNotFound(
                f"There is no session {session_id}: it has ended, or was never started. Begin it with "
                f"sequence_start=True, sequence_end=False."
            )
        return session

    def find_or_start(self, session_id: int | None, *, sequence_start: bool, step: int) -> Session:
        """The session behind the seed-era parameters. Raises InvalidParameter, SessionNotFound."""
        if type(session_id) is not int:
            raise InvalidParameter(
                "sequence_start=False and sequence_end=False go on with a session: pass its session_id, an int.",
                "session_id",
            )
        if not sequence_start:
            return self.find(session_id)
        if step:
            raise InvalidParameter("step continues a session: it needs sequence_start=False.", "step")
        before = self._sessions.get(session_id)
        if before is not None:
            before.close()
        return self._open(session_id)

    def fork(self, session: Session) -> Session:
        """A new session with the history of another."""
        copy = self.new()
        copy.copy_from(session)
        return copy

    def forget(self, session: Session) -> None:
        """The session has closed."""
        if self._sessions.get(session.id) is session:
            del self._sessions[session.id]

    def stop_request(self, request: Request) -> None:
        """End a session's running request, at the loop's next turn."""
        self._loop.abandon(request)

    def pin(self, old: list[bytes], token_ids: list[int], cache_salt: str | None) -> list[bytes]:
        """Replace a session's pins in the prefix cache by those of its present history; returns the new ones."""
        cache = self._loop.scheduler.prefix_cache
        if cache is None:
            return []
        new: list[bytes] = []
        extend_hashes(new, root_hash(cache_salt=cache_salt), token_ids, self._block_size)
        cache.pin(new)
        cache.unpin(old)
        return new

    def close(self) -> None:
        """Close every session."""
        for session in list(self._sessions.values()):
            session.close()
