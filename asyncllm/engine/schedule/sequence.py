"""The scheduler's records: a Request is one call, a Sequence one of its `n` answers, a StepInFlight an unread step."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence as Items
from typing import Any, NamedTuple

from asyncllm.engine.cache.block_groups import BlockTable
from asyncllm.engine.cache.prefix_cache import PrefixRoot
from asyncllm.engine.requests.answer import Answer
from asyncllm.engine.requests.delivery import Delivery
from asyncllm.engine.schedule.adapter_slots import Adapter
from asyncllm.engine.schedule.quality_of_service import User
from asyncllm.errors import DeadlineExceeded
from asyncllm.prompt_image import PromptImage
from asyncllm.protocol import PrefillRow, SamplingParams, SlotStart, StepOutput, SwapPlan, TokenLogprobs
from asyncllm.types import FinishReason, Pooled, RequestRecord

__all__ = ["ORDINARY", "Request", "RequestPolicy", "Sequence", "SequenceState", "StepInFlight"]


class RequestPolicy(NamedTuple):
    """How a request ranks among others: its RequestOptions, checked by `InputProcessor`."""

    priority: int = 0
    """Lower values are served earlier."""
    user: User | None = None
    """The user whose quota the request is charged to; None without quality of service."""
    deadline: float | None = None
    """Event-loop time at which the request ends, answered or not."""
    cache_salt: str | None = None
    """Only requests with equal salt share cached prefixes."""


ORDINARY = RequestPolicy()


class RequestTimes:
    """Timestamps of a request's progress, in seconds of `time.monotonic`; observers get them in a `RequestRecord`. The
    event loop's own clock may be as coarse as 1 ms."""

    __slots__ = ("admitted", "arrived", "prefilled", "queued")

    def __init__(self) -> None:
        self.arrived = time.monotonic()
        """First await, before the prompt is encoded. Written by the Generation."""
        self.queued = self.arrived
        """Entry into the queue. Written by the engine loop, like the next two."""
        self.admitted: float | None = None
        """First admission of the first sequence."""
        self.prefilled: float | None = None
        """When the step that computed the end of the prompt, and sampled the first token if one was wanted, was
        read."""


class SequenceState(enum.Enum):
    """WAITING -> PREFILL -> DECODE -> FINISHED. A sequence can finish in any state.

    Preemption: PREFILL or DECODE -> WAITING, to be recomputed, or -> SWAPPED -> PREFILL, to resume from the copy.
    """

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    SWAPPED = "swapped"
    FINISHED = "finished"


class Request:
    """One validated call. Written once by `InputProcessor`, except for the fields marked otherwise."""

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
        """Sequence number in order of arrival."""
        self.policy = policy
        self.adapter = adapter
        """The LoRA adapter of all its tokens."""
        self.times = RequestTimes()
        self.prompt_ids = prompt_ids
        self.images = images
        """Images of the prompt, in order. Kept to the end, because a preempted prompt is recomputed."""
        self.image_tokens = sum(image.num_features for image in images if not image.given)
        """Number of prompt tokens that stand for images."""
        self.named_stop_ids = named_stop_ids
        """Stop ids named by the caller, which are reported as `stop_reason`."""
        self.session_id = session_id
        """The caller's label, for `stop_session`."""
        self.history_len = history_len
        """Leading tokens of `prompt_ids` that come from earlier turns of the session."""
        self.prompt_logprobs_asked = prompt_logprobs
        self.output_logits = output_logits
        self.pooling = pooling
        self.reuses_prefix = prompt_logprobs is None and not output_logits and pooling != "mean"
        """False if the hidden states of all prompt tokens are needed, so that none can come from the prefix cache."""
        self.delivery = delivery
        self.sequences = [
            Sequence(self, index, params[index], stop_ids, max_new_tokens, answers[index])
            for index in range(len(params))
        ]
        self.siblings_queued = False
        """Whether the sequences other than the first have entered the queue. Written by the scheduler."""
        self.block_hashes: list[bytes] = []
        """Hash chain over the prompt's full blocks. Written by the scheduler when the request is added."""
        self.cached_tokens = 0
        """Prompt tokens found in the prefix cache. Written by the scheduler at first admission."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        """Written by the scheduler, chunk by chunk."""
        self.logits: list[Any] = []
        """Written by the scheduler, chunk by chunk."""
        self.pooled: Items[float] | None = None
        """Sum of the hidden states selected by `pooling`. Written by the scheduler, chunk by chunk."""

    def drop_sequences(self) -> None:
        """Drop the sequences, which refer back to the request, when it has ended or was refused. Without this reference
        cycle it is freed at once."""
        self.sequences = []

    def take_prompt_logprobs(self, position: int, scores: list[TokenLogprobs]) -> None:
        """Append the log-probabilities of the tokens after `position`. After a preemption, a chunk may overlap earlier
        ones and extend into the answer."""
        known = self.prompt_logprobs
        first, end = len(known) - position, len(self.prompt_ids) - 1 - position
        known.extend(scores[max(0, first) : max(0, end)])

    def take_hidden(self, row: PrefillRow, output: StepOutput) -> None:
        """Add a prompt chunk's logits and its sum of hidden states."""
        if row.output_logits and row.slot in output.logits:
            self.logits.append(output.logits[row.slot])
        if row.pooling is not None:
            chunk, before = output.pooled[row.slot], self.pooled
            self.pooled = chunk if before is None else [a + b for a, b in zip(before, chunk, strict=True)]

    def forget_hidden(self) -> None:
        """Drop logits and sums of hidden states, because the whole prompt is recomputed. Requests for these have no
        answer."""
        self.logits.clear()
        self.pooled = None

    @property
    def prefix_root(self) -> PrefixRoot:
        """Root of the prompt's hash chain, without the part that depends on the prompt's length."""
        adapter = None if self.adapter is None else self.adapter.number
        return PrefixRoot(cache_salt=self.policy.cache_salt, adapter=adapter)

    @property
    def finished(self) -> bool:
        return all(sequence.state is SequenceState.FINISHED for sequence in self.sequences)

    @property
    def prompt_is_scored(self) -> bool:
        """Whether all requested log-probabilities of the prompt are known."""
        return self.prompt_logprobs_asked is None or len(self.prompt_logprobs) >= len(self.prompt_ids) - 1

    def deadline_exceeded(self) -> DeadlineExceeded:
        """Return the error that ends the request at its deadline."""
        done = self.sequences[0].num_generated
        so_far = f"its answer had {done} tokens" if done else "it had no token yet"
        return DeadlineExceeded(
            f"The request's timeout has passed: {so_far}. Allow more time, ask for fewer tokens, or lower its priority "
            "value."
        )

    def record(self, unfinished: FinishReason) -> RequestRecord:
        """Return the record for observers of a request that ends now. `unfinished`: finish_reason of open answers."""
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
    """One of a request's `n` answers: known tokens, state, blocks and row. Written only by the scheduler, except for
    `answer`, which the engine loop advances, and `keeps_row`."""

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
        """Number of leading tokens whose keys and values are written, including by steps in flight."""
        self.pending = 0
        """Tokens sampled by steps in flight and not read yet."""
        self.ahead = 0
        """How many of the pending tokens are forced and thus already in `token_ids`."""
        self.forced: Items[int] = ()
        """The forced tokens at the end of `token_ids` that no step samples. The next row that samples carries them."""
        self.remaining = max_new_tokens
        """Tokens that may still be scheduled."""
        self.tables: list[BlockTable] = []
        """Block table of each block group; empty while the sequence has no row."""
        self.capacity = 0
        """Number of tokens that fit in the block tables of all groups."""
        self.host_tables: list[BlockTable] = []
        """In state SWAPPED, by group, the host blocks with the keys and values of `num_computed` tokens."""
        self.host_step = -1
        """The step that copies to the host blocks, which may be freed when it has been read."""
        self.hashes: list[bytes] = []
        """Hash chain over the full blocks of `token_ids`, as far as it is computed."""
        self.committed = 0
        """Number of leading blocks that have been offered to the prefix cache."""
        self.keeps_row = False
        """Whether the sequence was admitted because it had waited long, and therefore ranks in the highest class.
        Written by the waiting queue."""
        self.slot = -1
        self.adapter_slot = -1
        """Slot of its adapter on the device while the sequence has a row."""
        self.last_step = -1
        """The newest step that may write to the blocks, which are freed when it has been read."""
        self.logprobs: TokenLogprobs | None = None
        """Log-probabilities of the newest token."""
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        """Why the sequence failed, if finish_reason is 'error'."""
        self.cause: BaseException | None = None
        """The error of the step, if the whole step failed."""

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
        """Return what the device has to know about the sequence in its new slot."""
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

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request.id}.{self.index} {self.state.value} slot={self.slot} "
            f"tokens={len(self.token_ids)} computed={self.num_computed} pending={self.pending} "
            f"blocks={self.tables}>"
        )


class StepInFlight:
    """A submitted step that has not been read. Written once, when it is scheduled."""

    __slots__ = ("prefill", "sampled", "step", "swaps")

    def __init__(
        self, step: int, sampled: list[Sequence], prefill: list[tuple[Sequence, PrefillRow]], swaps: SwapPlan
    ) -> None:
        self.step = step
        self.sampled = sampled
        """Sequences that sample in this step, in batch order."""
        self.prefill = prefill
        self.swaps = swaps

    def uncount_tokens(self) -> None:
        """Subtract the step's tokens from the sequences' counts, because it was not run."""
        for sequence in self.sampled:
            sequence.pending -= 1
            if sequence.ahead:
                sequence.ahead -= 1
            else:
                sequence.remaining += 1

    def live_rows(self) -> list[Sequence]:
        """Return the sequences with a row in this step that have not ended since."""
        rows = dict.fromkeys([*self.sampled, *(sequence for sequence, _ in self.prefill)])
        return [sequence for sequence in rows if sequence.state is not SequenceState.FINISHED]
