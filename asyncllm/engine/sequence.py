"""Request: what was asked. Sequence: one decoding row of it, of which `n` > 1 gives several."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence as Items
from typing import Any, NamedTuple

from asyncllm.batch import SamplingParams, TokenLogprobs
from asyncllm.engine.delivery import Answer, Delivery
from asyncllm.engine.quality_of_service import User
from asyncllm.engine.record import RequestRecord, RequestTimes
from asyncllm.errors import DeadlineExceeded
from asyncllm.types import FinishReason, Pooling

__all__ = ["ORDINARY", "Request", "Sequence", "SequenceState", "Terms"]


class Terms(NamedTuple):
    """How a request stands among the others: its RequestOptions, checked by `engine.admission`."""

    priority: int = 0
    """Lower is served earlier."""
    user: User | None = None
    """Whom it counts for; None: there is no quality of service."""
    deadline: float | None = None
    """In the event loop's time: when the request ends, answered or not."""
    cache_salt: str | None = None
    """Only requests of equal salt share cached prefixes."""


ORDINARY = Terms()


class SequenceState(enum.Enum):
    """WAITING -> PREFILL -> DECODE -> FINISHED, which any state may come to.

    Preemption: PREFILL or DECODE -> WAITING, to be computed again, or -> SWAPPED -> PREFILL, where it left off.
    """

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    SWAPPED = "swapped"
    FINISHED = "finished"


class Request:
    """One admitted call of `generate`. Written once by `engine.admission`, except for the fields marked otherwise."""

    __slots__ = (
        "block_hashes",
        "cached_tokens",
        "delivery",
        "history_len",
        "id",
        "logits",
        "named_stop_ids",
        "output_logits",
        "pooled",
        "pooling",
        "prompt_ids",
        "prompt_logprobs",
        "prompt_logprobs_asked",
        "reuses_prefix",
        "sequences",
        "session_id",
        "siblings_queued",
        "terms",
        "times",
    )

    def __init__(
        self,
        *,
        id: int,
        prompt_ids: list[int],
        params: Items[SamplingParams],
        stop_ids: frozenset[int],
        named_stop_ids: frozenset[int] = frozenset(),
        max_new_tokens: int,
        delivery: Delivery,
        answers: Items[Answer],
        session_id: int | None = None,
        history_len: int = 0,
        prompt_logprobs: int | None = None,
        output_logits: bool = False,
        terms: Terms = ORDINARY,
        pooling: Pooling | None = None,
    ) -> None:
        self.id = id
        """Rises in the order of arrival."""
        self.terms = terms
        self.times = RequestTimes()
        self.prompt_ids = prompt_ids
        self.named_stop_ids = named_stop_ids
        """Those of the stop ids that the caller named, reported as `stop_reason`."""
        self.session_id = session_id
        """The caller's label, for `stop_session`."""
        self.history_len = history_len
        """Tokens of `prompt_ids` that earlier turns of the session brought in."""
        self.prompt_logprobs_asked = prompt_logprobs
        self.output_logits = output_logits
        self.pooling = pooling
        self.reuses_prefix = prompt_logprobs is None and not output_logits and pooling != "mean"
        """False when every position of the prompt must be computed again, because its hidden states are needed."""
        self.delivery = delivery
        self.sequences = [
            Sequence(self, index, params[index], stop_ids, max_new_tokens, answers[index])
            for index in range(len(params))
        ]
        self.siblings_queued = False
        """Whether the sequences after the first have entered the queue. Written by the scheduler."""
        self.block_hashes: list[bytes] = []
        """Hash chain over the prompt's full blocks. Written by the scheduler when the request is added."""
        self.cached_tokens = 0
        """Prompt tokens found in the prefix cache. Written by the scheduler at first admission."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        """Written by the scheduler, chunk by chunk."""
        self.logits: list[Any] = []
        """Written by the scheduler, chunk by chunk."""
        self.pooled: Items[float] | None = None
        """Sum of the hidden states that `pooling` asks for. Written by the scheduler, chunk by chunk."""

    @property
    def finished(self) -> bool:
        return all(sequence.state is SequenceState.FINISHED for sequence in self.sequences)

    @property
    def prompt_is_scored(self) -> bool:
        """Whether all log-probabilities of the prompt that were asked for are there."""
        return self.prompt_logprobs_asked is None or len(self.prompt_logprobs) >= len(self.prompt_ids) - 1

    def deadline_exceeded(self) -> DeadlineExceeded:
        """What it ends with when its time is over."""
        done = self.sequences[0].num_generated
        so_far = f"{done} tokens of its answer were there" if done else "it had no token yet"
        return DeadlineExceeded(
            f"The request's timeout is over: {so_far}. Allow more time, ask for fewer tokens, or lower its priority "
            "value."
        )

    def record(self, unfinished: FinishReason) -> RequestRecord:
        """What observers are told when it ends, which is now; `unfinished` is why answers ended that had no end."""
        return RequestRecord(
            prompt_tokens=len(self.prompt_ids),
            cached_tokens=self.cached_tokens,
            generated_tokens=sum(sequence.num_generated for sequence in self.sequences),
            longest_answer=max(sequence.num_generated for sequence in self.sequences),
            finish_reasons=tuple(sequence.finish_reason or unfinished for sequence in self.sequences),
            arrived=self.times.arrived,
            queued=self.times.queued,
            admitted=self.times.admitted,
            prefilled=self.times.prefilled,
            ended=time.monotonic(),
        )


class Sequence:
    """One decoding row. Only the scheduler writes its fields, except for `answer`, which delivery advances, and
    `keeps_row`."""

    __slots__ = (
        "answer",
        "blocks",
        "cause",
        "committed",
        "error",
        "finish_reason",
        "hashes",
        "host_blocks",
        "host_step",
        "index",
        "keeps_row",
        "last_step",
        "logprobs",
        "num_computed",
        "num_prompt",
        "params",
        "pending",
        "remaining",
        "request",
        "slot",
        "state",
        "stop_ids",
        "token_ids",
    )

    def __init__(
        self,
        request: Request,
        index: int,
        params: SamplingParams,
        stop_ids: frozenset[int],
        max_new_tokens: int,
        answer: Answer,
    ) -> None:
        self.request = request
        self.index = index
        """Which of the `n` answers this is."""
        self.params = params
        self.stop_ids = stop_ids
        self.answer = answer
        self.state = SequenceState.WAITING
        self.token_ids = list(request.prompt_ids)
        """The prompt and every generated token that the host has read."""
        self.num_prompt = len(request.prompt_ids)
        self.num_computed = 0
        """Tokens whose K and V are written, counting the steps in flight."""
        self.pending = 0
        """Tokens sampled by steps in flight, not read yet."""
        self.remaining = max_new_tokens
        """Tokens that may still be scheduled."""
        self.blocks: list[int] = []
        self.host_blocks: list[int] = []
        """Blocks in host memory that hold the first `num_computed` tokens, when state is SWAPPED."""
        self.host_step = -1
        """The step that copies to them: they return to the pool when it has been read, at the earliest."""
        self.hashes: list[bytes] = []
        """Hash chain over the full blocks of `token_ids`, as far as it is known."""
        self.committed = 0
        """Leading blocks that the prefix cache has been offered."""
        self.keeps_row = False
        """Whether it was admitted for having waited so long, so that it counts as of the highest class. Written by the
        waiting queue."""
        self.slot = -1
        self.last_step = -1
        """The newest step that may write to the blocks: they return to the pool when it has been read."""
        self.logprobs: TokenLogprobs | None = None
        """Of the newest token."""
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        """Why it ended, when finish_reason is 'error'."""
        self.cause: BaseException | None = None
        """What was raised, if its step failed as a whole."""

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request.id}.{self.index} {self.state.value} slot={self.slot} "
            f"tokens={len(self.token_ids)} computed={self.num_computed} pending={self.pending} "
            f"blocks={self.blocks}>"
        )
