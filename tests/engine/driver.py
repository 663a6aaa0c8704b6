"""A scheduler and a fake device without an event loop: tests decide when a step is scheduled and when it is read."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from asyncllm.engine.integrity import check_integrity
from asyncllm.engine.requests.answer import Answer
from asyncllm.engine.requests.delivery import Delivery
from asyncllm.engine.requests.input_processor import Call, InputProcessor
from asyncllm.engine.requests.prompt_encoder import DEFAULT_OPTIONS
from asyncllm.engine.schedule.adapter_slots import Adapter
from asyncllm.engine.schedule.scheduler import Scheduler
from asyncllm.engine.schedule.sequence import ORDINARY, Request, RequestPolicy, SequenceState
from asyncllm.engine.schedule.sequence import Sequence as Row
from asyncllm.engine.schedule.waiting_queue import WaitingQueue
from asyncllm.engine.sessions.session_table import SessionTable
from asyncllm.protocol import Batch, PrefillRow, SamplingParams, SlotStart, UpdateWeights
from asyncllm.testing import ByteTokenizer, FakeDevice, Oracle, hash_hidden, hash_oracle
from asyncllm.text.detokenizer import Detokenizer
from asyncllm.types import Pooling
from tests.engine.waits import at_once

__all__ = ["TOKENIZER", "Driver", "Inputs", "expected_answer", "expected_pooled"]

VOCAB = 8
HIDDEN_SIZE = 4
TOKENIZER = ByteTokenizer()


def expected_answer(
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    seed: int | None = None,
    stop_ids: Sequence[int] = (),
    oracle: Oracle | None = None,
    adapter: Adapter | None = None,
) -> list[int]:
    """What a request's answer must be, from the request alone."""
    next_token = oracle or hash_oracle(VOCAB)
    params = SamplingParams(temperature=0.0 if seed is None else 1.0, seed=seed or 0)
    number = 0 if adapter is None else adapter.number
    known = len(prompt)
    start = SlotStart(slot=0, params=params, num_prompt=known, num_tokens=known, token_ids=[], adapter=number)
    history = list(prompt)
    while len(history) < len(prompt) + max_new_tokens:
        history.append(next_token(history, start))
        if history[-1] in stop_ids:
            break
    return history[len(prompt) :]


def expected_pooled(prompt: Sequence[int], pooling: Pooling, hidden_size: int = 16) -> list[float]:
    """What a prompt's hidden states must add up to."""
    hidden = hash_hidden(prompt, hidden_size)
    return [sum(column) for column in zip(*(hidden if pooling == "mean" else hidden[-1:]), strict=True)]


class Driver:
    """Schedules steps, keeps them in flight, and lets the device run each one when it is completed."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        num_slots: int = 16,
        max_batch_size: int = 16,
        budget: int = 64,
        interval: int = 1,
        caching: bool = True,
        row_failure: Callable[[list[int]], str | None] | None = None,
        forces: Callable[[list[int]], int] | None = None,
        token_tile: int = 1,
        tokens_beside_decode: int | None = None,
        dynamic_rope_from: int | None = None,
        num_host_blocks: int = 0,
        min_copied_tokens: int = 1,
        windows: Sequence[int | None] = (None,),
        keeps_state: bool = False,
        swapping: bool = True,
        waiting: WaitingQueue | None = None,
        num_adapter_slots: int = 0,
        adapters: Sequence[int] = (),
    ) -> None:
        """`swapping`: whether preempted rows go to the host, if it has blocks."""
        self.device = FakeDevice(
            num_blocks=num_blocks,
            block_size=block_size,
            num_slots=num_slots,
            vocab_size=VOCAB,
            hidden_size=HIDDEN_SIZE,
            oracle=hash_oracle(VOCAB),
            row_failure=row_failure,
            forces=forces,
            num_host_blocks=num_host_blocks,
            min_copied_tokens=min_copied_tokens,
            windows=windows,
            keeps_state=keeps_state,
            num_adapter_slots=num_adapter_slots,
        )
        self.device.adapters.update(adapters)
        self.max_batch_size = max_batch_size
        self.budget = budget
        self.tokens_beside_decode = tokens_beside_decode
        self.interval = interval
        self.scheduler = Scheduler(
            msgspec.structs.replace(
                self.device.limits,
                token_tile=token_tile,
                tokens_beside_decode=tokens_beside_decode,
                dynamic_rope_from=dynamic_rope_from,
            ),
            max_batch_size=max_batch_size,
            prefill_budget=budget,
            prefill_interval=interval,
            prefix_caching=caching,
            swapping=swapping,
            waiting=waiting,
        )
        self.in_flight: deque[Batch] = deque()
        self.batches: list[Batch] = []
        self.requests: list[Request] = []
        self.ends: dict[Request, int] = {}
        """Request -> how many terminal events it had."""
        self._tables: dict[int, list[list[int]]] = {}
        """Slot -> by block group, its table; -1 where it never had a block."""
        self._writes: deque[dict[int, int]] = deque()
        """Of each step in flight: block -> slot that writes it."""
        self._reads: deque[set[int]] = deque()
        """Of each step in flight: the blocks that its rows see."""
        self._positions: dict[int, int] = {}
        self._head: Row | None = None
        """The running row that is never preempted while another one runs: of the highest class the oldest."""
        self._head_done: object = None
        """What it had done when it was last seen to progress."""
        self._steps_without_progress = 0
        self._deepest = 0
        """Most steps that have been in flight."""

    def submit(
        self,
        prompt: Sequence[int],
        max_new_tokens: int = 6,
        *,
        seeds: Sequence[int | None] = (None,),
        stop_ids: Sequence[int] = (),
        prompt_logprobs: int | None = None,
        policy: RequestPolicy = ORDINARY,
        pooling: Pooling | None = None,
        delivery: Delivery | None = None,
        adapter: Adapter | None = None,
    ) -> Request:
        """Queue a request with one answer for each seed; None is greedy. It is streamed if `delivery` is not given."""
        return self.add(
            self.build(
                prompt,
                max_new_tokens,
                seeds=seeds,
                stop_ids=stop_ids,
                prompt_logprobs=prompt_logprobs,
                policy=policy,
                pooling=pooling,
                delivery=delivery,
                adapter=adapter,
            )
        )

    def build(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        seeds: Sequence[int | None] = (None,),
        stop_ids: Sequence[int] = (),
        prompt_logprobs: int | None = None,
        policy: RequestPolicy = ORDINARY,
        pooling: Pooling | None = None,
        delivery: Delivery | None = None,
        adapter: Adapter | None = None,
    ) -> Request:
        """A request that is not queued yet."""
        return Request(
            id=len(self.requests),
            prompt_ids=list(prompt),
            params=[SamplingParams(temperature=0.0 if seed is None else 1.0, seed=seed or 0) for seed in seeds],
            stop_ids=frozenset(stop_ids),
            max_new_tokens=max_new_tokens,
            delivery=delivery or Delivery(streaming=True),
            answers=[
                Answer(
                    Detokenizer(TOKENIZER, skip_special_tokens=True),
                    stop_words=None,
                    hidden_ids=frozenset(),
                    include_stop=False,
                )
                for _ in seeds
            ],
            prompt_logprobs=prompt_logprobs,
            policy=policy,
            pooling=pooling,
            adapter=adapter,
        )

    def add(self, request: Request) -> Request:
        """Queue a request."""
        self.requests.append(request)
        self.ends[request] = 0
        self.scheduler.add(request)
        return request

    def schedule(self) -> Batch | None:
        """Put the next step in flight."""
        batch = self.scheduler.schedule()
        if batch is None:
            idle = not self.scheduler.num_running and not self.scheduler.num_waiting
            assert self.in_flight or idle, "there is work, no step to wait for, and no step to be had"
        else:
            self._check_batch(batch)
            self.in_flight.append(batch)
            self._deepest = max(self._deepest, len(self.in_flight))
            self.batches.append(batch)
        return batch

    def complete(self) -> list[Row]:
        """Let the device run the oldest step in flight, and read it. Returns the rows that got a token or ended."""
        self._writes.popleft()
        self._reads.popleft()
        advanced = self.scheduler.update(self.device.step(self.in_flight.popleft()))
        for request in {row.request for row in advanced}:
            for row in request.sequences:
                if row.error is not None:
                    self.cancel(request, "error")
            self._note_end(request)
        self._note_progress()
        return advanced

    def _note_progress(self) -> None:
        """The head progresses within as many steps as it takes to preempt everybody else, one by one, and to read what
        they have in flight; its prompt, behind as many tokens as there is room for."""
        running = self.scheduler._running
        head = min(running, key=self.scheduler.waiting.rank, default=None)  # of equals the first, which is the oldest
        done = None if head is None else (head.num_computed, len(head.token_ids), head.state)
        self._steps_without_progress += 1
        if head is None or (head, done) != (self._head, self._head_done):
            self._head, self._head_done, self._steps_without_progress = head, done, 0
        bound = self.max_batch_size * (1 + self._deepest)
        if head is not None and head.state is SequenceState.PREFILL:
            limits = self.device.limits
            bound += self.interval * (limits.num_blocks * limits.block_size)
        assert self._steps_without_progress <= bound, f"{head!r} has not progressed for {bound} steps"

    def cancel(self, request: Request, reason: str = "abort") -> None:
        """As a reader that leaves, at any time and any number of times."""
        ended = request.finished
        self.scheduler.cancel(request, reason)  # type: ignore[arg-type]
        if not ended and reason != "error":
            self._note_end(request)

    def forget(self) -> None:
        """New weights, while no step is in flight: from now on, a step that reads what was written is a violation."""
        self.device.carry_out(UpdateWeights({}))
        self.scheduler.reset_cache()

    def _note_end(self, request: Request) -> None:
        if request.finished:
            self.ends[request] += 1
            request.delivery.end()

    def turn(self, depth: int = 2) -> bool:
        """Fill the pipeline, then read one step; False when there was nothing to do."""
        while len(self.in_flight) < depth and self.schedule() is not None:
            pass
        if self.in_flight:
            self.complete()
            return True
        return False

    def drain(self, depth: int = 2, limit: int = 10_000) -> None:
        """Run until nothing is left to do."""
        for _ in range(limit):
            if not self.turn(depth):
                break
        assert not self.in_flight
        assert self.scheduler.num_waiting == 0
        assert self.scheduler.num_running == 0

    def answers(self, request: Request) -> list[list[int]]:
        """The token ids of each answer so far."""
        return [row.token_ids[row.num_prompt :] for row in request.sequences]

    def check(self) -> None:
        """Everything that must hold between any two calls."""
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        check_integrity(scheduler, self.requests)
        assert scheduler.num_running <= self.max_batch_size
        for tier in (blocks, scheduler.host.blocks):
            assert tier.num_free + tier.num_idle + tier.num_held == tier.num_blocks
        cache = scheduler.prefix_cache
        for writes in self._writes:
            for block in writes:
                assert not (cache is None and block in blocks._free), f"block {block} is free, but a step writes it"
                assert not blocks.is_idle(block), (
                    f"block {block} came back before the last step that writes it was read"
                )
        for block in set().union(*self._reads):
            assert blocks._references[block] > 0, f"block {block} came back before the last step that reads it was read"
        for request in self.requests:
            assert self.ends[request] == int(request.finished), f"{self.ends[request]} terminal events"
            for row in request.sequences:
                running = row.state in (SequenceState.PREFILL, SequenceState.DECODE)
                assert row.pending >= 0
                assert row.remaining >= 0
                assert row.capacity >= row.num_computed or not running
                assert (row.slot >= 0) == running
                assert bool(row.host_blocks) == (row.state is SequenceState.SWAPPED)
                if row.state is SequenceState.FINISHED:
                    assert row.finish_reason is not None

    def check_drained(self) -> None:
        """Nothing is held any more."""
        self.check()
        assert all(request.finished for request in self.requests)
        for tier in (self.scheduler.blocks, self.scheduler.host.blocks):
            assert tier.num_held == 0
            assert tier.num_available == tier.num_blocks

    def _check_batch(self, batch: Batch) -> None:
        """No step takes a block that another row's unread step still writes, or copies to a block of the host that an
        unread one copies to or from; budgets hold."""
        assert sum(chunk_sizes(batch.prefill)) <= self._most_prompt_tokens(batch)
        assert len(batch.decode) + len(batch.prefill) <= self.max_batch_size
        size = self.device.limits.block_size
        for earlier in self.in_flight:
            copied = {block for _, block in earlier.swaps.swap_out} | {block for block, _ in earlier.swaps.swap_in}
            taken = copied.intersection(block for _, block in batch.swaps.swap_out)
            assert not taken, f"host blocks {taken} change hands before the step that copies them was read"
        for start in batch.starts:
            self._tables[start.slot] = [[] for _ in self.device.limits.windows]
            for earlier in self.in_flight:
                used = {*earlier.decode, *(row.slot for row in earlier.prefill)}
                assert start.slot not in used, f"slot {start.slot} changes hands before its last step was read"
        started = {start.slot for start in batch.starts}
        for slot, group, index, ids in batch.new_blocks:
            table = self._tables[slot][group]
            if self.device.limits.windows[group] is not None and not table:
                table += [-1] * index
            assert index == len(table)
            table.extend(ids)
            for writes in self._writes:
                taken = [block for block in ids if writes.get(block, slot) != slot]
                assert not taken or slot in started, f"blocks {taken} are written by steps that have not been read"
        writes: dict[int, int] = {}
        self._reads.append(set())
        for row in batch.prefill:
            self._note_writes(writes, row.slot, row.position, len(row.tokens), size)
            self._positions[row.slot] = row.position + len(row.tokens)
        for slot in batch.decode:
            self._note_writes(writes, slot, self._positions[slot], 1, size)
            self._positions[slot] += 1
        readers = Counter(block for row in self.scheduler._running for block in row.blocks)
        cache = self.scheduler.prefix_cache
        for block in writes:
            assert readers[block] <= 1, f"block {block} is written, and {readers[block]} rows read it"
            assert cache is None or cache.key_of(block) is None, (
                f"block {block} is written, and any request may find it"
            )
        for earlier in self._writes:
            for block, slot in writes.items():
                assert earlier.get(block, slot) == slot, f"block {block} is written by two rows in flight"
        self._writes.append(writes)

    def _most_prompt_tokens(self, batch: Batch) -> int:
        """Of a step with these decode rows."""
        whole = self.tokens_beside_decode
        streamed = {row.slot for row in self.scheduler._running if row.request.delivery.streaming}
        if whole is None or streamed.isdisjoint(batch.decode):
            return self.budget
        return min(self.budget, max(whole - len(batch.decode), math.ceil(whole / 4)))

    def _note_writes(self, writes: dict[int, int], slot: int, position: int, count: int, size: int) -> None:
        end = (position + count - 1) // size + 1
        for window, table in zip(self.device.limits.windows, self._tables[slot], strict=True):
            first = 0 if window is None else max(0, position - window + 1) // size
            assert -1 not in table[first:end], f"slot {slot} sees blocks that it never had"
            self._reads[-1].update(table[first:end])
            for block in table[position // size : end]:
                writes[block] = slot


async def _no_words(*_: object) -> Any:
    return SimpleNamespace(stop_ids=frozenset())


class Inputs(InputProcessor):
    """Turns of token ids for a driver's scheduler, with the policy that a test sets."""

    def __init__(self, table: SessionTable, driver: Driver, room: int) -> None:
        encoder: Any = SimpleNamespace(
            splitter=SimpleNamespace(splitting=lambda *_: None),
            given_ids=at_once,
            options=lambda *_, **__: DEFAULT_OPTIONS,
            tokenizer=TOKENIZER,
            template=None,
        )
        super().__init__(encoder, table)
        self._words: Any = SimpleNamespace(of=_no_words)
        self._driver = driver
        self._space = room
        self.policy: RequestPolicy
        self.adapter: Adapter | None = None

    def _policy(self, options: object) -> RequestPolicy:
        return self.policy

    def _build(
        self, call: Call, asked: Any, prompt_ids: list[int], delivery: Delivery, *_: object, **turn: Any
    ) -> Request:
        max_new = min(asked.config.max_new_tokens, self._space - len(prompt_ids))
        request = self._driver.build(prompt_ids, max_new, policy=asked.policy, delivery=delivery, adapter=self.adapter)
        request.session_id, request.history_len = turn["session_id"], turn["history_len"]
        return request


def chunk_sizes(rows: Sequence[PrefillRow]) -> list[int]:
    """How many tokens each prefill row computes."""
    return [len(row.tokens) for row in rows]
