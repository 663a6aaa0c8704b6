"""LoRA by row: a product with A [rank, in] that shrinks a row, and one with B [out, rank] that expands it. `lora_rows`
and `lora_groups` have the kernels for rows that may each have a different adapter.

These are for prompts. Rows are not sorted. A program has a tile of rows, and processes the adapters that occur in it,
mostly one, one after the other: each is multiplied by the whole tile, and a row keeps the result of its own adapter.
Nothing is summed across adapters, so a row's bits do not depend on its neighbours' (zero times infinity is not zero).

With few tiles, nearly all the time is spent reading A, so the sum over the input features is split among programs;
`expand_kernel` adds their parts in order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.lora import FEW_ROWS, LoRAWeights, RowGroups, ShrunkRows
from asyncllm.kernels.triton.activation import gelu_tanh_mul, silu_mul
from asyncllm.kernels.triton.language import dot, release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.launch import launch
from asyncllm.kernels.triton.lora_groups import expand_groups, shrink_groups
from asyncllm.kernels.triton.lora_rows import (
    MAX_RANK,
    empty_sums,
    expand_rows,
    expand_rows_gated,
    layout_of,
    part_of,
    shrink_rows,
    sizes_of,
)

__all__ = [
    "BLOCK_K",
    "BLOCK_N",
    "BLOCK_T",
    "expand_kernel",
    "expand_lora",
    "expand_lora_gated",
    "shrink_kernel",
    "shrink_lora",
    "splits_of",
]

BLOCK_T = 64
"""Number of rows per tile."""

BLOCK_N = 128
"""Number of output features per program of `expand_kernel`."""

_BLOCK_R = 64
"""Maximum number of rows of A, or columns of B, that a program has at a time."""

_FEW = 512
"""Number of rows up to which their tiles are too few to fill a device."""

BLOCK_K = 128
"""Number of input features that a program of `shrink_kernel` multiplies at a time."""

_SPAN = 512
"""Input features per program if there are few rows."""

_MAX_SPLITS = 4

_NO_SLOT = tl.constexpr(2**30)


@triton.jit
def _next_slot(slots, slot):
    """Return the smallest slot above `slot`, or _NO_SLOT."""
    return tl.min(tl.where(slots > slot, slots, _NO_SLOT), 0)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots_ptr", "ranks_ptr"])
def shrink_kernel(
    x_ptr, slots_ptr, a_ptr, ranks_ptr, h_ptr, tokens,
    K: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, SLOT_STRIDE: tl.constexpr, RANKS_STRIDE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """x [tokens, K] times A of each row's adapter, transposed -> h [SPLITS, tokens, WIDTH] float32, partial sums.

    a: [slots, WIDTH, K], slots SLOT_STRIDE apart. WIDTH: RANK for each part of the output. h of rows without an adapter
    is not written.
    """
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    first = tl.program_id(1) * BLOCK_R
    split = tl.program_id(2)
    slots = tl.load(slots_ptr + rows, mask=rows < tokens, other=-1)
    columns = tl.arange(0, BLOCK_K)
    x_rows = x_ptr + rows[:, None].to(tl.int64) * K
    features = first + tl.arange(0, BLOCK_R)
    h = tl.zeros([BLOCK_T, BLOCK_R], dtype=tl.float32)
    slot = _next_slot(slots, -1)
    while slot < _NO_SLOT:
        own = slots == slot
        if tl.load(ranks_ptr + slot * RANKS_STRIDE) > first % RANK:
            a_rows = a_ptr + slot.to(tl.int64) * SLOT_STRIDE + features[:, None] * K
            acc = tl.zeros([BLOCK_T, BLOCK_R], dtype=tl.float32)
            for step in range(STEPS * split // SPLITS, STEPS * (split + 1) // SPLITS):
                k = step * BLOCK_K + columns
                inside = (k < K)[None, :]
                x = tl.load(x_rows + k[None, :], mask=own[:, None] & inside, other=0.0)
                a = tl.load(a_rows + k[None, :], mask=inside, other=0.0)
                acc = dot(x, tl.trans(a), acc)
            h = tl.where(own[:, None], acc, h)
        slot = _next_slot(slots, slot)
    places = (split.to(tl.int64) * tokens + rows[:, None]) * WIDTH + features[None, :]
    tl.store(h_ptr + places, h, mask=(slots >= 0)[:, None])


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots_ptr", "ranks_ptr"])
def expand_kernel(
    h_ptr, slots_ptr, b_ptr, ranks_ptr, y_ptr, tokens,
    SIZE_0: tl.constexpr, SIZE_1: tl.constexpr, SIZE_2: tl.constexpr, SIZE_3: tl.constexpr,
    WIDTH: tl.constexpr, RANK: tl.constexpr, SLOT_STRIDE: tl.constexpr, RANKS_STRIDE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, SPLITS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """y [tokens, N] += h, summed over SPLITS and rounded to y's dtype, times B of each row's adapter, transposed.

    b: [slots, N, RANK], slots SLOT_STRIDE apart. N is the sum of SIZE_0 to SIZE_3, the parts' features; a program has a
    block of one part.
    """
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    N: tl.constexpr = SIZE_0 + SIZE_1 + SIZE_2 + SIZE_3
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    part, start, end = part_of(tl.program_id(1), SIZE_0, SIZE_1, SIZE_2, SIZE_3, BLOCK_N)
    features = start + tl.arange(0, BLOCK_N)
    slots = tl.load(slots_ptr + rows, mask=rows < tokens, other=-1)
    slot = _next_slot(slots, -1)
    if slot < _NO_SLOT:
        has_own = (slots >= 0)[:, None]
        inside = (features < end)[:, None]
        h_rows = h_ptr + rows[:, None].to(tl.int64) * WIDTH + part * RANK
        total = tl.zeros([BLOCK_T, BLOCK_N], dtype=tl.float32)
        for first in tl.static_range(0, RANK, BLOCK_R):
            r = first + tl.arange(0, BLOCK_R)[None, :]
            h = tl.load(h_rows + r, mask=has_own, other=0.0)
            for split in tl.static_range(1, SPLITS):
                h += tl.load(h_rows + split * tokens.to(tl.int64) * WIDTH + r, mask=has_own, other=0.0)
            slot = _next_slot(slots, -1)
            while slot < _NO_SLOT:
                if tl.load(ranks_ptr + slot * RANKS_STRIDE) > first:
                    b_rows = b_ptr + slot.to(tl.int64) * SLOT_STRIDE + features[:, None] * RANK
                    b = tl.load(b_rows + r, mask=inside, other=0.0)
                    own = (slots == slot)[:, None]
                    of_slot = dot(round_to(tl.where(own, h, 0.0), dtype), tl.trans(b), tl.zeros_like(total))
                    total += tl.where(own, of_slot, 0.0)
                slot = _next_slot(slots, slot)
        places = y_ptr + rows[:, None].to(tl.int64) * N + features[None, :]
        mask = has_own & (features < end)[None, :]
        y = tl.load(places, mask=mask, other=0.0).to(tl.float32)
        tl.store(places, round_to(y + total, dtype), mask=mask)


def splits_of(rows: int, features: int) -> int:
    """Return the number of programs among which the sum over the input `features` is split."""
    return max(1, min(_MAX_SPLITS, features // _SPAN)) if rows <= _FEW else 1


def shrink_lora(
    x: Tensor, slots: Tensor, lora: LoRAWeights, *, num_single: int = 0, groups: RowGroups | None = None
) -> ShrunkRows:
    x = x.contiguous()
    tokens, features = x.shape
    single = len(groups.slots) if groups is not None else tokens if tokens <= FEW_ROWS else num_single
    if lora.b.shape[-1] > MAX_RANK:
        # The order of summation does not depend on how many they are.
        first = _shrink_tiles(x[:single], slots[:single], lora, splits_of(0, features))
    elif groups is not None:
        first = shrink_groups(x[:single], groups, lora)
    else:
        own = x[:single]
        first = shrink_rows(own, slots[:single], lora, empty_sums(own, lora))
    rest = _shrink_tiles(x[single:], slots[single:], lora, splits_of(tokens - single, features))
    return ShrunkRows(first, rest)


def expand_lora(
    y: Tensor, shrunk: ShrunkRows, slots: Tensor, lora: LoRAWeights, *, groups: RowGroups | None = None
) -> Tensor:
    y = y.contiguous()
    single = shrunk.first.shape[1]
    if lora.b.shape[-1] > MAX_RANK:
        _expand_tiles(y[:single], shrunk.first, slots[:single], lora)
    elif groups is not None:
        expand_groups(y[:single], shrunk.first, groups, lora)
    else:
        expand_rows(y[:single], shrunk.first, slots[:single], lora)
    _expand_tiles(y[single:], shrunk.rest, slots[single:], lora)
    return y


def expand_lora_gated(
    y: Tensor,
    shrunk: ShrunkRows,
    slots: Tensor,
    lora: LoRAWeights,
    *,
    groups: RowGroups | None = None,
    gelu: bool = False,
) -> Tensor:
    by_row = groups is None and not shrunk.rest.shape[1] and lora.b.shape[-1] <= MAX_RANK
    if by_row and len(lora.sizes) == 2:
        return expand_rows_gated(y.contiguous(), shrunk.first, slots, lora, gelu=gelu)
    y = expand_lora(y, shrunk, slots, lora, groups=groups)
    return gelu_tanh_mul(y) if gelu else silu_mul(y)


def _shrink_tiles(x: Tensor, slots: Tensor, lora: LoRAWeights, splits: int) -> Tensor:
    (rows, k), rank, width = x.shape, lora.b.shape[-1], lora.a.shape[1]
    h = torch.empty(splits, rows, width, dtype=torch.float32, device=x.device)
    if rows:
        block_r = min(rank, _BLOCK_R)
        launch(
            shrink_kernel,
            (-(-rows // BLOCK_T), width // block_r, splits),
            (x, slots, lora.a, lora.ranks, h),
            (rows,),
            K=k,
            SLOT_STRIDE=lora.a.stride(0),
            BLOCK_K=BLOCK_K,
            **_tiles_of(h, lora),
        )
    return h


def _expand_tiles(y: Tensor, h: Tensor, slots: Tensor, lora: LoRAWeights) -> None:
    rows = h.shape[1]
    if rows:
        launch(
            expand_kernel,
            (-(-rows // BLOCK_T), sum(-(-size // BLOCK_N) for size in lora.sizes), 1),
            (h, slots, lora.b, lora.ranks, y),
            (rows,),
            SLOT_STRIDE=lora.b.stride(0),
            BLOCK_N=BLOCK_N,
            **sizes_of(lora),
            **_tiles_of(h, lora),
        )


def _tiles_of(h: Tensor, lora: LoRAWeights) -> dict[str, Any]:
    return {
        "BLOCK_T": BLOCK_T,
        "BLOCK_R": min(lora.b.shape[-1], _BLOCK_R),
        "SPLITS": len(h),
        **layout_of(lora),
    }
