"""Admission gives waiting sequences a slot and blocks; an `AdmissionPlan` names the blocks and their contents."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice

from asyncllm.engine.cache.block_groups import BlockGroups, BlockTable
from asyncllm.engine.cache.block_manager import BlockManager
from asyncllm.engine.cache.host_blocks import HostBlocks
from asyncllm.engine.cache.prefix_sharing import PrefixSharing
from asyncllm.engine.schedule.adapter_slots import AdapterSlots
from asyncllm.engine.schedule.sequence import Sequence, SequenceState
from asyncllm.engine.schedule.waiting_queue import MAX_PASSED, WaitingQueue
from asyncllm.protocol import Batch

__all__ = ["Admission", "AdmissionPlan", "Slots"]

_MAX_CONSIDERED = 64
"""How many waiting sequences are considered to pass the first one."""


class Slots:
    """Rows of the device's tables. A slot that steps in flight use is free once they have been read. Written by the
    scheduler."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._fenced: deque[tuple[int, int]] = deque()
        """(last step that uses the slot, slot), in the order of these steps."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Number of slots that are free, or will be once the steps in flight have been read."""
        return len(self._free) + len(self._fenced)

    def take(self) -> int:
        """Return a free slot. The caller has checked that there is one."""
        return self._free.pop()

    def retire(self, slot: int, last_step: int, last_read: int) -> None:
        """Free a slot that no step after `last_step` uses, once that step has been read (`last_read`)."""
        if last_step <= last_read:
            self._free.append(slot)
        else:
            self._fenced.append((last_step, slot))

    def step_read(self, step: int) -> None:
        """Free the slots that were held until `step` had been read."""
        while self._fenced and self._fenced[0][0] <= step:
            self._free.append(self._fenced.popleft()[1])

    def check_integrity(self, held: list[int]) -> None:
        """Raise AssertionError unless each slot is either free, fenced or in `held`."""
        slots = sorted([*held, *self._free, *(slot for _, slot in self._fenced)])
        assert slots == list(range(self._num_slots)), f"slots are lost or doubled: {slots}"


@dataclass(slots=True)
class AdmissionPlan:
    """The block tables of a sequence at admission. In each group, shared blocks come first; the sequence's own blocks
    follow, the first of which are copied from host memory or a sibling. No block is taken before `take`."""

    cached: int
    """Number of tokens that are already computed."""
    num_found: int
    """Number of leading blocks that are already on the device."""
    shared: list[BlockTable]
    """By group, the blocks found that the sequence still needs."""
    stored: list[list[int]]
    """By group, the blocks to copy from host memory."""
    sources: list[int] | None
    """By group, the sibling's block to copy."""
    num_own: list[int]
    """By group, the number of blocks to allocate."""

    @staticmethod
    def of(
        sequence: Sequence, groups: BlockGroups, sharing: PrefixSharing, host: HostBlocks, *, alone: bool
    ) -> AdmissionPlan:
        """Return the plan for a waiting sequence. `alone`: no other sequence is running."""
        known, size = len(sequence.token_ids), groups.block_size
        found = sharing.find(sequence)
        if found.sources is not None:
            cached, stored = known - 1, [BlockTable(found.end) for _ in found.tables]
        else:
            stored = host.stored(sequence, found.end, (known - 1) // size)
            cached = max(found.end, stored[0].end) * size
            if sequence.state is SequenceState.SWAPPED:
                cached = max(found.end * size, sequence.num_computed)
        plan = AdmissionPlan(cached, found.end, [], [], found.sources, [])
        for group, (table, kept) in enumerate(zip(found.tables, stored, strict=True)):
            first = groups.first_needed(group, cached)
            first_own = max(first, found.end)
            plan.shared.append(BlockTable(first, table.between(first, found.end)))
            plan.stored.append(kept.between(first_own, kept.end))
            plan.num_own.append(groups.cover(group, first, cached, known, alone=alone) - first_own)
        return plan

    def num_blocks(self, blocks: BlockManager) -> int:
        """Return the number of available blocks that the plan takes."""
        idle = sum(1 for table in self.shared for block in table.blocks if blocks.is_idle(block))
        return sum(self.num_own) + idle

    def take(self, blocks: BlockManager, host: HostBlocks) -> tuple[list[BlockTable], list[tuple[int, int]]]:
        """Take the blocks. Return the block tables, and the copies (source block, destination block)."""
        copies = []
        for table, stored in zip(self.shared, self.stored, strict=True):
            blocks.share(table.blocks)
            # Before `allocate`, which may move cached blocks to the host, where they would replace these.
            host.blocks.share(stored)
        for group, table in enumerate(self.shared):
            allocated = blocks.allocate(self.num_own[group])
            host.swap_in(self.stored[group], allocated)
            if self.sources is not None:
                copies.append((self.sources[group], allocated[0]))
            table.blocks += allocated
        return self.shared, copies


@dataclass(slots=True, kw_only=True)
class Admission:
    """Admits one waiting sequence at a time, while there are slots and blocks. Written by the scheduler."""

    waiting: WaitingQueue
    running: dict[Sequence, None]
    """The scheduler's running sequences."""
    max_running: int
    slots: Slots
    adapters: AdapterSlots
    groups: BlockGroups
    sharing: PrefixSharing
    blocks: BlockManager
    host: HostBlocks
    _without_slot: Sequence | None = None
    """The first waiting sequence, if there is no slot for its adapter."""
    _passed_it: int = 0
    """How many sequences have been admitted ahead of it since then."""

    @property
    def num_free_rows(self) -> int:
        """Number of free rows, that is, of sequences that could be admitted if there were blocks."""
        return min(self.slots.num_free, self.max_running - len(self.running))

    def admit(self, batch: Batch) -> Sequence | None:
        """Give the next waiting sequence a slot and blocks for all its known tokens, and remove it from the queue.

        Its start is added to the batch, whose `last_read` must be set. Return None if slots or blocks are short.
        """
        if self.num_free_rows <= 0:
            return None
        sequence = self._next()
        if sequence is None or sequence.last_step > batch.last_read:
            # Preempted while a step was in flight: its last token is unknown, and so is whether the step failed.
            return None
        if not self._has_adapter_slot(sequence):
            return None
        plan = self._plan(sequence)
        if self._missing_blocks(plan) > 0:
            return None
        tables, copies = plan.take(self.blocks, self.host)
        batch.copies += copies
        self.waiting.admit(sequence, len(sequence.token_ids) - plan.cached)
        if self._without_slot is not None:
            self._passed_it += 1
        sequence.tables, sequence.capacity = tables, self.groups.capacity(tables)
        sequence.slot = self.slots.take()
        if sequence.request.adapter is not None:
            sequence.adapter_slot = self.adapters.take(sequence.request.adapter)
        sequence.num_computed = plan.cached
        sequence.committed = plan.num_found
        batch.starts.append(sequence.slot_start())
        for group, table in enumerate(tables):
            batch.new_blocks.append((sequence.slot, group, table.first, list(table.blocks)))
        return sequence

    def finds_room(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence can be admitted once the steps in flight have been read."""
        if len(self.running) == self.max_running or not self.slots.num_available:
            return False
        if not self._has_adapter_slot(sequence):
            return False
        return self._missing_blocks(self._plan(sequence)) <= self.blocks.num_fenced

    def clear(self) -> None:
        """Forget all sequences. The engine has ended."""
        self._without_slot = None
        self.waiting.clear()

    def _next(self) -> Sequence | None:
        """Return the sequence to admit next. If there is no slot for the first one's adapter, others of the same
        priority that have a slot, or no adapter, may pass it, at most `MAX_PASSED` in a row."""
        first = self.waiting.first()
        if first is None or self.waiting.quality is not None or self._has_adapter_slot(first):
            self._without_slot = None
            return first
        if first is not self._without_slot:
            self._without_slot, self._passed_it = first, 0
        if self._passed_it < MAX_PASSED:
            priority = first.request.policy.priority
            for sequence in islice(self.waiting, _MAX_CONSIDERED):
                if sequence.request.policy.priority == priority and self._has_adapter_slot(sequence):
                    return sequence
        return first

    def _has_adapter_slot(self, sequence: Sequence) -> bool:
        """Return whether the sequence has no adapter, or its adapter has a slot or can get one."""
        return sequence.request.adapter is None or self.adapters.has_room(sequence.request.adapter)

    def _plan(self, sequence: Sequence) -> AdmissionPlan:
        return AdmissionPlan.of(sequence, self.groups, self.sharing, self.host, alone=not self.running)

    def _missing_blocks(self, plan: AdmissionPlan) -> int:
        """Return how many blocks an admission lacks."""
        # Reserving one block per group and running sequence keeps an admission from causing a preemption right away.
        reserve = len(self.running) * self.groups.count
        return plan.num_blocks(self.blocks) + reserve - self.blocks.num_available
