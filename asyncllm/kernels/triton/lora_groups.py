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
from asyncllm.kernels.triton.language import release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.launch import launch

__all__ = [
    "MOST_RANK",
    "add_lora_in_groups",
    "expand_group_kernel",
    "group_rows",
    "group_rows_kernel",
    "group_starts_kernel",
    "part_of",
    "shrink_group_kernel",
    "splits_of",
]

MOST_RANK = 64
"""Maximum rank of a slot: a program keeps four blocks of `_A_NUMBERS` of A, or one of `_B_NUMBERS` of B, in
registers."""

_A_NUMBERS, _A_WARPS = 4096, 4
_B_NUMBERS, _B_WARPS = 8192, 4


_GROUP = tl.constexpr(GROUP)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots_ptr"])
def group_starts_kernel(slots_ptr, starts_ptr, num_rows, GROUP: tl.constexpr, ALL_ROWS: tl.constexpr):
    """slots [num_rows] -> starts [num_rows] int32: 1 for the first row of each group, and 0. A program has a row.
    ALL_ROWS: num_rows rounded up to a power of two."""
    row = tl.program_id(0)
    others = tl.arange(0, ALL_ROWS)
    slots = tl.load(slots_ptr + others, mask=others < row, other=-1)
    slot = tl.load(slots_ptr + row)
    before = tl.sum((slots == slot).to(tl.int32), 0)
    tl.store(starts_ptr + row, ((slot >= 0) & (before % GROUP == 0)).to(tl.int32))


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots_ptr"])
def group_rows_kernel(
    slots_ptr, starts_ptr, group_slots_ptr, group_rows_ptr, num_rows, GROUP: tl.constexpr, ALL_ROWS: tl.constexpr,
):  # fmt: skip
    """slots and starts [num_rows] -> the groups' slots [num_rows], and rows [num_rows, GROUP] of those that have some.

    A program has a row, and writes its group if it is the group's first one. One program more ends the list.
    """
    row = tl.program_id(0)
    others = tl.arange(0, ALL_ROWS)
    group = tl.sum(tl.load(starts_ptr + others, mask=others < tl.minimum(row, num_rows), other=0), 0)
    if row == num_rows:
        tl.store(group_slots_ptr + others, tl.full([ALL_ROWS], -1, tl.int32), mask=(others >= group) & (others < row))
    elif tl.load(starts_ptr + row) > 0:
        slot = tl.load(slots_ptr + row)
        slots = tl.load(slots_ptr + others, mask=(others >= row) & (others < num_rows), other=-1)
        same = (slots == slot).to(tl.int32)
        place = tl.cumsum(same, 0) - same
        tl.store(group_slots_ptr + group, slot)
        members = group_rows_ptr + group * GROUP
        tl.store(members + place, others, mask=(same > 0) & (place < GROUP))
        places = tl.arange(0, GROUP)
        tl.store(members + places, tl.full([GROUP], -1, tl.int32), mask=places >= tl.sum(same, 0))


@triton.jit
def _group(group_slots_ptr, group_rows_ptr, ranks_ptr, RANKS_STRIDE: tl.constexpr):
    """Return this program's slot, whether it has an adapter for the layer, and its rows, -1 after the last one."""
    group = tl.program_id(0)
    slot = tl.load(group_slots_ptr + group)
    has_own = slot >= 0
    if has_own:
        has_own = tl.load(ranks_ptr + slot * RANKS_STRIDE) > 0
    rows = group_rows_ptr + group * _GROUP
    row_0, row_1 = tl.load(rows).to(tl.int64), tl.load(rows + 1).to(tl.int64)
    row_2, row_3 = tl.load(rows + 2).to(tl.int64), tl.load(rows + 3).to(tl.int64)
    return slot.to(tl.int64), has_own, row_0, row_1, row_2, row_3


@triton.jit
def _shrunk(x_ptr, row, k, a_0, a_1, a_2, a_3, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return four blocks [RANK, BLOCK_K] of A, the first of input features k, times a row of x -> [RANK] float32.

    The blocks' products are added first, so that threads sum up once. A block's rows are as wide as a warp loads at
    once, so that no warp waits for another.
    """
    x_row = x_ptr + row * K + k
    left = tl.where(row >= 0, K - k, 0)
    x_0 = tl.load(x_row, mask=left > 0, other=0.0).to(tl.float32)
    x_1 = tl.load(x_row + BLOCK_K, mask=left > BLOCK_K, other=0.0).to(tl.float32)
    x_2 = tl.load(x_row + 2 * BLOCK_K, mask=left > 2 * BLOCK_K, other=0.0).to(tl.float32)
    x_3 = tl.load(x_row + 3 * BLOCK_K, mask=left > 3 * BLOCK_K, other=0.0).to(tl.float32)
    first = a_0.to(tl.float32) * x_0[None, :] + a_1.to(tl.float32) * x_1[None, :]
    return tl.sum(first + a_2.to(tl.float32) * x_2[None, :] + a_3.to(tl.float32) * x_3[None, :], 1)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["ranks_ptr"])
def shrink_group_kernel(
    x_ptr, group_slots_ptr, group_rows_ptr, a_ptr, ranks_ptr, h_ptr, tokens,
    K: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, SLOT_STRIDE: tl.constexpr, RANKS_STRIDE: tl.constexpr,
    BLOCK_K: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Like `lora.shrink_kernel`; a program has a group, one part's RANK rows of A, and four blocks of input
    features."""
    slot, has_own, row_0, row_1, row_2, row_3 = _group(group_slots_ptr, group_rows_ptr, ranks_ptr, RANKS_STRIDE)
    features = tl.program_id(1) * RANK + tl.arange(0, RANK)
    split = tl.program_id(2)
    k = split * 4 * BLOCK_K + tl.arange(0, BLOCK_K)
    a = a_ptr + slot * SLOT_STRIDE + features[:, None] * K + k[None, :]
    left = tl.where(has_own, K - k, 0)[None, :]
    a_0 = tl.load(a, mask=left > 0, other=0.0)
    a_1 = tl.load(a + BLOCK_K, mask=left > BLOCK_K, other=0.0)
    a_2 = tl.load(a + 2 * BLOCK_K, mask=left > 2 * BLOCK_K, other=0.0)
    a_3 = tl.load(a + 3 * BLOCK_K, mask=left > 3 * BLOCK_K, other=0.0)
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    if has_own:
        places = h_ptr + split.to(tl.int64) * tokens * WIDTH + features
        h_0 = _shrunk(x_ptr, row_0, k, a_0, a_1, a_2, a_3, K, BLOCK_K)
        if row_1 >= 0:
            # All rows are loaded before any result is stored, so that these loads do not wait for each other.
            h_1 = _shrunk(x_ptr, row_1, k, a_0, a_1, a_2, a_3, K, BLOCK_K)
            h_2 = _shrunk(x_ptr, row_2, k, a_0, a_1, a_2, a_3, K, BLOCK_K)
            h_3 = _shrunk(x_ptr, row_3, k, a_0, a_1, a_2, a_3, K, BLOCK_K)
            tl.store(places + row_1 * WIDTH, h_1)
            tl.store(places + row_2 * WIDTH, h_2, mask=row_2 >= 0)
            tl.store(places + row_3 * WIDTH, h_3, mask=row_3 >= 0)
        tl.store(places + row_0 * WIDTH, h_0)


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


@triton.jit
def _expanded(h, y, b, dtype: tl.constexpr):
    """y [BLOCK_N] + h, summed over its splits and rounded to `dtype`, times B [BLOCK_N, RANK], transposed."""
    shrunk = round_to(tl.sum(h, 0), dtype).to(tl.float32)
    return round_to(y.to(tl.float32) + tl.sum(b.to(tl.float32) * shrunk[None, :], 1), dtype)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["ranks_ptr"])
def expand_group_kernel(
    h_ptr, group_slots_ptr, group_rows_ptr, b_ptr, ranks_ptr, y_ptr, tokens,
    SIZE_0: tl.constexpr, SIZE_1: tl.constexpr, SIZE_2: tl.constexpr, SIZE_3: tl.constexpr,
    WIDTH: tl.constexpr, RANK: tl.constexpr, SLOT_STRIDE: tl.constexpr, RANKS_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, ALL_SPLITS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Like `lora.expand_kernel`; a program has a group and BLOCK_N features of one part. ALL_SPLITS: SPLITS rounded up
    to a power of two."""
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    N: tl.constexpr = SIZE_0 + SIZE_1 + SIZE_2 + SIZE_3
    slot, has_own, row_0, row_1, row_2, row_3 = _group(group_slots_ptr, group_rows_ptr, ranks_ptr, RANKS_STRIDE)
    part, start, end = part_of(tl.program_id(1), SIZE_0, SIZE_1, SIZE_2, SIZE_3, BLOCK_N)
    features = start + tl.arange(0, BLOCK_N)
    inside = features < end
    r = tl.arange(0, RANK)
    b_rows = b_ptr + slot * SLOT_STRIDE + features[:, None] * RANK
    b = tl.load(b_rows + r[None, :], mask=(has_own & inside)[:, None], other=0.0)
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    if has_own:
        splits = tl.arange(0, ALL_SPLITS)[:, None]
        is_split = splits < SPLITS
        h = h_ptr + splits.to(tl.int64) * tokens * WIDTH + part * RANK + r[None, :]
        places = y_ptr + features
        h_0, y_0 = tl.load(h + row_0 * WIDTH, mask=is_split, other=0.0), tl.load(places + row_0 * N, mask=inside)
        if row_1 >= 0:
            has_2, has_3 = row_2 >= 0, row_3 >= 0
            h_1, y_1 = tl.load(h + row_1 * WIDTH, mask=is_split, other=0.0), tl.load(places + row_1 * N, mask=inside)
            h_2 = tl.load(h + row_2 * WIDTH, mask=is_split & has_2, other=0.0)
            y_2 = tl.load(places + row_2 * N, mask=inside & has_2)
            h_3 = tl.load(h + row_3 * WIDTH, mask=is_split & has_3, other=0.0)
            y_3 = tl.load(places + row_3 * N, mask=inside & has_3)
            tl.store(places + row_1 * N, _expanded(h_1, y_1, b, dtype), mask=inside)
            tl.store(places + row_2 * N, _expanded(h_2, y_2, b, dtype), mask=inside & has_2)
            tl.store(places + row_3 * N, _expanded(h_3, y_3, b, dtype), mask=inside & has_3)
        tl.store(places + row_0 * N, _expanded(h_0, y_0, b, dtype), mask=inside)


def group_rows(slots: Tensor) -> RowGroups:
    num_rows = len(slots)
    groups = RowGroups(slots.new_empty(num_rows), slots.new_empty(num_rows, GROUP))
    if num_rows:
        starts = torch.empty_like(slots)
        same: dict[str, Any] = {"GROUP": GROUP, "ALL_ROWS": triton.next_power_of_2(num_rows)}
        launch(group_starts_kernel, (num_rows, 1, 1), (slots, starts), (num_rows,), pdl=False, **same)
        launch(group_rows_kernel, (num_rows + 1, 1, 1), (slots, starts, *groups), (num_rows,), pdl=False, **same)
    return groups


def splits_of(features: int, rank: int) -> int:
    """Return the number of programs among which the sum over input features is split."""
    return -(-features // (4 * (_A_NUMBERS // rank)))


def add_lora_in_groups(y: Tensor, x: Tensor, groups: RowGroups, lora: LoRAWeights) -> None:
    """`kernels.add_lora` for the rows of `groups`, the first ones of contiguous y and x, with slots of rank at most
    `MOST_RANK`."""
    tokens, k, num_slots, rank, width = len(groups.slots), x.shape[1], len(lora.a), lora.b.shape[-1], lora.a.shape[1]
    block, splits = _B_NUMBERS // rank, splits_of(k, rank)
    # Each slot has at most one group that is not full.
    num_groups = min(tokens, num_slots + tokens // GROUP)
    h = torch.empty(splits, tokens, width, dtype=torch.float32, device=x.device)
    same: dict[str, Any] = {"WIDTH": width, "RANK": rank, "RANKS_STRIDE": lora.ranks.stride(0)}
    launch(
        shrink_group_kernel,
        (num_groups, width // rank, splits),
        (x, *groups, lora.a, lora.ranks, h),
        (tokens,),
        num_warps=_A_WARPS,
        K=k,
        SLOT_STRIDE=lora.a.stride(0),
        BLOCK_K=_A_NUMBERS // rank,
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
        ALL_SPLITS=triton.next_power_of_2(splits),
        **same,
    )
