"""LoRA for few rows: a program has one row, so any mix of adapters costs only what reading them takes.

The kernels wait for memory and for each other, so that programs which read an adapter once for two or four rows are
slower: 64 rows of Llama-3-8B with one adapter of rank 16 take 1.1 ms per step on an H200, in groups of four 1.9.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.lora import MAX_PARTS, LoRAWeights
from asyncllm.kernels.triton.activation import apply_gate
from asyncllm.kernels.triton.language import release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.launch import launch

__all__ = [
    "MAX_RANK",
    "SPAN",
    "empty_sums",
    "expand_gated_row_kernel",
    "expand_row_kernel",
    "expand_rows",
    "expand_rows_gated",
    "layout_of",
    "part_of",
    "shrink_row_kernel",
    "shrink_rows",
    "sizes_of",
    "splits_of",
]

MAX_RANK = 128
"""Maximum rank of a slot, here and in `lora_groups`: a program has all rows of A and columns of B, and so the fewer
features the higher the rank."""

_NUMBERS = 8192
"""Numbers of a matrix that a program has in registers."""

SPAN = 1024
"""Input features per program of `shrink_row_kernel`. Half as many programs with twice the work are no faster."""


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots_ptr", "ranks_ptr"])
def shrink_row_kernel(
    x_ptr, slots_ptr, a_ptr, ranks_ptr, h_ptr, tokens,
    K: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, SLOT_STRIDE: tl.constexpr, RANKS_STRIDE: tl.constexpr,
    SPAN: tl.constexpr, BLOCK_K: tl.constexpr, BESIDE: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Like `lora.shrink_kernel`; a program has a row, one part's RANK rows of A, and SPAN input features.

    Slots are uploaded with the inputs of the step, before its first kernel, and adapters before the step, so reading
    them waits for no kernel. Without BESIDE the next kernel is the layer's own product, which prefetches its weights.
    With BESIDE that product is the kernel in front, and has released this one after its wait: x is complete, and one
    program waits for the product, for all that follows.
    """
    release_consumers(USE_PDL)
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
    if not BESIDE:
        wait_for_producers(USE_PDL)
    if has_own:
        x_row = x_ptr + row.to(tl.int64) * K
        # From the L2 cache: without a wait, a multiprocessor's own may have what was there before.
        x = tl.load(x_row + first, mask=first < K, other=0.0, cache_modifier=".cg")
        h = tl.sum(a.to(tl.float32) * x.to(tl.float32)[None, :], 1)
        for start in tl.static_range(BLOCK_K, SPAN, BLOCK_K):
            k = first + start
            a = tl.load(a_rows + k[None, :], mask=(k < K)[None, :], other=0.0)
            x = tl.load(x_row + k, mask=k < K, other=0.0, cache_modifier=".cg")
            h += tl.sum(a.to(tl.float32) * x.to(tl.float32)[None, :], 1)
        tl.store(h_ptr + (split.to(tl.int64) * tokens + row) * WIDTH + features, h)
    if BESIDE and row + tl.program_id(1) + split == 0:
        wait_for_producers(USE_PDL)


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
def _shrunk(
    h_ptr, row, part, tokens,
    WIDTH: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, ALL_SPLITS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Return a part of a row of h [SPLITS, tokens, WIDTH], summed and rounded to dtype, as float32 [RANK]."""
    splits = tl.arange(0, ALL_SPLITS)[:, None]
    h_rows = h_ptr + (splits.to(tl.int64) * tokens + row) * WIDTH + part * RANK
    h = tl.load(h_rows + tl.arange(0, RANK)[None, :], mask=splits < SPLITS, other=0.0)
    return round_to(tl.sum(h, 0), dtype).to(tl.float32)


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
        shrunk = _shrunk(h_ptr, row, part, tokens, WIDTH, RANK, SPLITS, ALL_SPLITS, dtype)
        places = y_ptr + row.to(tl.int64) * N + features
        y = tl.load(places, mask=inside, other=0.0).to(tl.float32)
        tl.store(places, round_to(y + tl.sum(b.to(tl.float32) * shrunk[None, :], 1), dtype), mask=inside)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots_ptr", "ranks_ptr"])
def expand_gated_row_kernel(
    h_ptr, slots_ptr, b_ptr, ranks_ptr, y_ptr, out_ptr, tokens,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, SLOT_STRIDE: tl.constexpr, RANKS_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, ALL_SPLITS: tl.constexpr, GELU: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Like `expand_row_kernel` and `activation.gate_kernel` after it: y [tokens, 2 * SIZE] -> out [tokens, SIZE]. A
    program has a row and BLOCK_N features of gate and of up."""
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    row = tl.program_id(0)
    features = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = features < SIZE
    slot = tl.load(slots_ptr + row)
    has_own = slot >= 0
    if has_own:
        has_own = tl.load(ranks_ptr + slot * RANKS_STRIDE) > 0
    b_rows = b_ptr + slot.to(tl.int64) * SLOT_STRIDE + features[:, None] * RANK + tl.arange(0, RANK)[None, :]
    b_gate = tl.load(b_rows, mask=(has_own & inside)[:, None], other=0.0)
    b_up = tl.load(b_rows + SIZE * RANK, mask=(has_own & inside)[:, None], other=0.0)
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    places = y_ptr + row.to(tl.int64) * (2 * SIZE) + features
    gate = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(places + SIZE, mask=inside, other=0.0).to(tl.float32)
    if has_own:
        h_gate = _shrunk(h_ptr, row, 0, tokens, WIDTH, RANK, SPLITS, ALL_SPLITS, dtype)
        h_up = _shrunk(h_ptr, row, 1, tokens, WIDTH, RANK, SPLITS, ALL_SPLITS, dtype)
        gate = round_to(gate + tl.sum(b_gate.to(tl.float32) * h_gate[None, :], 1), dtype).to(tl.float32)
        up = round_to(up + tl.sum(b_up.to(tl.float32) * h_up[None, :], 1), dtype).to(tl.float32)
    tl.store(out_ptr + row.to(tl.int64) * SIZE + features, apply_gate(gate, up, dtype, GELU), mask=inside)


def splits_of(features: int) -> int:
    """Return the number of programs among which the sum over input features is split."""
    return -(-features // SPAN)


def layout_of(lora: LoRAWeights) -> dict[str, Any]:
    """Return the constexprs of all kernels: the slots' WIDTH and RANK, and the distance of their ranks in memory."""
    return {"WIDTH": lora.a.shape[1], "RANK": lora.b.shape[-1], "RANKS_STRIDE": lora.ranks.stride(0)}


def sizes_of(lora: LoRAWeights) -> dict[str, Any]:
    """Return the constexprs that tell a kernel the parts of the output, as `part_of` takes them."""
    sizes = (*lora.sizes, *[0] * (MAX_PARTS - len(lora.sizes)))
    return {f"SIZE_{part}": size for part, size in enumerate(sizes)}


def empty_sums(x: Tensor, lora: LoRAWeights) -> Tensor:
    """Return memory for the result of `shrink_rows`."""
    return torch.empty(splits_of(x.shape[1]), len(x), lora.a.shape[1], dtype=torch.float32, device=x.device)


def shrink_rows(x: Tensor, slots: Tensor, lora: LoRAWeights, h: Tensor, *, beside: bool = False) -> Tensor:
    """Return h, filled with the partial sums [S, R, P * rank] of `kernels.shrink_lora` for contiguous x [R, in], and
    slots of rank at most `MAX_RANK`.

    beside: the last launch is a product of x which releases its consumers after its wait, and whose memory is not h.
    """
    (tokens, k), rank, width = x.shape, lora.b.shape[-1], lora.a.shape[1]
    span = min(SPAN, triton.next_power_of_2(k))
    if tokens:
        launch(
            shrink_row_kernel,
            (tokens, width // rank, len(h)),
            (x, slots, lora.a, lora.ranks, h),
            (tokens,),
            K=k,
            SLOT_STRIDE=lora.a.stride(0),
            SPAN=span,
            BLOCK_K=min(span, _NUMBERS // rank),
            BESIDE=beside,
            **layout_of(lora),
        )
    return h


def expand_rows(y: Tensor, h: Tensor, slots: Tensor, lora: LoRAWeights) -> None:
    """Apply `kernels.expand_lora` to contiguous y [R, out], with h of `shrink_rows`."""
    splits, tokens, _ = h.shape
    block = _NUMBERS // lora.b.shape[-1]
    if tokens:
        launch(
            expand_row_kernel,
            (tokens, sum(triton.cdiv(size, block) for size in lora.sizes), 1),
            (h, slots, lora.b, lora.ranks, y),
            (tokens,),
            SLOT_STRIDE=lora.b.stride(0),
            BLOCK_N=block,
            SPLITS=splits,
            ALL_SPLITS=triton.next_power_of_2(splits),
            **sizes_of(lora),
            **layout_of(lora),
        )


def expand_rows_gated(y: Tensor, h: Tensor, slots: Tensor, lora: LoRAWeights, *, gelu: bool) -> Tensor:
    """Return `kernels.expand_lora_gated` of contiguous y [R, 2 * size], with h of `shrink_rows`, for parts gate and
    up."""
    splits, tokens, _ = h.shape
    size = lora.sizes[0]
    block = _NUMBERS // lora.b.shape[-1] // 2
    out = torch.empty(tokens, size, dtype=y.dtype, device=y.device)
    if tokens:
        launch(
            expand_gated_row_kernel,
            (tokens, triton.cdiv(size, block), 1),
            (h, slots, lora.b, lora.ranks, y, out),
            (tokens,),
            SIZE=size,
            SLOT_STRIDE=lora.b.stride(0),
            BLOCK_N=block,
            SPLITS=splits,
            ALL_SPLITS=triton.next_power_of_2(splits),
            GELU=gelu,
            **layout_of(lora),
        )
    return out
