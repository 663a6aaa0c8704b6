"""LoRA for few rows: a program has one row, so any mix of adapters costs only what reading them takes.

`lora` instead multiplies tiles of rows, and reads an adapter once for all rows that have it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.lora import MAX_PARTS, LoRAWeights
from asyncllm.kernels.triton.language import release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.launch import launch

__all__ = [
    "MOST_RANK",
    "MOST_ROWS",
    "add_lora_by_row",
    "expand_row_kernel",
    "part_of",
    "shrink_row_kernel",
    "splits_of",
]

MOST_ROWS = 64
"""For Llama-3-8B's layers with rank 16 on an H200, in ms per step: 64 rows with 64, 8 and 1 adapters take 1.89, 1.31
and 1.17, in tiles 3.39, 1.85 and 1.01; 16 rows with 8 and 1 adapters 0.66 and 0.59, in tiles 1.17 and 0.83; one row
0.44 and 0.75. Reading 64 adapters takes 1.12."""

MOST_RANK = 64
"""Maximum rank of a slot: a program keeps `_NUMBERS` of a matrix in registers."""

_NUMBERS = 8192

_SPAN = 1024
"""Input features per program of `shrink_row_kernel`. Half as many programs with twice the work are no faster."""


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots_ptr", "ranks_ptr"])
def shrink_row_kernel(
    x_ptr, slots_ptr, a_ptr, ranks_ptr, h_ptr, tokens,
    K: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, SLOT_STRIDE: tl.constexpr, RANKS_STRIDE: tl.constexpr,
    SPAN: tl.constexpr, BLOCK_K: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Like `lora.shrink_kernel`; a program has a row, one part's RANK rows of A, and SPAN input features.

    Slots are uploaded with the inputs of the step, before its first kernel, and adapters before the step, so reading
    them waits for no kernel.
    """
    row = tl.program_id(0)
    features = tl.program_id(1) * RANK + tl.arange(0, RANK)
    split = tl.program_id(2)
    columns = tl.arange(0, BLOCK_K)
    slot = tl.load(slots_ptr + row)
    has_own = slot >= 0
    if has_own:
        has_own = tl.load(ranks_ptr + slot * RANKS_STRIDE) > 0
    a_rows = a_ptr + slot.to(tl.int64) * SLOT_STRIDE + features[:, None] * K
    first = split * SPAN + columns
    a = tl.load(a_rows + first[None, :], mask=has_own & (first < K)[None, :], other=0.0)
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    if has_own:
        x_row = x_ptr + row.to(tl.int64) * K
        x = tl.load(x_row + first, mask=first < K, other=0.0)
        h = tl.sum(a.to(tl.float32) * x.to(tl.float32)[None, :], 1)
        for start in tl.static_range(BLOCK_K, SPAN, BLOCK_K):
            k = first + start
            a = tl.load(a_rows + k[None, :], mask=(k < K)[None, :], other=0.0)
            x = tl.load(x_row + k, mask=k < K, other=0.0)
            h += tl.sum(a.to(tl.float32) * x.to(tl.float32)[None, :], 1)
        tl.store(h_ptr + (split.to(tl.int64) * tokens + row) * WIDTH + features, h)


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


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots_ptr", "ranks_ptr"])
def expand_row_kernel(
    h_ptr, slots_ptr, b_ptr, ranks_ptr, y_ptr, tokens,
    SIZE_0: tl.constexpr, SIZE_1: tl.constexpr, SIZE_2: tl.constexpr, SIZE_3: tl.constexpr,
    WIDTH: tl.constexpr, RANK: tl.constexpr, SLOT_STRIDE: tl.constexpr, RANKS_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, ALL_SPLITS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Like `lora.expand_kernel`; a program has a row and BLOCK_N features of one part. ALL_SPLITS: SPLITS rounded up to
    a power of two."""
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    N: tl.constexpr = SIZE_0 + SIZE_1 + SIZE_2 + SIZE_3
    row = tl.program_id(0)
    part, start, end = part_of(tl.program_id(1), SIZE_0, SIZE_1, SIZE_2, SIZE_3, BLOCK_N)
    features = start + tl.arange(0, BLOCK_N)
    r = tl.arange(0, RANK)
    slot = tl.load(slots_ptr + row)
    has_own = slot >= 0
    if has_own:
        has_own = tl.load(ranks_ptr + slot * RANKS_STRIDE) > 0
    inside = has_own & (features < end)
    b_rows = b_ptr + slot.to(tl.int64) * SLOT_STRIDE + features[:, None] * RANK
    b = tl.load(b_rows + r[None, :], mask=inside[:, None], other=0.0)
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    if has_own:
        splits = tl.arange(0, ALL_SPLITS)
        h_rows = h_ptr + (splits[:, None].to(tl.int64) * tokens + row) * WIDTH + part * RANK
        h = tl.load(h_rows + r[None, :], mask=(splits < SPLITS)[:, None], other=0.0)
        shrunk = round_to(tl.sum(h, 0), dtype).to(tl.float32)
        places = y_ptr + row.to(tl.int64) * N + features
        y = tl.load(places, mask=inside, other=0.0).to(tl.float32)
        tl.store(places, round_to(y + tl.sum(b.to(tl.float32) * shrunk[None, :], 1), dtype), mask=inside)


def splits_of(features: int) -> int:
    """Return the number of programs among which the sum over input features is split."""
    return -(-features // _SPAN)


def add_lora_by_row(y: Tensor, x: Tensor, slots: Tensor, lora: LoRAWeights) -> Tensor:
    """`kernels.add_lora` for contiguous y and x with at most `MOST_ROWS` rows, and slots of rank at most
    `MOST_RANK`."""
    (tokens, k), rank, width = x.shape, lora.b.shape[-1], lora.a.shape[1]
    block, splits = _NUMBERS // rank, splits_of(k)
    span = min(_SPAN, triton.next_power_of_2(k))
    h = torch.empty(splits, tokens, width, dtype=torch.float32, device=x.device)
    same: dict[str, Any] = {"WIDTH": width, "RANK": rank, "RANKS_STRIDE": lora.ranks.stride(0)}
    launch(
        shrink_row_kernel,
        (tokens, width // rank, splits),
        (x, slots, lora.a, lora.ranks, h),
        (tokens,),
        K=k,
        SLOT_STRIDE=lora.a.stride(0),
        SPAN=span,
        BLOCK_K=min(span, block),
        **same,
    )
    sizes = (*lora.sizes, *[0] * (MAX_PARTS - len(lora.sizes)))
    launch(
        expand_row_kernel,
        (tokens, sum(triton.cdiv(size, block) for size in sizes), 1),
        (h, slots, lora.b, lora.ranks, y),
        (tokens,),
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
    return y
