"""Lists assignments of tokens to experts in blocks of one expert each, which grouped products iterate over.

The host reads nothing back, so the number of blocks is the maximum possible, and those after the last one are empty.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.language import release_consumers, wait_for_producers
from asyncllm.kernels.triton.launch import launch

__all__ = [
    "CHUNKS_EACH",
    "FEW_ASSIGNMENTS",
    "MANY_ASSIGNMENTS",
    "Blocks",
    "Chunk",
    "count_kernel",
    "group",
    "group_kernel",
]


class Chunk(NamedTuple):
    """Number of assignments that `group_kernel` handles together, and number of warps."""

    size: int
    warps: int


FEW_ASSIGNMENTS = Chunk(512, 4)
"""2.3 us for 64 tokens of either model."""
MANY_ASSIGNMENTS = Chunk(2048, 4)

CHUNKS_EACH = 4
"""Number of chunks per program of `group_kernel` if chunks have been counted, which happens if there are at least twice
as many. 8,192 tokens of Qwen3-30B-A3B take 72, 71, 54 and 56 us with 1, 2, 4 and 8; one program per expert took 104."""


class Blocks(NamedTuple):
    """Assignments in blocks of one expert each."""

    experts: Tensor
    """[blocks], -1 for none; if ungrouped, the expert ids themselves."""
    assignments: Tensor
    """[blocks * size] int32: number of each assignment, or the number of assignments for padding; unused if
    ungrouped."""
    size: int
    ungrouped: bool


@triton.jit(do_not_specialize=["num_assignments"])
def count_kernel(
    expert_ids_ptr, counts_ptr, num_assignments,
    PADDED_EXPERTS: tl.constexpr, CHUNK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """One program per chunk of assignments: counts how many each expert has, in counts [chunks, PADDED_EXPERTS]."""
    chunk = tl.program_id(0)
    assignment = chunk * CHUNK + tl.arange(0, CHUNK)
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    ids = tl.load(expert_ids_ptr + assignment, mask=assignment < num_assignments, other=-1).to(tl.int32)
    counts = tl.histogram(tl.maximum(ids, 0), PADDED_EXPERTS, mask=ids >= 0)
    tl.store(counts_ptr + chunk * PADDED_EXPERTS + tl.arange(0, PADDED_EXPERTS), counts)


@triton.jit(do_not_specialize=["num_assignments", "max_blocks"])
def group_kernel(
    expert_ids_ptr,
    counts_ptr,
    assignments_ptr,
    block_experts_ptr,
    num_assignments,
    max_blocks,
    PADDED_EXPERTS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTED: tl.constexpr,
    CHUNKS_EACH: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program per expert: lists its assignments in ascending order from its first block on, then padding. COUNTED:
    one program per expert and CHUNKS_EACH chunks, with the counts of `count_kernel`.

    assignments [max_blocks * BLOCK_TOKENS]: num_assignments for padding. block_experts [max_blocks]: the expert of each
    block, -1 after the last.
    """
    expert = tl.program_id(0)
    experts = tl.arange(0, PADDED_EXPERTS)
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    counts = tl.zeros([PADDED_EXPERTS], tl.int32)
    before = tl.zeros([PADDED_EXPERTS], tl.int32)
    if COUNTED:
        begin = tl.program_id(1) * CHUNKS_EACH * CHUNK
        end = tl.minimum(num_assignments, begin + CHUNKS_EACH * CHUNK)
        for chunk in range(0, (num_assignments + CHUNK - 1) // CHUNK):
            own = tl.load(counts_ptr + chunk * PADDED_EXPERTS + experts)
            counts += own
            before += tl.where(chunk < tl.program_id(1) * CHUNKS_EACH, own, 0)
    else:
        begin = 0
        end = num_assignments
        for start in range(0, num_assignments, CHUNK):
            assignment = start + tl.arange(0, CHUNK)
            exists = assignment < num_assignments
            ids = tl.load(expert_ids_ptr + assignment, mask=exists, other=-1).to(tl.int32)
            counts += tl.histogram(tl.maximum(ids, 0), PADDED_EXPERTS, mask=ids >= 0)
    blocks = (counts + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    first_block = tl.sum(tl.where(experts < expert, blocks, 0), 0)
    own_count = tl.sum(tl.where(experts == expert, counts, 0), 0)
    own_blocks = (own_count + BLOCK_TOKENS - 1) // BLOCK_TOKENS

    if own_count > 0:
        next_place = first_block * BLOCK_TOKENS + tl.sum(tl.where(experts == expert, before, 0), 0)
        for start in range(begin, end, CHUNK):
            assignment = start + tl.arange(0, CHUNK)
            exists = assignment < num_assignments
            mine = tl.load(expert_ids_ptr + assignment, mask=exists, other=-1).to(tl.int32) == expert
            counted = tl.cumsum(mine.to(tl.int32), 0)
            tl.store(assignments_ptr + next_place + counted - 1, assignment, mask=mine)
            next_place += tl.sum(mine.to(tl.int32), 0)
        if tl.program_id(1) == 0:
            padding = first_block * BLOCK_TOKENS + own_count + tl.arange(0, BLOCK_TOKENS)
            tl.store(
                assignments_ptr + padding,
                tl.zeros([BLOCK_TOKENS], tl.int32) + num_assignments,
                mask=padding < (first_block + own_blocks) * BLOCK_TOKENS,
            )
            for start in range(0, own_blocks, 128):
                block = start + tl.arange(0, 128)
                tl.store(
                    block_experts_ptr + first_block + block,
                    tl.zeros([128], tl.int32) + expert,
                    mask=block < own_blocks,
                )
    if (expert == tl.num_programs(0) - 1) & (tl.program_id(1) == 0):
        for start in range(first_block + own_blocks, max_blocks, 128):
            block = start + tl.arange(0, 128)
            tl.store(block_experts_ptr + block, tl.full([128], -1, tl.int32), mask=block < max_blocks)


def group(expert_ids: Tensor, num_experts: int, block_tokens: int) -> Blocks:
    """expert_ids [T, k] -> blocks of block_tokens assignments, ordered by expert, then by assignment."""
    num_assignments = expert_ids.numel()
    used_experts = min(num_experts, num_assignments)
    max_blocks = min(num_assignments, (num_assignments + used_experts * (block_tokens - 1)) // block_tokens)
    assignments = torch.empty(max_blocks * block_tokens, dtype=torch.int32, device=expert_ids.device)
    block_experts = torch.empty(max_blocks, dtype=torch.int32, device=expert_ids.device)
    chunk = FEW_ASSIGNMENTS if num_assignments <= FEW_ASSIGNMENTS.size else MANY_ASSIGNMENTS
    chunks = -(-num_assignments // chunk.size)
    counted = chunks >= 2 * CHUNKS_EACH
    sizes: dict[str, Any] = {
        "num_warps": chunk.warps,
        "PADDED_EXPERTS": triton.next_power_of_2(num_experts),
        "CHUNK": chunk.size,
    }
    counts = assignments
    if counted:
        counts = torch.empty(chunks, triton.next_power_of_2(num_experts), dtype=torch.int32, device=expert_ids.device)
        launch(count_kernel, (chunks, 1, 1), (expert_ids, counts), (num_assignments,), **sizes)
    launch(
        group_kernel,
        (num_experts, -(-chunks // CHUNKS_EACH) if counted else 1, 1),
        (expert_ids, counts, assignments, block_experts),
        (num_assignments, max_blocks),
        BLOCK_TOKENS=block_tokens,
        COUNTED=counted,
        CHUNKS_EACH=CHUNKS_EACH,
        **sizes,
    )
    return Blocks(block_experts, assignments, block_tokens, False)
