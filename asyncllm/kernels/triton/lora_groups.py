"""LoRA for decode rows, which may each have a different adapter: rows with the same one are multiplied together.

`group_rows` runs once per step and forms groups of up to `GROUP` rows of one adapter. Then each layer has two kernels,
whose programs have a group and read its adapter once. Reading adapters is what they wait for: the groups and adapters
are there before the kernel in front begins, so both are read before it has ended. `lora` has the kernels for prompts,
whose neighbouring tokens have the same adapter.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.lora import GROUP, MAX_PARTS, LoRAWeights, RowGroups
from asyncllm.kernels.triton.language import dot, release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.launch import launch

__all__ = [
    "MOST_RANK",
    "add_lora_in_groups",
    "expand_group_kernel",
    "group_rows",
    "group_rows_kernel",
    "part_of",
    "shrink_group_kernel",
    "splits_of",
]

MOST_RANK = 64
"""Maximum rank of a slot: a program keeps `_A_NUMBERS` or `_B_NUMBERS` of a matrix in registers."""

_A_NUMBERS, _A_WARPS = 4096, 4
_B_NUMBERS, _B_WARPS = 8192, 4

_SPAN = 1024
"""Input features per program of `shrink_group_kernel`."""

_COMPARED = 32
"""Rows that `group_rows_kernel` compares with all rows at a time."""


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots_ptr"])
def group_rows_kernel(
    slots_ptr, group_slots_ptr, group_rows_ptr, num_rows,
    GROUP: tl.constexpr, ALL_ROWS: tl.constexpr, COMPARED: tl.constexpr,
):  # fmt: skip
    """slots [num_rows] -> the groups' slots [num_rows], and rows [num_rows, GROUP] of those that have some.

    A program has a row, and writes its group if the row is the group's first one. Groups are in the order of their
    first rows. One program more ends the list. ALL_ROWS: num_rows rounded up to a power of two.
    """
    row = tl.program_id(0)
    others = tl.arange(0, ALL_ROWS)
    slots = tl.load(slots_ptr + others, mask=others < num_rows, other=-1)
    group = tl.zeros([], dtype=tl.int32)
    for first in range(0, tl.minimum(row, num_rows), COMPARED):
        compared = first + tl.arange(0, COMPARED)
        own = tl.load(slots_ptr + compared, mask=compared < num_rows, other=-1)
        same = (own[:, None] == slots[None, :]) & (others[None, :] < compared[:, None])
        starts = (own >= 0) & (tl.sum(same.to(tl.int32), 1) % GROUP == 0) & (compared < row)
        group += tl.sum(starts.to(tl.int32), 0)
    if row == num_rows:
        tl.store(group_slots_ptr + others, tl.full([ALL_ROWS], -1, tl.int32), mask=(others >= group) & (others < row))
    else:
        slot = tl.load(slots_ptr + row)
        same = (slots == slot).to(tl.int32)
        before = tl.sum(tl.where(others < row, same, 0), 0)
        if (slot >= 0) & (before % GROUP == 0):
            tl.store(group_slots_ptr + group, slot)
            members = group_rows_ptr + group * GROUP
            place = tl.cumsum(same, 0) - same - before
            tl.store(members + place, others, mask=(same > 0) & (place >= 0) & (place < GROUP))
            places = tl.arange(0, GROUP)
            tl.store(members + places, tl.full([GROUP], -1, tl.int32), mask=places >= tl.sum(same, 0) - before)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["ranks_ptr"])
def shrink_group_kernel(
    x_ptr, group_slots_ptr, group_rows_ptr, a_ptr, ranks_ptr, h_ptr, tokens,
    K: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, SLOT_STRIDE: tl.constexpr, RANKS_STRIDE: tl.constexpr,
    GROUP: tl.constexpr, SPAN: tl.constexpr, BLOCK_K: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Like `lora.shrink_kernel`; a program has a group, one part's RANK rows of A, and SPAN input features."""
    group = tl.program_id(0)
    features = tl.program_id(1) * RANK + tl.arange(0, RANK)
    split = tl.program_id(2)
    slot = tl.load(group_slots_ptr + group)
    has_own = slot >= 0
    if has_own:
        has_own = tl.load(ranks_ptr + slot * RANKS_STRIDE) > 0
    rows = tl.load(group_rows_ptr + group * GROUP + tl.arange(0, GROUP), mask=has_own, other=-1)
    a_rows = a_ptr + slot.to(tl.int64) * SLOT_STRIDE + features[:, None] * K
    first = split * SPAN + tl.arange(0, BLOCK_K)
    a = tl.load(a_rows + first[None, :], mask=has_own & (first < K)[None, :], other=0.0)
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    if has_own:
        is_row = (rows >= 0)[:, None]
        x_rows = x_ptr + rows[:, None].to(tl.int64) * K
        x = tl.load(x_rows + first[None, :], mask=is_row & (first < K)[None, :], other=0.0)
        h = dot(x, tl.trans(a), tl.zeros([GROUP, RANK], dtype=tl.float32))
        for start in tl.static_range(BLOCK_K, SPAN, BLOCK_K):
            k = first + start
            a = tl.load(a_rows + k[None, :], mask=(k < K)[None, :], other=0.0)
            x = tl.load(x_rows + k[None, :], mask=is_row & (k < K)[None, :], other=0.0)
            h = dot(x, tl.trans(a), h)
        places = (split.to(tl.int64) * tokens + rows[:, None]) * WIDTH + features[None, :]
        tl.store(h_ptr + places, h, mask=is_row)


@triton.jit
def part_of(
    block,
    SIZE_0: tl.constexpr, SIZE_1: tl.constexpr, SIZE_2: tl.constexpr, SIZE_3: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the part of a layer's output that a block of BLOCK_N features belongs to, the block's first feature, and
    the end of the part. No block spans two parts."""
    END_1: tl.constexpr = SIZE_0 + SIZE_1
    END_2: tl.constexpr = END_1 + SIZE_2
    BLOCKS_0: tl.constexpr = (SIZE_0 + BLOCK_N - 1) // BLOCK_N
    BLOCKS_1: tl.constexpr = BLOCKS_0 + (SIZE_1 + BLOCK_N - 1) // BLOCK_N
    BLOCKS_2: tl.constexpr = BLOCKS_1 + (SIZE_2 + BLOCK_N - 1) // BLOCK_N
    part = (block >= BLOCKS_0).to(tl.int32) + (block >= BLOCKS_1).to(tl.int32) + (block >= BLOCKS_2).to(tl.int32)
    start = tl.where(part == 0, 0, tl.where(part == 1, SIZE_0, tl.where(part == 2, END_1, END_2)))
    end = tl.where(part == 0, SIZE_0, tl.where(part == 1, END_1, tl.where(part == 2, END_2, END_2 + SIZE_3)))
    block -= tl.where(part == 0, 0, tl.where(part == 1, BLOCKS_0, tl.where(part == 2, BLOCKS_1, BLOCKS_2)))
    return part, start + block * BLOCK_N, end


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["ranks_ptr"])
def expand_group_kernel(
    h_ptr, group_slots_ptr, group_rows_ptr, b_ptr, ranks_ptr, y_ptr, tokens,
    SIZE_0: tl.constexpr, SIZE_1: tl.constexpr, SIZE_2: tl.constexpr, SIZE_3: tl.constexpr,
    WIDTH: tl.constexpr, RANK: tl.constexpr, SLOT_STRIDE: tl.constexpr, RANKS_STRIDE: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Like `lora.expand_kernel`; a program has a group and BLOCK_N features of one part.

    The products that y has are those of the kernel in front of `shrink_group_kernel`, which has ended: that kernel
    waits for it before it releases this one.
    """
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    N: tl.constexpr = SIZE_0 + SIZE_1 + SIZE_2 + SIZE_3
    group = tl.program_id(0)
    part, start, end = part_of(tl.program_id(1), SIZE_0, SIZE_1, SIZE_2, SIZE_3, BLOCK_N)
    features = start + tl.arange(0, BLOCK_N)
    r = tl.arange(0, RANK)
    slot = tl.load(group_slots_ptr + group)
    has_own = slot >= 0
    if has_own:
        has_own = tl.load(ranks_ptr + slot * RANKS_STRIDE) > 0
    rows = tl.load(group_rows_ptr + group * GROUP + tl.arange(0, GROUP), mask=has_own, other=-1)
    is_row = (rows >= 0)[:, None]
    inside = is_row & (features < end)[None, :]
    b_rows = b_ptr + slot.to(tl.int64) * SLOT_STRIDE + features[:, None] * RANK
    b = tl.load(b_rows + r[None, :], mask=has_own & (features < end)[:, None], other=0.0)
    places = y_ptr + rows[:, None].to(tl.int64) * N + features[None, :]
    y = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    if has_own:
        h_rows = h_ptr + rows[:, None].to(tl.int64) * WIDTH + part * RANK + r[None, :]
        h = tl.load(h_rows, mask=is_row, other=0.0)
        for split in tl.static_range(1, SPLITS):
            h += tl.load(h_rows + split * tokens.to(tl.int64) * WIDTH, mask=is_row, other=0.0)
        tl.store(places, round_to(dot(round_to(h, dtype), tl.trans(b), y), dtype), mask=inside)


def group_rows(slots: Tensor) -> RowGroups:
    num_rows = len(slots)
    groups = RowGroups(slots.new_empty(num_rows), slots.new_empty(num_rows, GROUP))
    if num_rows:
        launch(
            group_rows_kernel,
            (num_rows + 1, 1, 1),
            (slots, *groups),
            (num_rows,),
            pdl=False,
            GROUP=GROUP,
            ALL_ROWS=triton.next_power_of_2(num_rows),
            COMPARED=_COMPARED,
        )
    return groups


def splits_of(features: int) -> int:
    """Return the number of programs among which the sum over input features is split."""
    return -(-features // _SPAN)


def add_lora_in_groups(y: Tensor, x: Tensor, groups: RowGroups, lora: LoRAWeights) -> None:
    """`kernels.add_lora` for the rows of `groups`, the first ones of contiguous y and x, with slots of rank at most
    `MOST_RANK`."""
    tokens, k, num_slots, rank, width = len(groups.slots), x.shape[1], len(lora.a), lora.b.shape[-1], lora.a.shape[1]
    block, splits = _B_NUMBERS // rank, splits_of(k)
    span = min(_SPAN, triton.next_power_of_2(k))
    # Each slot has at most one group that is not full.
    num_groups = min(tokens, num_slots + tokens // GROUP)
    h = torch.empty(splits, tokens, width, dtype=torch.float32, device=x.device)
    same: dict[str, Any] = {"WIDTH": width, "RANK": rank, "RANKS_STRIDE": lora.ranks.stride(0), "GROUP": GROUP}
    launch(
        shrink_group_kernel,
        (num_groups, width // rank, splits),
        (x, *groups, lora.a, lora.ranks, h),
        (tokens,),
        num_warps=_A_WARPS,
        K=k,
        SLOT_STRIDE=lora.a.stride(0),
        SPAN=span,
        BLOCK_K=min(span, _A_NUMBERS // rank),
        **same,
    )
    sizes = (*lora.sizes, *[0] * (MAX_PARTS - len(lora.sizes)))
    launch(
        expand_group_kernel,
        (num_groups, sum(triton.cdiv(size, block) for size in sizes), 1),
        (h, *groups, lora.b, lora.ranks, y),
        (tokens,),
        num_warps=_B_WARPS,
        SIZE_0=sizes[0],
        SIZE_1=sizes[1],
        SIZE_2=sizes[2],
        SIZE_3=sizes[3],
        SLOT_STRIDE=lora.b.stride(0),
        BLOCK_N=block,
        SPLITS=splits,
        **same,
    )
