"""Request: what was asked. Sequence: one decoding row of it, of which `n` > 1 gives several."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence as Items
from typing import Any, NamedTuple

from asyncllm.engine.cache.block_groups import BlockTable
from asyncllm.engine.cache.prefix_cache import PrefixRoot
from asyncllm.engine.requests.delivery import Answer, Delivery
from asyncllm.engine.schedule.adapter_slots import Adapter
from asyncllm.engine.schedule.quality_of_service import User
from asyncllm.errors import DeadlineExceeded
from asyncllm.protocol import PrefillRow, PromptImage, SamplingParams, SlotStart, StepOutput, TokenLogprobs
from asyncllm.types import FinishReason, Pooled, RequestRecord

__all__ = ["ORDINARY", "Request", "RequestPolicy", "Sequence", "SequenceState"]

_LEAST_OF_IMAGE = 128
"""Tokens that are computed in the step that encodes an image, however long that takes."""


class RequestPolicy(NamedTuple):
    """How a request stands among the others: its RequestOptions, checked by `InputProcessor`."""

    priority: int = 0
    """Lower is served earlier."""
    user: User | None = None
    """The user whose quota it counts for; None: there is no quality of service."""
    deadline: float | None = None
    """In the event loop's time: when the request ends, answered or not."""
    cache_salt: str | None = None
    """Only requests of equal salt share cached prefixes."""


ORDINARY = RequestPolicy()


class RequestTimes:
    """When a request got how far, in seconds of `time.monotonic`; an event loop's own may be as coarse as 1 ms.

    Observers are told at its end, in a `RequestRecord`."""

    __slots__ = ("admitted", "arrived", "prefilled", "queued")

    def __init__(self) -> None:
        self.arrived = time.monotonic()
        """When it was first awaited, before its prompt was encoded. Written by the generation."""
        self.queued = self.arrived
        """When it entered the queue. Written by the loop, as are the rest."""
        self.admitted: float | None = None
        """When its first sequence first got a row."""
        self.prefilled: float | None = None
        """When the step that computed the last of its prompt was read, which gave the first token if one was wanted."""


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
    """One call, checked. Written once by `InputProcessor`, except for the fields marked otherwise."""

    __slots__ = (
        "adapter",
        "block_hashes",
        "cached_tokens",
        "delivery",
        "history_len",
        "id",
        "image_tokens",
        "images",
        "logits",
        "named_stop_ids",
        "output_logits",
        "policy",
        "pooled",
        "pooling",
        "prompt_ids",
        "prompt_logprobs",
        "prompt_logprobs_asked",
        "reuses_prefix",
        "sequences",
        "session_id",
        "siblings_queued",
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
        policy: RequestPolicy = ORDINARY,
        pooling: Pooled | None = None,
        images: Items[PromptImage] = (),
        adapter: Adapter | None = None,
    ) -> None:
        self.id = id
        """Rises in the order of arrival."""
        self.policy = policy
        self.adapter = adapter
        """The LoRA adapter that its tokens are computed with."""
        self.times = RequestTimes()
        self.prompt_ids = prompt_ids
        self.images = images
        """Those of the prompt, in order. They stay until the request ends, as a preempted prompt is computed again."""
        self.image_tokens = sum(image.num_features for image in images)
        """Tokens of the prompt that stand for them."""
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

    def let_go(self) -> None:
        """Part from its sequences, which refer to it: it has ended, or was refused, and all has been said of them."""
        self.sequences = []

    def take_prompt_logprobs(self, position: int, scores: list[TokenLogprobs]) -> None:
        """Take in those of the tokens after `position`. After a preemption, chunks may overlap those before it, and go
        on into the answer."""
        known = self.prompt_logprobs
        first, end = len(known) - position, len(self.prompt_ids) - 1 - position
        known.extend(scores[max(0, first) : max(0, end)])

    def take_hidden(self, row: PrefillRow, output: StepOutput) -> None:
        """Take in the logits and the sum of hidden states that a chunk of the prompt gave."""
        if row.output_logits and row.slot in output.logits:
            self.logits.append(output.logits[row.slot])
        if row.pooling is not None:
            chunk, before = output.pooled[row.slot], self.pooled
            self.pooled = chunk if before is None else [a + b for a, b in zip(before, chunk, strict=True)]

    def forget_hidden(self) -> None:
        """Forget what its prompt's hidden states gave. Logits and embeddings are asked for alone, without an answer:
        the prompt is all that is computed again."""
        self.logits.clear()
        self.pooled = None

    @property
    def prefix_root(self) -> PrefixRoot:
        """What its prompt's keys stand for besides tokens, but for what follows from the prompt's length."""
        adapter = None if self.adapter is None else self.adapter.number
        return PrefixRoot(cache_salt=self.policy.cache_salt, adapter=adapter)

    @property
    def finished(self) -> bool:
        return all(sequence.state is SequenceState.FINISHED for sequence in self.sequences)

    @property
    def prompt_is_scored(self) -> bool:
        """Whether all log-probabilities of the prompt that were asked for are there."""
        return self.prompt_logprobs_asked is None or len(self.prompt_logprobs) >= len(self.prompt_ids) - 1

    def deadline_exceeded(self) -> DeadlineExceeded:
        """Return the error that ends it when its time is over."""
        done = self.sequences[0].num_generated
        so_far = f"{done} tokens of its answer were there" if done else "it had no token yet"
        return DeadlineExceeded(
            f"The request's timeout is over: {so_far}. Allow more time, ask for fewer tokens, or lower its priority "
            "value."
        )

    def record(self, unfinished: FinishReason) -> RequestRecord:
        """Return what observers are told at its end, which is now; `unfinished` is the reason of unfinished answers."""
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
        "adapter_slot",
        "ahead",
        "answer",
        "capacity",
        "cause",
        "committed",
        "error",
        "finish_reason",
        "forced",
        "hashes",
        "host_step",
        "host_tables",
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
        "tables",
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
        self.ahead = 0
        """How many of these are known already, as they are forced."""
        self.forced: Items[int] = ()
        """The last of `token_ids`, if no step draws them: the row that is sampled next tells the device."""
        self.remaining = max_new_tokens
        """Tokens that may still be scheduled."""
        self.tables: list[BlockTable] = []
        """Its blocks, by block group; empty while it has no row."""
        self.capacity = 0
        """Tokens that have room in them, of all groups."""
        self.host_tables: list[BlockTable] = []
        """Blocks in host memory that hold what is needed of the first `num_computed` tokens, when state is SWAPPED."""
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
        self.adapter_slot = -1
        """Where its adapter is on the device while it has a row."""
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
    def blocks(self) -> list[int]:
        """The blocks of all groups."""
        return [block for table in self.tables for block in table.blocks]

    @property
    def host_blocks(self) -> list[int]:
        """The blocks in host memory of all groups."""
        return [block for table in self.host_tables for block in table.blocks]

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    def slot_start(self) -> SlotStart:
        """Return what its new slot begins with."""
        return SlotStart(
            slot=self.slot,
            params=self.params,
            num_prompt=self.num_prompt,
            num_tokens=len(self.token_ids),
            token_ids=list(self.token_ids) if self.params.needs_history else [],
            position_shift=sum(image.shift for image in self.request.images),
            adapter=0 if self.request.adapter is None else self.request.adapter.number,
            adapter_slot=self.adapter_slot,
        )

    def joint_around(self, end: int) -> tuple[int, int] | None:
        """Return from where to where tokens see each other that a chunk would cut which ends at `end`; None: there are
        none."""
        return next((span for image in self.request.images if (span := image.joint_around(end)) is not None), None)

    def uncut(self, length: int, most: int) -> int:
        """Return how many known tokens a chunk of about `length` has, so that it cuts no tokens that see each other:
        fewer, or where they come first more, up to `most`; 0 if that is not enough."""
        span = self.joint_around(self.num_computed + length)
        if span is None:
            return length
        start, stop = (each - self.num_computed for each in span)
        return start if start > 0 else stop if stop <= most else 0

    def within(self, length: int, budget: int, *, first: bool) -> tuple[int, int]:
        """Return how many of the next `length` known tokens the budget is enough for if it is to pay for encoding the
        images that begin among them, and what that takes of it.

        An image for which it is not enough begins another step, unless this one has nothing else (`first`): then some
        tokens of it are computed all the same.
        """
        work, start = 0, self.num_computed
        for position, own in (each for image in self.request.images for each in image.encodings()):
            ahead = position - start
            if not 0 <= ahead < length:
                continue
            if ahead + work + own >= budget and (ahead or work or not first):
                return ahead, work
            work += own
            length = min(length, budget - work if ahead + work < budget else _LEAST_OF_IMAGE)
        return length, work

    @property
    def next_end(self) -> int:
        """Where the shortest chunk ends that may come next."""
        span = self.joint_around(self.num_computed + 1)
        return self.num_computed + 1 if span is None else span[1]

    def next_chunk(self, length: int) -> PrefillRow:
        """Return the row that computes its next `length` known tokens."""
        known, start, request = len(self.token_ids), self.num_computed, self.request
        end = start + length
        sample = end == known and self.remaining > 0
        wants_logprobs = self.index == 0 and not request.prompt_is_scored
        return PrefillRow(
            slot=self.slot,
            tokens=self.token_ids[start:end],
            position=start,
            sample=sample,
            prompt_logprobs=request.prompt_logprobs_asked if wants_logprobs else None,
            next_token=self.token_ids[end] if wants_logprobs and end < known else None,
            output_logits=request.output_logits,
            pooling=request.pooling if end == known or request.pooling == "mean" else None,
            images=request.images,
            forced=self.forced if sample else (),
        )

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request.id}.{self.index} {self.state.value} slot={self.slot} "
            f"tokens={len(self.token_ids)} computed={self.num_computed} pending={self.pending} "
            f"blocks={self.tables}>"
        )
