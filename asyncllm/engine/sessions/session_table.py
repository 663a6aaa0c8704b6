"""SessionTable: the open conversations of an engine by id. Conversation: one of them, with its history and pins.

A conversation holds no row, slot or block between turns. It only pins its blocks in the prefix cache. While they are
cached, the next turn is cheap; after eviction it only takes longer. A fork shares one list of token ids.
"""

from __future__ import annotations

from asyncllm.engine.cache.prefix_cache import PrefixRoot
from asyncllm.engine.loop.engine_loop import EngineLoop
from asyncllm.engine.requests.delivery import Delivery
from asyncllm.engine.schedule.sequence import Request
from asyncllm.engine.sessions.history import History, Turn, TurnInput, without_stop_word
from asyncllm.errors import InvalidParameter, SessionBusy, SessionNotFound
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.types import Response

__all__ = ["Conversation", "SessionTable"]

FIRST_OWN_ID = 2**31
"""The first id that `new` gives: above those that callers choose for conversations of their own, which begin anew with
`sequence_start=True` whatever had their id."""


class Conversation:
    """States: idle or in a turn, until closed. Written by the turn that runs, and by `close`."""

    def __init__(
        self, table: SessionTable, id: int, past: History, root: PrefixRoot, *, needs_turn: bool = False
    ) -> None:
        """`past`: the history. `root`: the root of its hash chain. `needs_turn`: end if the first turn is refused."""
        self._table = table
        self.id = id
        self.past = past
        """The history up to the last turn that ended."""
        self.response: Response | None = None
        """The answer of the last turn that ended or was stopped."""
        self.closed = False
        self._needs_turn = needs_turn
        self._root = root
        """Root of the hash chain of the last turn, whose blocks are pinned."""
        self._pinned = table.pin([], past, root) if past.token_ids else []
        self._delivery: Delivery | None = None
        """Delivery of the last turn."""
        self._request: Request | None = None
        """Request of the running turn, once its prompt is encoded."""
        self._goes_on_from = past
        """The history before the running turn, possibly a cut of `past`."""
        self._turn_input = TurnInput(None)
        """The running turn's prompt."""
        self._closes = False
        """Whether the conversation ends with the running turn."""

    @property
    def busy(self) -> bool:
        """Whether a turn is running."""
        return self._delivery is not None and not self._delivery.ended

    def check_open(self) -> None:
        """Raise SessionNotFound if the session has ended."""
        if self.closed:
            raise SessionNotFound(f"Session {self.id} has ended. Start a new one with engine.session().")

    def cut(self, step: int) -> History:
        """Return the first `step` tokens of the history. Raises InvalidParameter if there are fewer."""
        size = len(self.past.token_ids)
        if type(step) is not int or not 0 <= step <= size:
            raise InvalidParameter(
                f"step={step!r} is not a position in session {self.id}, which has {size} tokens of history.", "step"
            )
        return self.past.cut(step, self._table.tokenizer)

    async def begin_turn(self, delivery: Delivery) -> None:
        """Begin a turn, after an abandoned one has ended. Raises SessionBusy if another turn runs, SessionNotFound."""
        self.check_open()
        while self._delivery is not None and not self._delivery.ended:
            if not self._delivery.abandoned:
                raise SessionBusy(
                    f"Session {self.id} is in a turn, and takes one at a time. Wait for its answer, call "
                    f"stop_session({self.id}), or fork() the session."
                )
            await self._delivery.wait_end()
            self.check_open()
        self._delivery = delivery
        delivery.on_end = self._end_turn
        self._request = None

    def run_turn(self, request: Request, past: History, turn_input: TurnInput, *, closes: bool) -> None:
        """Set the turn's request. When it ends, its prompt and answer follow `past` in the history.

        `closes`: the session ends with the turn, unless the request never runs.
        """
        self._request, self._goes_on_from, self._closes = request, past, closes
        self._turn_input = turn_input

    def _end_turn(self) -> None:
        """Add the prompt and the generated tokens to the history, however the turn ended, unless its request was never
        queued."""
        request, self._request = self._request, None
        if self.closed:
            return
        if request is None or request.sequences[0].finish_reason is None:
            if self._needs_turn:
                self.close()
            return
        sequence, self._needs_turn = request.sequences[0], False
        answer, num_prompt = sequence.answer, sequence.num_prompt
        token_ids = without_stop_word(list(sequence.token_ids), num_prompt, answer, self._table.tokenizer)
        turn = Turn(self._turn_input, num_prompt, len(token_ids), answer.text)
        self.past = History(token_ids, [*self._goes_on_from.turns, turn], request.images)
        self.response = Response(
            token_ids=sequence.token_ids[num_prompt:],
            finish_reason=sequence.finish_reason,
            stop_reason=answer.stop_reason,
            input_token_len=num_prompt - request.history_len,
            generate_token_len=sequence.num_generated,
            history_token_len=request.history_len,
            cached_token_len=request.cached_tokens,
            num_images=len(request.images),
            image_token_len=request.image_tokens,
        )
        answer.fill(self.response)
        self._root = request.prefix_root
        self._pinned = self._table.pin(self._pinned, self.past, self._root)
        if self._closes:
            self.close()

    def rewind(self, step: int) -> None:
        """Cut the history to its first `step` tokens. Raises SessionBusy, SessionNotFound, InvalidParameter."""
        self._check_idle("rewinding")
        self.past = self.cut(step)

    def fork(self) -> Conversation:
        """Return a second conversation with the same history. Raises SessionBusy, SessionNotFound."""
        self._check_idle("forking")
        return self._table.new(self.past, self._root)

    def _check_idle(self, before: str) -> None:
        self.check_open()
        if self.busy:
            raise SessionBusy(f"Session {self.id} is in a turn. Wait for its answer, or stop it, before {before}.")

    def stop(self) -> None:
        """Stop the running turn, if any. The text generated so far stays in the history."""
        if self._delivery is not None and not self._delivery.ended:
            self._delivery.stop_asked = True
            if self._request is not None:
                self._table.stop_request(self._request)

    def close(self) -> None:
        """Stop the running turn and forget the conversation. Idempotent."""
        if not self.closed:
            self.stop()
            self.closed = True
            self._pinned = self._table.pin(self._pinned, History([], []), self._root)
            self._table.forget(self)


class SessionTable:
    """The open conversations by id. `new` never reuses an id."""

    def __init__(self, loop: EngineLoop, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._loop = loop
        self._open: dict[int, Conversation] = {}
        self._next_id = FIRST_OWN_ID

    def __len__(self) -> int:
        return len(self._open)

    def new(self, past: History | None = None, root: PrefixRoot | None = None) -> Conversation:
        """Return a new conversation: an empty one, or one with a history."""
        while self._next_id in self._open:
            self._next_id += 1
        self._next_id += 1
        return self._begin(self._next_id - 1, past, root)

    def _begin(
        self, session_id: int, past: History | None = None, root: PrefixRoot | None = None, *, needs_turn: bool = False
    ) -> Conversation:
        conversation = Conversation(
            self, session_id, past or History([], []), root or PrefixRoot(), needs_turn=needs_turn
        )
        self._open[session_id] = conversation
        return conversation

    def find(self, session_id: int) -> Conversation:
        """Return the open conversation of this id. Raises SessionNotFound."""
        conversation = self._open.get(session_id)
        if conversation is None:
            raise SessionNotFound(
                f"There is no session {session_id}: it has ended, or was never started. Begin it with "
                f"sequence_start=True, sequence_end=False."
            )
        return conversation

    def find_or_start(self, session_id: int | None, *, sequence_start: bool, step: int) -> Conversation:
        """Return the conversation selected by these parameters of `generate`. Raises InvalidParameter,
        SessionNotFound."""
        if type(session_id) is not int:
            raise InvalidParameter(
                "sequence_start=False and sequence_end=False go on with a session: pass its session_id, an int.",
                "session_id",
            )
        if not sequence_start:
            return self.find(session_id)
        if step:
            raise InvalidParameter("step continues a session: it needs sequence_start=False.", "step")
        before = self._open.get(session_id)
        if before is not None:
            before.close()
        return self._begin(session_id, needs_turn=True)

    def forget(self, conversation: Conversation) -> None:
        """Drop a conversation that has closed."""
        if self._open.get(conversation.id) is conversation:
            del self._open[conversation.id]

    def stop(self, session_id: int) -> None:
        """Stop the running turn of the conversation of this id, if there is one."""
        conversation = self._open.get(session_id)
        if conversation is not None:
            conversation.stop()

    def stop_request(self, request: Request) -> None:
        """End the request of a conversation's turn, at the engine loop's next turn."""
        self._loop.abandon(request)

    def pin(self, old: list[bytes], past: History, root: PrefixRoot) -> list[bytes]:
        """Replace a conversation's pins in the prefix cache by those of its current history. Return the new ones."""
        cache = self._loop.scheduler.prefix_cache
        if cache is None:
            return []
        new = self._loop.scheduler.sharing.keys_for_longer(past.token_ids, root, past.images)
        cache.pin(new)
        cache.unpin(old)
        return new

    def close(self) -> None:
        """Close every conversation."""
        for conversation in list(self._open.values()):
            conversation.close()
