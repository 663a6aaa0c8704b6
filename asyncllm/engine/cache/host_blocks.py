"""HostBlocks: blocks in host memory, for preempted sequences and for blocks evicted from the device's prefix cache.

Every copy belongs to a step (`SwapPlan`) and runs in the device's order: after all earlier steps, before everything
that its own step writes, and all copies to the host before all copies to the device. Two things follow:

    A device block that is being copied out may be reused at once, even in the same step: it is written later. Steps in
    flight that write the block run earlier, so the copy contains their results.

    A host block may be copied back as soon as the copy to it is planned, because copies never overtake each other.

A host block is fenced like a device block: its last reference ends when the step that copies to or from it has been
read. Otherwise a copy to the host, which runs first, could overwrite it in the very step that copies it back.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from asyncllm.engine.cache.block_groups import BlockGroups, BlockTable
from asyncllm.engine.cache.block_manager import BlockManager
from asyncllm.engine.cache.prefix_cache import PrefixCache
from asyncllm.engine.schedule.sequence import Sequence, SequenceState
from asyncllm.protocol import Limits, SwapPlan

__all__ = ["HostBlocks"]


class HostBlocks:
    """Host blocks, swapped sequences, and the copies of the next step. Called by the scheduler only.

    Blocks are counted as on the device (`BlockManager`). Blocks of swapped sequences are held and those of the prefix
    cache are idle, so a swap may evict cached blocks.
    """

    def __init__(self, limits: Limits, groups: BlockGroups, device: BlockManager, *, swapping: bool) -> None:
        """`swapping`: whether preempted sequences are copied here. Blocks evicted from a prefix cache always are."""
        self._block_size = limits.block_size
        self._groups = groups
        self._min_copied_tokens = limits.min_copied_tokens
        self._device = device
        self._swapping = swapping
        self._cache = PrefixCache() if device.prefix_cache is not None else None
        """Keys of the blocks in host memory, whether or not they are on the device too."""
        self.blocks = BlockManager(limits.num_host_blocks, self._cache)
        self.plan = SwapPlan()
        """Copies of the next step to be scheduled."""
        self.swapped: dict[Sequence, None] = {}
        """Sequences in state SWAPPED. They are also in the waiting queue."""
        self.num_swapped_out = 0
        """Blocks copied to the host since start."""
        self.num_swapped_in = 0
        self.num_fallbacks = 0
        """Preempted sequences that are recomputed because there were too few host blocks."""
        self._step = 0
        """The step that `plan` belongs to."""
        self._last_read = -1
        if limits.num_host_blocks and self._cache is not None:
            device.on_evict = self._keep

    @property
    def _last_copying_step(self) -> int:
        """The newest step that may copy to or from host blocks. Without copies there may be no next step."""
        return self._step if self.plan else self._step - 1

    def take_plan(self, step: int) -> SwapPlan:
        """Return the copies planned for step `step`, which is being scheduled, and begin the next plan."""
        plan, self.plan = self.plan, SwapPlan()
        self._step = step + 1
        return plan

    def step_read(self, step: int) -> None:
        """Note that all steps up to `step` have been read."""
        self._last_read = step
        self.blocks.step_read(step)

    def swap_out(self, sequence: Sequence) -> bool:
        """Plan to copy a running sequence's blocks to the host, before it leaves its row. Return False if there are too
        few host blocks or a copy would be useless; the sequence then has to be recomputed.

        Full blocks that are already in host memory, such as a prompt with several answers, are shared.
        """
        if not self._swapping or not sequence.num_computed or sequence.remaining <= 0:
            return False
        if sequence.request.output_logits:
            # The logits of chunks in flight belong to the row that the sequence is leaving.
            return False
        count, committed = -(-sequence.num_computed // self._block_size), sequence.hashes[: sequence.committed]
        tables: list[BlockTable] = []
        pairs: list[tuple[int, int]] = []
        num_own = num_idle = 0
        for group, table in enumerate(sequence.tables):
            first = max(table.first, self._groups.first_needed(group, sequence.num_computed))
            keys = (self._groups.key(group, key) for key in committed[first:])
            shared = self._cache.match(keys) if self._cache is not None else []
            num_own += count - first - len(shared)
            num_idle += sum(1 for block in shared if self.blocks.is_idle(block))
            tables.append(BlockTable(first, shared))
        if self.blocks.num_available - num_idle < num_own:
            self.num_fallbacks += 1
            return False
        for table in tables:
            self.blocks.share(table.blocks)
        for table, kept in zip(sequence.tables, tables, strict=True):
            allocated = self.blocks.allocate(count - kept.end)
            pairs += zip(table.between(kept.end, count), allocated, strict=True)
            kept.blocks += allocated
        self.plan.swap_out.extend(pairs)
        self.num_swapped_out += len(pairs)
        # Blocks in the device's prefix cache have been read. Steps in flight that write the other blocks may still
        # fail.
        _copy_keys(pairs, self._device.prefix_cache, self._cache)
        sequence.host_tables = tables
        sequence.host_step = self._last_copying_step
        self.swapped[sequence] = None
        return True

    def stored(self, sequence: Sequence, num_found: int, last_block: int) -> list[BlockTable]:
        """Return the host blocks that follow a sequence's first `num_found` blocks, by group; all tables have the same
        end.

        These are its own blocks if it was swapped out; otherwise cached ones up to block `last_block`, if they are
        worth copying.
        """
        if sequence.state is SequenceState.SWAPPED:
            return [
                BlockTable(max(num_found, table.first), table.between(num_found, table.end))
                for table in sequence.host_tables
            ]
        end = num_found
        if self._cache is not None and sequence.request.reuses_prefix and self.blocks.num_blocks:
            end = self._groups.longest(sequence.hashes[:last_block], num_found, self._cache.has)
            if (end - num_found) * self._block_size < self._min_copied_tokens:
                end = num_found
        tables = []
        for group in range(self._groups.count):
            first = max(num_found, self._groups.first_needed(group, end * self._block_size))
            keys = (self._groups.key(group, key) for key in sequence.hashes[first:end])
            tables.append(BlockTable(first, self._cache.match(keys) if self._cache is not None else []))
        return tables

    def swap_in(self, stored: Items[int], blocks: Items[int]) -> None:
        """Plan to copy host blocks, which the caller has shared, to the first of these device blocks in the next step.

        From that step on, the device's prefix cache has the full blocks.
        """
        pairs = list(zip(stored, blocks, strict=False))
        self.plan.swap_in.extend(pairs)
        self.num_swapped_in += len(pairs)
        _copy_keys(pairs, self._cache, self._device.prefix_cache)
        self.blocks.retire(list(stored), self._last_copying_step, self._last_read)

    def release(self, sequence: Sequence) -> None:
        """Return the host blocks, if any, of a sequence that is running again or has ended."""
        if sequence.state is SequenceState.SWAPPED:
            del self.swapped[sequence]
            self.blocks.retire(sequence.host_blocks, sequence.host_step, self._last_read)
            sequence.host_tables = []

    def copies_lost(self, step: int, plan: SwapPlan) -> list[Sequence]:
        """Forget the blocks that the lost step `step` was to copy according to `plan`. Return the swapped sequences
        that own some of them; these have to be recomputed."""
        self._device.forget(block for _, block in plan.swap_in)
        self.blocks.forget(block for _, block in plan.swap_out)
        return [sequence for sequence in self.swapped if sequence.host_step == step]

    def reset(self) -> None:
        """Forget the content of all blocks. Swapped sequences are recomputed. No step is in flight."""
        assert not self.plan, "copies are planned"
        for sequence in list(self.swapped):
            self.release(sequence)
            sequence.state = SequenceState.WAITING
            sequence.num_computed = 0
        self.blocks.clear()

    def _keep(self, key: bytes, block: int) -> None:
        """Copy a block evicted from the device's prefix cache to host memory, if there is space."""
        assert self._cache is not None
        kept = self._cache.match([key])
        if kept:
            # The block's latest use is now, not when it was copied.
            self.blocks.share(kept)
        elif self.blocks.num_available:
            kept = self.blocks.allocate(1)
            self._cache.commit(key, kept[0])
            self.plan.swap_out.append((block, kept[0]))
            self.num_swapped_out += 1
        self.blocks.retire(kept, self._last_copying_step, self._last_read)

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks, sequences and their states agree."""
        self.blocks.check_integrity(sequence.host_blocks for sequence in self.swapped)
        for sequence in self.swapped:
            assert sequence.state is SequenceState.SWAPPED, f"{sequence!r} is not swapped out, but kept as such"
            for group, table in enumerate(sequence.host_tables):
                held, needed = table.end * self._block_size, self._groups.first_needed(group, sequence.num_computed)
                assert held - self._block_size < sequence.num_computed <= held, f"{sequence!r} has lost host blocks"
                assert table.first <= needed, f"{sequence!r} lacks host blocks in its window"


def _copy_keys(pairs: Items[tuple[int, int]], source: PrefixCache | None, destination: PrefixCache | None) -> None:
    """Commit the keys that `source` has for the source blocks to `destination`, for the blocks they are copied to."""
    if source is not None and destination is not None:
        for block, copy in pairs:
            key = source.key_of(block)
            if key is not None:
                destination.commit(key, copy)
