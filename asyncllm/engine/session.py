"""Session: a conversation whose token history lives in host memory.

The KV blocks of a session are nothing but entries of the prefix cache that it has pinned: as long as there is room
they make the next turn cheap, and when they are evicted the next turn only takes longer. So a session holds no row,
no slot and no block between turns, and forking one copies a list of integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self, Unpack

from asyncllm.config import GenerationConfig, RequestKeywords, RequestOptions
from asyncllm.engine.admission import Admission
from asyncllm.engine.delivery import Delivery
from asyncllm.engine.generation import Generation
from asyncllm.engine.sequence import Request, Terms
from asyncllm.errors import InvalidParameter, SessionBusy, SessionNotFound, UnsupportedFeature
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.literals import Literals
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.types import Message, Response

__all__ = ["ChatCall", "Session", "SessionHost", "Turn"]


class ChatCall(Protocol):
    """`AsyncEngine.chat`."""

    def __call__(
        self,
        prompt: str | Sequence[Message],
        session: Session | None = None,
        gen_config: GenerationConfig | None = None,
        *,
        do_preprocess: bool = True,
        **options: Unpack[RequestKeywords],
    ) -> Generation: ...


class SessionHost(Protocol):
    """What a Session needs of its engine; `SessionTable` has it."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate
    admission: Admission
    chat: ChatCall

    def stop_request(self, request: Request) -> None: ...

    def pin(self, old: list[bytes], token_ids: list[int], cache_salt: str | None) -> list[bytes]: ...

    def fork(self, session: Session) -> Session: ...

    def forget(self, session: Session) -> None: ...


class Turn:
    """One exchange: token positions within the session's history, and the texts they stand for."""

    __slots__ = ("answer", "answer_start", "end", "messages", "prompt")

    def __init__(
        self, prompt: object, messages: list[Message] | None, answer_start: int, end: int, answer: str
    ) -> None:
        self.prompt = prompt
        """What the user passed."""
        self.messages = messages
        """The same as messages; None for a prompt without chat template."""
        self.answer_start = answer_start
        self.end = end
        self.answer = answer


class Session:
    """A conversation. States: idle or in a turn, until closed. Written by the turn that runs, and by `close`."""

    def __init__(self, host: SessionHost, id: int) -> None:
        self._host = host
        self.id = id
        self.token_ids: list[int] = []
        """The whole conversation so far: prompts, template and answers."""
        self.turns: list[Turn] = []
        self.response: Response | None = None
        """The last turn's answer, when it ran to its end or was stopped."""
        self.closed = False
        self._pinned: list[bytes] = []
        self._cache_salt: str | None = None
        """Of the last turn, whose blocks are pinned."""
        self._delivery: Delivery | None = None
        """Of the last turn."""
        self._request: Request | None = None
        """Of the running turn, once its prompt is encoded."""
        self._before: tuple[list[int], list[Turn]] = [], []
        """History before the running turn, which a turn that is refused leaves as it was."""
        self._prompt: object = None
        self._new_messages: list[Message] | None = None
        """The running turn's prompt, as in `Turn`."""
        self._stop_asked = False
        """The running turn shall end as soon as its request is there."""

    @property
    def history(self) -> list[tuple[object, str]]:
        """(prompt, answer) of each turn."""
        return [(turn.prompt, turn.answer) for turn in self.turns]

    @property
    def step(self) -> int:
        """Tokens in the history: the position at which the next turn starts."""
        return len(self.token_ids)

    @property
    def busy(self) -> bool:
        """Whether a turn is running."""
        return self._delivery is not None and not self._delivery.ended

    def chat(
        self,
        prompt: str | Sequence[Message],
        gen_config: GenerationConfig | None = None,
        *,
        do_preprocess: bool = True,
        **options: Unpack[RequestKeywords],
    ) -> Generation:
        """The next turn. Raises SessionBusy, SessionNotFound at the first await."""
        return self._host.chat(prompt, self, gen_config, do_preprocess=do_preprocess, **options)

    def fork(self) -> Session:
        """A second conversation with the same history; both go on independently and share their blocks."""
        self.check_open()
        if self.busy:
            raise SessionBusy(f"Session {self.id} is in a turn. Wait for its answer, or stop it, before forking.")
        return self._host.fork(self)

    def stop(self) -> None:
        """Stop the running turn, if any; what was generated so far stays in the history."""
        if self.busy:
            self._stop_asked = True
            if self._request is not None:
                self._host.stop_request(self._request)

    def close(self) -> None:
        """Stop the running turn and forget the conversation. Idempotent."""
        if not self.closed:
            self.stop()
            self.closed = True
            self._pinned = self._host.pin(self._pinned, [], None)
            self._host.forget(self)

    def check_open(self) -> None:
        """Raise SessionNotFound if the session has ended."""
        if self.closed:
            raise SessionNotFound(f"Session {self.id} has ended. Start a new one with engine.session().")

    def copy_from(self, other: Session) -> None:
        """Take over another session's history; for `fork`."""
        self.token_ids = list(other.token_ids)
        self.turns = list(other.turns)
        self._cache_salt = other._cache_salt
        self._pinned = self._host.pin([], self.token_ids, self._cache_salt)

    def rewind(self, step: int) -> None:
        """Cut the history to its first `step` tokens. Raises InvalidParameter when there are fewer."""
        if type(step) is not int or not 0 <= step <= len(self.token_ids):
            raise InvalidParameter(
                f"step={step!r} is not a position in session {self.id}, which has {len(self.token_ids)} tokens "
                f"of history.",
                "step",
            )
        if step == len(self.token_ids):
            return
        self.token_ids = self.token_ids[:step]
        start = 0
        for index, turn in enumerate(self.turns):
            if turn.end > step:
                self.turns = self.turns[:index]
                if step > start:
                    # A turn cut in its middle: what is left of the answer is its answer.
                    answer_start = min(turn.answer_start, step)
                    answer = self._host.tokenizer.decode(self.token_ids[answer_start:])
                    self.turns.append(Turn(turn.prompt, turn.messages, answer_start, step, answer))
                break
            start = turn.end

    async def prepare(
        self,
        delivery: Delivery,
        prompt: str | Sequence[Message] | None,
        config: GenerationConfig,
        *,
        step: int,
        do_preprocess: bool,
        input_ids: Sequence[int] | None,
        options: RequestOptions,
        terms: Terms,
    ) -> Request:
        """The request of the next turn, after the first `step` tokens of the history, or all of them if that is 0.

        Raises InvalidRequest, SessionBusy and SessionNotFound; the conversation is then as it was.
        """
        for name in ("add_generation_prompt", "continue_final_message"):
            if getattr(options, name) is not None:
                raise UnsupportedFeature(
                    f"{name} is not for sessions, where each turn's answer is a message of its own. Leave it out.", name
                )
        if config.n != 1:
            raise InvalidParameter(
                f"n={config.n} in a session: a conversation goes on from one answer. Use n=1, or fork() the session.",
                "n",
            )
        await self._begin(delivery)
        admission = self._host.admission
        self._before = self.token_ids, self.turns
        try:
            if step:
                self.rewind(step)
            if input_ids is not None:
                new = admission.check_token_ids(input_ids)
                token_ids = self.token_ids + new
                self._prompt = self._host.tokenizer.decode(new, skip_special_tokens=False)
                self._new_messages = None
            else:
                token_ids = await self._encode(prompt, options, do_preprocess=do_preprocess)
                assert prompt is not None
                self._prompt, self._new_messages = prompt, as_messages(prompt) if do_preprocess else None
            history_len = min(self.step, len(token_ids))
            request = admission.build(
                token_ids, config, delivery, session_id=self.id, history_len=history_len, terms=terms
            )
        except BaseException:
            self.token_ids, self.turns = self._before
            raise
        self._request = request
        if self._stop_asked:
            self._host.stop_request(request)
        return request

    async def _begin(self, delivery: Delivery) -> None:
        """Take the session for a turn. Raises SessionBusy unless the turn before has ended or was abandoned."""
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
        self._request = None
        self._stop_asked = False

    async def _encode(
        self, prompt: str | Sequence[Message] | None, options: RequestOptions, *, do_preprocess: bool
    ) -> list[int]:
        """The token ids of the whole conversation with this prompt at its end."""
        admission, template = self._host.admission, self._host.chat_template
        if not self.turns or not do_preprocess:
            rendered = admission.render(prompt, do_preprocess=do_preprocess, options=options)
            return self.token_ids + await admission.encode(rendered, add_bos=not self.token_ids)
        admission.render(prompt, do_preprocess=True, options=options)
        assert prompt is not None
        literals = Literals(self._host.tokenizer)
        before, last, new = literals.mark(self._messages()), self.turns[-1], literals.mark(as_messages(prompt))
        variables = literals.mark_values(options.chat_template_kwargs)
        tail = template.continuation(before, last.answer, new, variables)
        if tail is None:
            conversation = [*before, {"role": "assistant", "content": last.answer}, *new]
            text = template.render(conversation, variables=variables)
            return await admission.encode(admission.restored(literals, text))
        added = await admission.encode(admission.restored(literals, tail), add_bos=False)
        history = self.token_ids
        if history and history[-1] in self._host.tokenizer.eos_token_ids:
            # How a turn ends is for the template to say, usually by the same token.
            history = history[:-1]
        return history + added

    def _messages(self) -> list[Message]:
        """The conversation up to, and without, the last answer."""
        messages: list[Message] = []
        for index, turn in enumerate(self.turns):
            messages.extend(turn.messages or [{"role": "user", "content": str(turn.prompt)}])
            if index < len(self.turns) - 1:
                messages.append({"role": "assistant", "content": turn.answer})
        return messages

    def record(self) -> bool:
        """The running turn has ended, by whatever way: its prompt and what was generated become history.

        A turn that was refused, or left before it was in the queue, is none: False.
        """
        request, self._request = self._request, None
        if request is None or self.closed:
            return False
        sequence = request.sequences[0]
        if sequence.finish_reason is None:
            self.token_ids, self.turns = self._before
            return False
        answer = sequence.answer
        self.token_ids = list(sequence.token_ids)
        self._trim(sequence.num_prompt, answer.text, stopped_by_text=isinstance(answer.stop_reason, str))
        turn = Turn(self._prompt, self._new_messages, sequence.num_prompt, len(self.token_ids), answer.text)
        self.turns = [*self.turns, turn]
        self.response = Response(
            text=answer.text,
            token_ids=sequence.token_ids[sequence.num_prompt :],
            finish_reason=sequence.finish_reason,
            stop_reason=answer.stop_reason,
            input_token_len=sequence.num_prompt - request.history_len,
            generate_token_len=sequence.num_generated,
            history_token_len=request.history_len,
            cached_token_len=request.cached_tokens,
        )
        self._cache_salt = request.terms.cache_salt
        self._pinned = self._host.pin(self._pinned, self.token_ids, self._cache_salt)
        return True

    def _trim(self, start: int, text: str, *, stopped_by_text: bool) -> None:
        """Leave out tokens of a stop word that ended the answer: it is not part of the conversation."""
        if not stopped_by_text:
            return
        end = len(self.token_ids)
        while end > start and not text.startswith(self._host.tokenizer.decode(self.token_ids[start:end])):
            end -= 1
        kept = self._host.tokenizer.decode(self.token_ids[start:end])
        rest = self._host.tokenizer.encode(text[len(kept) :], add_bos=False) if len(kept) < len(text) else []
        self.token_ids[end:] = rest

    async def __aenter__(self) -> Self:
        self.check_open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def as_messages(prompt: str | Sequence[Message]) -> list[Message]:
    """A prompt as chat messages."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
