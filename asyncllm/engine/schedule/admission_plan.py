"""AdmissionPlan: the blocks that a waiting sequence would get, and where their content comes from."""

from __future__ import annotations

from dataclasses import dataclass

from asyncllm.engine.cache.block_groups import BlockGroups, BlockTable
from asyncllm.engine.cache.block_manager import BlockManager
from asyncllm.engine.cache.host_blocks import HostBlocks
from asyncllm.engine.cache.prefix_sharing import PrefixSharing
from asyncllm.engine.schedule.sequence import Sequence, SequenceState

__all__ = ["AdmissionPlan"]


@dataclass(slots=True)
class AdmissionPlan:
    """In each group, a block table begins with shared blocks. The sequence's own blocks follow, the first of which are
    copied from host memory or from a sibling. No block is taken before `take`."""

    cached: int
    """Tokens that are computed already."""
    num_found: int
    """Leading blocks of the sequence that are on the device."""
    shared: list[BlockTable]
    """By group, the found blocks that the sequence still needs."""
    stored: list[list[int]]
    """By group, the blocks in host memory to copy."""
    sources: list[int] | None
    """By group, a sibling's block to copy."""
    num_own: list[int]
    """By group, the number of blocks to allocate."""

    @staticmethod
    def of(
        sequence: Sequence, groups: BlockGroups, sharing: PrefixSharing, host: HostBlocks, *, alone: bool
    ) -> AdmissionPlan:
        """Return the plan for a waiting sequence. `alone`: no other one runs."""
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
            own = max(first, found.end)
            plan.shared.append(BlockTable(first, table.between(first, found.end)))
            plan.stored.append(kept.between(own, kept.end))
            plan.num_own.append(groups.cover(group, first, cached, known, alone=alone) - own)
        return plan

    def num_blocks(self, blocks: BlockManager) -> int:
        """Return how many available blocks the plan takes."""
        idle = sum(1 for table in self.shared for block in table.blocks if blocks.is_idle(block))
        return sum(self.num_own) + idle

    def take(self, blocks: BlockManager, host: HostBlocks) -> tuple[list[BlockTable], list[tuple[int, int]]]:
        """Take the blocks. Return the block tables, and the copies (source block, destination block)."""
        copies = []
        for table, stored in zip(self.shared, self.stored, strict=True):
            blocks.share(table.blocks)
            # Ahead of `allocate`, which may move cached blocks to the host, and these replace others there.
            host.blocks.share(stored)
        for group, table in enumerate(self.shared):
            own = blocks.allocate(self.num_own[group])
            host.swap_in(self.stored[group], own)
            if self.sources is not None:
                copies.append((self.sources[group], own[0]))
            table.blocks += own
        return self.shared, copies
