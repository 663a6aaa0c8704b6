"""LoRA for many rows with different adapters: rows with the same one are multiplied together, by tensor cores.

`group_rows` runs once per step and forms groups of up to `GROUP` rows of one adapter. Then each layer has two kernels,
whose programs have a group and read its adapter once. Groups and adapters are there before the kernel in front begins,
so both are read before it has ended. `lora_rows` is faster for few rows; `lora` has the kernels for prompts, whose
neighbouring tokens have the same adapter.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.lora import GROUP, LoRAWeights, RowGroups
from asyncllm.kernels.triton.language import dot, release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.launch import launch
from asyncllm.kernels.triton.lora_rows import SPAN, layout_of, part_of, sizes_of, splits_of

__all__ = [
    "A_NUMBERS",
    "B_NUMBERS",
    "expand_group_kernel",
    "expand_groups",
    "group_rows",
    "group_rows_kernel",
    "group_starts_kernel",
    "shrink_group_kernel",
    "shrink_groups",
]

A_NUMBERS = 4096
B_NUMBERS = 8192
"""Numbers of A and of B that a program has in registers at a time. For Llama-3-8B's layers with rank 16 on an H200, 256
rows with 64 adapters and with one take 3.7 and 2.1 ms per step, in tiles of neighbours 8.3 and 1.9."""


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


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["ranks_ptr"])
def expand_group_kernel(
    h_ptr, group_slots_ptr, group_rows_ptr, b_ptr, ranks_ptr, y_ptr, tokens,
    SIZE_0: tl.constexpr, SIZE_1: tl.constexpr, SIZE_2: tl.constexpr, SIZE_3: tl.constexpr,
    WIDTH: tl.constexpr, RANK: tl.constexpr, SLOT_STRIDE: tl.constexpr, RANKS_STRIDE: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Like `lora.expand_kernel`; a program has a group and BLOCK_N features of one part."""
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
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    if has_own:
        y = tl.load(places, mask=inside, other=0.0).to(tl.float32)
        h_rows = h_ptr + rows[:, None].to(tl.int64) * WIDTH + part * RANK + r[None, :]
        h = tl.load(h_rows, mask=is_row, other=0.0)
        for split in tl.static_range(1, SPLITS):
            h += tl.load(h_rows + split * tokens.to(tl.int64) * WIDTH, mask=is_row, other=0.0)
        tl.store(places, round_to(dot(round_to(h, dtype), tl.trans(b), y), dtype), mask=inside)


def group_rows(slots: Tensor) -> RowGroups:
    num_rows = len(slots)
    groups = RowGroups(slots.new_empty(num_rows), slots.new_empty(num_rows, GROUP))
    if num_rows:
        starts = torch.empty_like(slots)
        same: dict[str, Any] = {"GROUP": GROUP, "ALL_ROWS": triton.next_power_of_2(num_rows)}
        launch(group_starts_kernel, (num_rows, 1, 1), (slots, starts), (num_rows,), pdl=False, **same)
        launch(group_rows_kernel, (num_rows + 1, 1, 1), (slots, starts, *groups), (num_rows,), pdl=False, **same)
    return groups


def shrink_groups(x: Tensor, groups: RowGroups, lora: LoRAWeights) -> Tensor:
    """Return the partial sums [S, R, P * rank] of `kernels.shrink_lora` for contiguous x [R, in], whose rows are in
    `groups`, and slots of rank at most `MAX_RANK`."""
    (tokens, k), rank, width = x.shape, lora.b.shape[-1], lora.a.shape[1]
    span = min(SPAN, triton.next_power_of_2(k))
    h = torch.empty(splits_of(k), tokens, width, dtype=torch.float32, device=x.device)
    if tokens:
        launch(
            shrink_group_kernel,
            (_most_groups(tokens, lora), width // rank, len(h)),
            (x, *groups, lora.a, lora.ranks, h),
            (tokens,),
            K=k,
            SLOT_STRIDE=lora.a.stride(0),
            GROUP=GROUP,
            SPAN=span,
            BLOCK_K=min(span, A_NUMBERS // rank),
            **layout_of(lora),
        )
    return h


def expand_groups(y: Tensor, h: Tensor, groups: RowGroups, lora: LoRAWeights) -> None:
    """Apply `kernels.expand_lora` to contiguous y [R, out], with h of `shrink_groups`."""
    splits, tokens, _ = h.shape
    block = B_NUMBERS // lora.b.shape[-1]
    if tokens:
        launch(
            expand_group_kernel,
            (_most_groups(tokens, lora), sum(triton.cdiv(size, block) for size in lora.sizes), 1),
            (h, *groups, lora.b, lora.ranks, y),
            (tokens,),
            SLOT_STRIDE=lora.b.stride(0),
            GROUP=GROUP,
            BLOCK_N=block,
            SPLITS=splits,
            **sizes_of(lora),
            **layout_of(lora),
        )


def _most_groups(rows: int, lora: LoRAWeights) -> int:
    """Return the maximum number of groups: each slot has at most one that is not full."""
    return min(rows, len(lora.a) + rows // GROUP)
