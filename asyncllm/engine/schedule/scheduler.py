"""Scheduler decides which tokens of which sequences the next step computes: it admits waiting sequences, plans prefill
and decode rows, and preempts.

It owns the running sequences, and knows nothing of time, text, tensors or tasks. `WaitingQueue` chooses the sequence to
admit next, and `Admission` gives it a slot and blocks. The engine calls `schedule()` for the next `Batch`, possibly
before it has read the previous ones, and `update()` with each `StepOutput` in order. `Sequence.pending` counts unread
tokens, so that the next step never waits for a token's value.

At admission a sequence gets blocks for all its known tokens. It needs more blocks while decoding, for a prompt longer
than a window (`BlockGroups`), and for forced tokens, which are computed like a prompt. When no block is left, or an
earlier group lacks a row, the newest running sequence of the lowest class is preempted, so the oldest one of the
highest class always makes progress. The victim's blocks are copied to host memory if there is space (`HostBlocks`).
"""

from __future__ import annotations

from collections import deque

from asyncllm.engine.cache.block_groups import BlockGroups
from asyncllm.engine.cache.block_manager import BlockManager
from asyncllm.engine.cache.host_blocks import HostBlocks
from asyncllm.engine.cache.prefix_cache import PrefixCache
from asyncllm.engine.cache.prefix_sharing import PrefixSharing
from asyncllm.engine.schedule.adapter_slots import AdapterSlots
from asyncllm.engine.schedule.admission import Admission, Slots
from asyncllm.engine.schedule.chunked_prefill import PrefillBudget, chunk_row, fit_budget, fit_joint_tokens, next_end
from asyncllm.engine.schedule.sequence import Request, Sequence, SequenceState, StepInFlight
from asyncllm.engine.schedule.waiting_queue import WaitingQueue
from asyncllm.protocol import Batch, Limits, PrefillRow, StepOutput
from asyncllm.types import FinishReason

__all__ = ["Scheduler"]

_ROWS_PER_STEP_SAVED = 5
"""A step with a chunk takes about a fifth longer than a step of decode rows alone, and all rows wait for it. A run of
forced tokens must therefore save its row one step for every five rows that wait, or the step loses more than it
gains."""
_LONG_RUN = 8
"""Longer runs are rare, and looking for them costs 8 us per row, while all rows wait."""


class SchedulerCounts:
    """Totals since start. Written by the scheduler, read by `stats()`."""

    __slots__ = (
        "cached_tokens",
        "decode_tokens",
        "failed_steps",
        "preemptions",
        "prefill_tokens",
        "prompt_tokens",
        "sampled_tokens",
        "steps",
    )

    def __init__(self) -> None:
        self.steps = 0
        self.failed_steps = 0
        """Steps that raised and ended their rows."""
        self.prefill_tokens = 0
        """Tokens computed in prefill rows, including recomputed ones."""
        self.decode_tokens = 0
        self.sampled_tokens = 0
        """Generated tokens."""
        self.prompt_tokens = 0
        """Known tokens of admitted sequences, computed or found in the prefix cache."""
        self.cached_tokens = 0
        """How many of these were found in the prefix cache."""
        self.preemptions = 0


class Scheduler:
    """The running sequences and unread steps of one engine, with its queue, slots and blocks. Written only by the
    engine's turns."""

    def __init__(
        self,
        limits: Limits,
        *,
        max_batch_size: int,
        prefill_budget: int,
        prefill_interval: int,
        prefix_caching: bool,
        swapping: bool,
        waiting: WaitingQueue | None = None,
    ) -> None:
        self._block_size = limits.block_size
        self.max_steps_in_flight = limits.max_steps_in_flight
        self._prefill_budget = PrefillBudget(prefill_budget, limits)
        self._prefill_interval = prefill_interval

        self.waiting = waiting if waiting is not None else WaitingQueue()
        self.num_waiting = 0
        """Sequences in the queue, and siblings that wait until the prompt is computed."""
        self._running: dict[Sequence, None] = {}
        """Sequences with a slot, in order of admission; preempted sequences return in order of arrival."""
        self._prefilling: deque[Sequence] = deque()
        """Running sequences with known tokens that are not scheduled yet."""
        self._in_flight: deque[StepInFlight] = deque()
        """Scheduled steps that have not been read, oldest first."""
        self._step = 0
        """Number of the next step."""
        self._last_read = -1
        """Number of the newest step that has been read: the fence."""
        self._decode_steps = 0
        """Consecutive steps without prompt tokens while prompts waited."""
        self.admitted: list[Request] = []
        """Requests whose first sequence was admitted by the last `schedule()`."""
        self.prefilled: list[Request] = []
        """Requests whose prompt the last `update()` found to be computed."""
        self.counts = SchedulerCounts()

        self.prefix_cache = PrefixCache() if prefix_caching else None
        self.groups = BlockGroups(limits, prefill_budget)
        self.sharing = PrefixSharing(self.prefix_cache, self.groups, limits)
        self.blocks = BlockManager(limits.num_blocks, self.prefix_cache)
        self.host = HostBlocks(limits, self.groups, self.blocks, swapping=swapping)
        self.slots = Slots(limits.num_slots)
        self.adapters = AdapterSlots(limits.num_adapter_slots)
        self.admission = Admission(
            waiting=self.waiting,
            running=self._running,
            max_running=min(max_batch_size, limits.num_slots),
            slots=self.slots,
            adapters=self.adapters,
            groups=self.groups,
            sharing=self.sharing,
            blocks=self.blocks,
            host=self.host,
        )

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_free_rows(self) -> int:
        """Number of free rows, that is, of sequences that could be admitted if there were blocks."""
        return self.admission.num_free_rows

    def add(self, request: Request) -> None:
        """Queue a request's first sequence; its siblings follow when the prompt has been computed."""
        self.sharing.hash_prompt(request)
        leader = request.sequences[0]
        leader.hashes = list(request.block_hashes)
        self.waiting.push(leader)
        self.num_waiting += len(request.sequences)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence now, in any state; its row and blocks are freed under the fence rule."""
        if sequence.state is SequenceState.FINISHED:
            return
        if sequence in self._running:
            self._release_row(sequence)
        else:
            self.waiting.discard(sequence)
            self.host.release(sequence)
            self.num_waiting -= 1
        sequence.state = SequenceState.FINISHED
        sequence.finish_reason = reason
        if sequence.index == 0:
            self._queue_siblings(sequence.request)

    def cancel(self, request: Request, reason: FinishReason = "abort") -> None:
        """End every sequence of the request."""
        # Siblings first: ending the leader would queue them.
        for sequence in reversed(request.sequences):
            self.finish(sequence, reason)

    def schedule(self) -> Batch | None:
        """Return the next step, or None if nothing can be computed until a step in flight has been read."""
        step = self._step
        self.admitted.clear()
        batch = Batch(step=step, starts=[], new_blocks=[], copies=[], decode=[], prefill=[], last_read=self._last_read)
        min_forced = max(self._min_steps_saved(), 2)
        batch.min_forced = min_forced if min_forced <= _LONG_RUN else 0
        self._preempt_for_groups(batch)
        sampled = self._schedule_decode(batch)
        prefill: list[tuple[Sequence, PrefillRow]] = []
        if self._prefilling or self.waiting:
            if batch.decode and self._decode_steps + 1 < self._prefill_interval:
                self._decode_steps += 1
            else:
                self._decode_steps = 0
                self._schedule_prefill(batch, sampled, prefill)
        # A step without tokens may give blocks to a row whose tokens have to be computed in one step.
        if not (batch.decode or batch.prefill or batch.starts or batch.new_blocks or self.host.plan):
            return None
        batch.swaps = self.host.take_plan(step)
        sampled.extend(sequence for sequence, row in prefill if row.sample)
        self._in_flight.append(StepInFlight(step, sampled, prefill, batch.swaps))
        self._step += 1
        self.counts.steps += 1
        self.counts.decode_tokens += len(batch.decode)
        return batch

    def _preempt_for_groups(self, batch: Batch) -> None:
        """Admit sequences whose group precedes that of a running one, and preempt the last running ones for them.

        This runs before the decode rows are scheduled, so that a preempted sequence has no row in this step, and an
        admission leaves a block for each decode row.
        """
        while self._running and (sequence := self.waiting.first_of_groups()) is not None:
            victim = self._last_of_lowest_class()
            if self.waiting.rank(victim) <= self.waiting.rank(sequence):
                return
            if not self._admit(batch):
                if self.admission.finds_room(sequence):
                    return
                self._preempt(victim)

    def _admit(self, batch: Batch) -> bool:
        """Admit the next waiting sequence, if slots and blocks suffice."""
        sequence = self.admission.admit(batch)
        if sequence is None:
            return False
        self.num_waiting -= 1
        if sequence.state is SequenceState.SWAPPED:
            self.host.release(sequence)
        else:
            self.counts.prompt_tokens += len(sequence.token_ids)
            self.counts.cached_tokens += sequence.num_computed
            if sequence.index == 0 and sequence.num_generated == 0:
                sequence.request.cached_tokens = sequence.num_computed
                self.admitted.append(sequence.request)
        sequence.forced = ()  # It starts with all known tokens.
        sequence.state = SequenceState.PREFILL
        self._running[sequence] = None
        self._prefilling.append(sequence)
        return True

    def _schedule_prefill(
        self, batch: Batch, decoding: list[Sequence], prefill: list[tuple[Sequence, PrefillRow]]
    ) -> None:
        """Fill the token budget with chunks of admitted sequences, highest class first, then admit more."""
        self._put_prompts_in_order(batch)
        if not self._prefilling and not self._admit(batch):
            return
        budget = self._prefill_budget.beside(decoding)
        bounded = budget < self._prefill_budget.max_tokens
        chunks: list[tuple[Sequence, int]] = []
        passed: list[Sequence] = []
        while budget > 0:
            if len(chunks) + len(passed) == len(self._prefilling) and not self._admit(batch):
                break
            sequence = self._prefilling[len(chunks) + len(passed)]
            max_length = budget if chunks else self._prefill_budget.max_tokens
            length = min(len(sequence.token_ids) - sequence.num_computed, budget)
            work = 0
            if bounded and sequence.request.images:
                length, work = fit_budget(sequence, length, budget, first=not chunks)
                if not length:
                    break
            length = fit_joint_tokens(sequence, length, max_length)
            if length and sequence.num_computed + length > sequence.capacity:
                room = self._allocate_for_chunk(batch, sequence, length)
                length = fit_joint_tokens(sequence, room, room)
            if not length:
                passed.append(sequence)
                continue
            chunks.append((sequence, length))
            budget -= length + work
        if chunks and (decoding or self.waiting):
            chunks = self._prefill_budget.whole_tiles(chunks, len(decoding), len(self.waiting))
        passed += list(self._prefilling)[len(chunks) + len(passed) :]
        self.waiting.pass_over(passed, chunks)
        for sequence, length in chunks:
            self._schedule_chunk(batch, sequence, length, prefill)

    def _put_prompts_in_order(self, batch: Batch) -> None:
        """Sort the prompts being computed by class, and admit waiting sequences of a higher class than the last one."""
        while self._prefilling:
            self._prefilling = deque(sorted(self._prefilling, key=self.waiting.rank))
            first, rank = self.waiting.first(), self.waiting.rank
            if first is None or rank(self._prefilling[-1]) <= rank(first) or not self._admit(batch):
                return

    def _allocate_for_chunk(self, batch: Batch, sequence: Sequence, length: int) -> int:
        """Give a prompt blocks for its next `length` tokens, except reserved ones. Return how many of these tokens
        fit."""
        end = sequence.num_computed + length
        if end > sequence.capacity:
            spare = self.blocks.num_available - len(self._running) * self.groups.count
            self._extend(batch, sequence, -(-end // self._block_size), spare)
        return min(end, sequence.capacity) - sequence.num_computed

    def _schedule_chunk(
        self, batch: Batch, sequence: Sequence, length: int, prefill: list[tuple[Sequence, PrefillRow]]
    ) -> None:
        """Compute the next `length` known tokens of a prefilling sequence."""
        row = chunk_row(sequence, length)
        batch.prefill.append(row)
        prefill.append((sequence, row))
        self.counts.prefill_tokens += length
        sequence.num_computed += length
        sequence.last_step = batch.step
        if sequence.num_computed == len(sequence.token_ids):
            self._prefilling.remove(sequence)
            sequence.state = SequenceState.DECODE
            if row.sample:
                sequence.pending += 1
                sequence.remaining -= 1
                sequence.forced = ()

    def _schedule_decode(self, batch: Batch) -> list[Sequence]:
        """Advance every decoding sequence by one token, oldest first."""
        step = batch.step
        decode, scheduled = batch.decode, []
        rows = list(self._running)
        if self.blocks.num_available < len(rows) * self.groups.count:
            # A sequence preempted by this loop then comes last, before this step has a row for it: it is copied to the
            # host before the step runs.
            rows.sort(key=self.waiting.rank)
        for sequence in rows:
            if sequence.state is not SequenceState.DECODE or sequence.remaining <= 0:
                if sequence.state is SequenceState.PREFILL and sequence.capacity < len(sequence.token_ids):
                    if sequence.last_step <= self._last_read:
                        # `update` frees no blocks for tokens that were forced.
                        self._free_out_of_window(sequence, sequence.num_computed)
                    self._ensure_blocks(batch, sequence, next_end(sequence))
                continue
            position = sequence.num_computed
            if position == sequence.capacity and not self._ensure_blocks(batch, sequence, position + 1):
                continue
            sequence.num_computed = position + 1
            sequence.pending += 1
            sequence.remaining -= 1
            sequence.last_step = step
            decode.append(sequence.slot)
            scheduled.append(sequence)
        return scheduled

    def _ensure_blocks(self, batch: Batch, sequence: Sequence, end: int) -> bool:
        """Ensure blocks for the sequence's tokens up to `end`. Return False if that is impossible in this step."""
        while sequence.capacity < end:
            if not self._ensure_next_block(batch, sequence):
                return False
        return True

    def _ensure_next_block(self, batch: Batch, sequence: Sequence) -> bool:
        """Give the sequence one more block in each group. Return False if that is impossible in this step."""
        lacking = [table for table in sequence.tables if table.end * self._block_size == sequence.capacity]
        while self.blocks.num_available < len(lacking):
            if self.blocks.num_fenced or (self.groups.windowed and sequence.last_step > self._last_read):
                # Blocks that steps in flight hold, or are the last to see, become free without another preemption.
                return False
            victim = self._last_of_lowest_class()
            # A prompt keeps its blocks until an older sequence, or one of a higher class, needs them.
            if victim is not sequence or sequence.state is SequenceState.DECODE:
                self._preempt(victim)
            if victim is sequence:
                return False
        self._extend(batch, sequence, sequence.capacity // self._block_size + 1, len(lacking))
        return True

    def _extend(self, batch: Batch, sequence: Sequence, end: int, max_blocks: int) -> None:
        """Give a sequence up to `max_blocks` blocks, so that its tables end at block `end` or as close to it as
        possible."""
        for group, first, blocks in self.groups.extend(sequence.tables, end, max_blocks, self.blocks.allocate):
            batch.new_blocks.append((sequence.slot, group, first, blocks))
        sequence.capacity = self.groups.capacity(sequence.tables)

    def _last_of_lowest_class(self) -> Sequence:
        """Return the preemption victim: the newest running sequence of the lowest class. At least one runs."""
        return max(reversed(self._running), key=self.waiting.rank)

    def _preempt(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Take the row and blocks of a running sequence. With `keep`, it resumes from a copy on the host if there is
        space; otherwise it is recomputed."""
        self.counts.preemptions += 1
        if keep and self.host.swap_out(sequence):
            self._requeue(sequence)
            sequence.state = SequenceState.SWAPPED
        else:
            self._recompute(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        """Move a running sequence back into the queue."""
        self._release_row(sequence)
        self.num_waiting += 1
        self.waiting.push(sequence)
        sequence.committed = 0

    def _recompute(self, sequence: Sequence) -> None:
        """Put a sequence, if it is not there, back into the queue, to be recomputed from its tokens."""
        if sequence in self._running:
            self._requeue(sequence)
        else:
            self.host.release(sequence)
        sequence.state = SequenceState.WAITING
        sequence.num_computed = 0
        sequence.request.forget_hidden()

    def _release_row(self, sequence: Sequence) -> None:
        """Remove a running sequence from its row. Its slot and blocks are freed under the fence rule."""
        del self._running[sequence]
        if sequence.request.adapter is not None:
            self.adapters.give_back(sequence.request.adapter)
        if sequence.state is SequenceState.PREFILL:
            self._prefilling.remove(sequence)
        self.blocks.retire(sequence.blocks, sequence.last_step, self._last_read)
        sequence.tables, sequence.capacity = [], 0
        self.slots.retire(sequence.slot, sequence.last_step, self._last_read)
        sequence.slot = -1

    def update(self, output: StepOutput) -> list[Sequence]:
        """Read the oldest step in flight. Return the sequences that got a token or ended in it."""
        oldest = self._pop_oldest()
        assert oldest.step == output.step, f"step {output.step} was read before step {oldest.step}"
        advanced: list[Sequence] = []
        forced: list[Sequence] = []
        self.prefilled.clear()
        for sequence, row in oldest.prefill:
            if self._read_prefill(sequence, row, output):
                advanced.append(sequence)
        without_token = len(advanced)
        logprobs, errors = output.logprobs, output.errors
        block_size = self._block_size
        for sequence, slot, token in zip(oldest.sampled, output.slots, output.tokens, strict=True):
            if sequence.state is SequenceState.FINISHED:
                continue
            sequence.pending -= 1
            failed = bool(errors) and slot in errors
            if sequence.ahead:
                sequence.ahead -= 1
                if not failed:
                    continue
            advanced.append(sequence)
            if failed:
                sequence.error = errors[slot]
                self.finish(sequence, "error")
                without_token += 1
                continue
            token_ids = sequence.token_ids
            token_ids.append(token)
            if logprobs:
                sequence.logprobs = logprobs.get(slot)
            if (len(token_ids) - 1) % block_size == 0:
                self.sharing.offer(sequence)
                self._free_out_of_window(sequence, len(token_ids) - 1)
            if token in sequence.stop_ids:
                self.finish(sequence, "stop")
            elif sequence.remaining <= 0 and sequence.pending == 0:
                self.finish(sequence, "length")
            elif output.forced and slot in output.forced:
                forced += [sequence] * self._take_forced(sequence, slot, output.forced[slot])
        self.counts.sampled_tokens += len(advanced) - without_token + len(forced)
        self.waiting.charge([*advanced, *forced])
        self._lift_fence(oldest.step)
        return advanced

    def _read_prefill(self, sequence: Sequence, row: PrefillRow, output: StepOutput) -> bool:
        """Read the results of a prefill row other than its token. Return whether it ended a sequence that generates no
        token."""
        request = sequence.request
        if row.prompt_logprobs is not None:
            request.take_prompt_logprobs(row.position, output.prompt_logprobs.get(row.slot, []))
        failed = row.slot in output.errors
        if sequence.slot != row.slot and not (failed and sequence.state is SequenceState.SWAPPED):
            # Finished or preempted meanwhile. However, a failed row that was swapped out must not come back.
            return False
        if failed:
            # Nothing of this row may enter the prefix cache. A row that samples is ended by `update`.
            if not row.sample:
                sequence.error = output.errors[row.slot]
                self.finish(sequence, "error")
            return not row.sample
        request.take_hidden(row, output)
        end = row.position + len(row.tokens)
        self.sharing.offer(sequence, end)
        self._free_out_of_window(sequence, end)
        if sequence.index == 0 and end >= sequence.num_prompt:
            self._queue_siblings(request)
            self.prefilled.append(request)
        if row.sample or end < len(sequence.token_ids):
            return False
        self.finish(sequence, "length")
        return True

    def _queue_siblings(self, request: Request) -> None:
        """Queue the other answers to a prompt that has been computed."""
        if request.siblings_queued:
            return
        request.siblings_queued = True
        for sequence in request.sequences[1:]:
            if sequence.state is SequenceState.WAITING:
                sequence.hashes = list(request.block_hashes)
                self.waiting.push(sequence)

    def _free_out_of_window(self, sequence: Sequence, num_read: int) -> None:
        """Free the blocks that no window reaches any more. `num_read` tokens have been read, and no unread step starts
        before them."""
        if self.groups.windowed and sequence.tables:
            self.blocks.retire(self.groups.trim(sequence.tables, num_read), self._last_read, self._last_read)

    def _min_steps_saved(self) -> int:
        """Return how many steps a run of forced tokens must save to be worth a chunk."""
        return max(self._prefill_interval, len(self._running) // _ROWS_PER_STEP_SAVED)

    def _take_forced(self, sequence: Sequence, slot: int, tokens: list[int]) -> int:
        """Append tokens that must follow the newest one, to be computed like a prompt, if that saves enough steps.
        Return how many were appended. Steps in flight sample the first of them."""
        if sequence.state is not SequenceState.DECODE or sequence.slot != slot:
            return 0
        stop = next((place for place, token in enumerate(tokens) if token in sequence.stop_ids), len(tokens))
        forced = tokens[: min(stop, sequence.pending + sequence.remaining)]
        if len(forced) - sequence.pending < self._min_steps_saved():
            return 0
        sequence.token_ids += forced
        sequence.ahead = sequence.pending
        sequence.forced = forced[sequence.pending :]
        sequence.remaining -= len(sequence.forced)
        if sequence.remaining <= 0:
            self.finish(sequence, "length")
        else:
            sequence.state = SequenceState.PREFILL
            self._prefilling.appendleft(sequence)
        return len(forced)

    def cut(self, sequence: Sequence, num_generated: int) -> None:
        """Drop the tokens of a finished answer after the first `num_generated`: forced tokens after a stop word."""
        del sequence.token_ids[sequence.num_prompt + num_generated :]

    def step_failed(self, cause: BaseException | None) -> list[Sequence]:
        """End the sequences with a row in the oldest step in flight, which raised, and return them.

        Their blocks do not enter the prefix cache: only `update` offers blocks to it.
        """
        oldest = self._pop_oldest()
        ended = oldest.live_rows()
        for sequence in ended:
            sequence.error, sequence.cause = f"the step raised {cause!r}", cause
            self.finish(sequence, "error")
        self._lose_copies(oldest)
        self._lift_fence(oldest.step)
        self.counts.failed_steps += 1
        return ended

    def step_dropped(self) -> None:
        """Recompute the rows of the oldest step in flight, which was not run because an earlier one failed."""
        oldest = self._pop_oldest()
        oldest.uncount_tokens()
        for sequence in oldest.live_rows():
            self._recompute(sequence)
        self._lose_copies(oldest)
        self._lift_fence(oldest.step)

    def _pop_oldest(self) -> StepInFlight:
        oldest = self._in_flight.popleft()
        self._last_read = oldest.step
        return oldest

    def _lose_copies(self, lost: StepInFlight) -> None:
        """Recompute the sequences whose copies between device and host belonged to a lost step."""
        for sequence in self.host.copies_lost(lost.step, lost.swaps):
            self._recompute(sequence)

    def _lift_fence(self, step: int) -> None:
        """Free the blocks and slots that were held until step `step` had been read."""
        self.blocks.step_read(step)
        self.host.step_read(step)
        self.slots.step_read(step)

    def reset_cache(self) -> None:
        """Forget all keys and values on device and host. Running sequences are recomputed. No step is in flight."""
        assert not self._in_flight, "steps in flight write KV"
        for request in {sequence.request: None for sequence in (*self._running, *self.waiting)}:
            if not request.prompt_is_scored:
                request.prompt_logprobs.clear()
        for sequence in list(self._running):
            self._preempt(sequence, keep=False)
        self.host.reset()
        self.blocks.clear()

    def clear(self) -> None:
        """Forget all sequences. The engine has ended."""
        for kept in (self._running, self._prefilling, self.admitted, self.prefilled, self.host.swapped):
            kept.clear()
        self._in_flight.clear()
        self.admission.clear()
