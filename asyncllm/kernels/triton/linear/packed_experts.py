"""Experts with 4-bit or 8-bit weights (`kernels.packed_experts`), decoded in the products of `triton.moe`'s blocks.

If experts have very many tokens, all weights are expanded first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.moe import GATE_SLOPE
from asyncllm.kernels.packed import MAX_E8M0, PackedWeight
from asyncllm.kernels.triton.expert_blocks import Blocks, group
from asyncllm.kernels.triton.language import INTERPRET, dot, release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.launch import launch
from asyncllm.kernels.triton.linear.packed import codes_of, e2m1_value, expand_experts, factors_of, shifted_words
from asyncllm.kernels.triton.linear.tiles import Tile
from asyncllm.kernels.triton.moe import (
    BLOCKS_PER_GROUP,
    add_up,
    assignments_of,
    fused_experts,
    rows_of,
    store_block,
    tile_of,
    tokens_per_block,
)

__all__ = ["MOST_PER_EXPERT", "TILES", "multiply", "packed_experts"]

TILES = {16: Tile(64, 16, 4, 4), 32: Tile(64, 32, 4, 4), 64: Tile(128, 64, 8, 4)}
"""By tokens per block, as in `linear.packed`. Not timed here. Blocks of 128 spill registers."""

UNGROUPED_TILE = TILES[16]
"""For blocks with one token each. There are few of them, and twice as many rows would halve the number of programs."""

E2M1_TILES = {16: Tile(128, 16, 4, 4), 32: Tile(128, 32, 4, 3), 64: Tile(128, 64, 4, 3)}
"""For e2m1 weights with bfloat16 tokens. On an H200, in us for a layer of gpt-oss's experts in blocks of 16, 32 and 64:
64 tokens 211, 227, -; 128 tokens 275, 229, 284; 256 tokens 451, 324, 291; 512 tokens -, 518, 431. Tiles of 256 rows
take 246, 253 and - for 64 to 128 tokens, and 8 warps 342 to 534 in blocks of 64."""

MOST_EXPONENT = tl.constexpr(MAX_E8M0)

MOST_PER_EXPERT = 512
"""Average number of assignments per expert above which weights are expanded first. Not timed."""


@triton.jit
def _e2m1(words, INDEX: tl.constexpr):
    """Return the e2m1 numbers of codes INDEX of words int16 [R, 32], in float16.

    Exponent and fraction are placed in the last exponent bits and first fraction bits of a float16, which gives its
    smallest numbers, and a multiplication by a power of two scales them up.
    """
    if INTERPRET:
        return round_to(e2m1_value((words >> (4 * INDEX)) & 15), tl.float16)
    else:
        # The code is shifted to the lowest four bits; 0xe00 masks its three lower bits in their final place.
        shifted = words if INDEX == 0 else shifted_words(words, INDEX)
        bits = tl.inline_asm_elementwise(
            "{.reg .b32 s, m, c; shl.b32 s, $1, 12; and.b32 s, s, 0x80008000; shl.b32 m, $1, 9; "
            "lop3.b32 m, m, 0x0e000e00, s, 0xea; mov.b32 c, 0x74007400; mul.rn.f16x2 $0, m, c;}",
            "=r,r", [shifted], dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
        return bits.to(tl.float16, bitcast=True)


@triton.jit
def _scaled_e2m1(words, scales, INDEX: tl.constexpr, SHIFT: tl.constexpr):
    """Return the e2m1 numbers of codes INDEX of words int16 [R, 32] times their scales, e8m0 exponents uint8 [R] of at
    most 128 + SHIFT, and 2 ** -SHIFT, exact in bfloat16.

    The scale and the power of two of `_e2m1` are one factor.
    """
    if INTERPRET:
        factors = factors_of(scales, True)[:, None] * 2.0**-SHIFT
        return round_to(e2m1_value((words >> (4 * INDEX)) & 15) * factors, tl.bfloat16)
    else:
        shifted = words if INDEX == 0 else shifted_words(words, INDEX)
        factors = ((scales.to(tl.int32) + (126 - SHIFT)) << 7).to(tl.int16)[:, None]
        bits = tl.inline_asm_elementwise(
            "{.reg .b32 s, m; shl.b32 s, $1, 12; and.b32 s, s, 0x80008000; shl.b32 m, $1, 6; "
            "lop3.b32 m, m, 0x01c001c0, s, 0xea; mul.rn.bf16x2 $0, m, $2;}",
            "=r,r,r", [shifted, factors], dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
        return bits.to(tl.bfloat16, bitcast=True)


@triton.jit
def _chunk_scales(scale_ptrs, chunk, CHUNK: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, N: tl.constexpr):
    """Return the scales [R] of a chunk's four planes. Planes after the last group get its scales."""
    group = chunk * CHUNK // GROUP
    STEP: tl.constexpr = 32
    return (
        tl.load(scale_ptrs + tl.minimum(group, GROUPS - 1) * N),
        tl.load(scale_ptrs + tl.minimum(group + STEP // GROUP, GROUPS - 1) * N),
        tl.load(scale_ptrs + tl.minimum(group + 2 * STEP // GROUP, GROUPS - 1) * N),
        tl.load(scale_ptrs + tl.minimum(group + 3 * STEP // GROUP, GROUPS - 1) * N),
    )


@triton.jit(do_not_specialize=["num_assignments", "max_blocks"])
def packed_experts_kernel(
    x_ptr, words_ptr, scales_ptr, zeros_ptr, order_ptr, y_ptr, assignments_ptr, block_experts_ptr, bias_ptr,
    num_assignments, max_blocks,
    N: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, FLOATING: tl.constexpr,
    ORDERED: tl.constexpr, ASSIGNMENTS_PER_X: tl.constexpr, SWIGLU: tl.constexpr, BIAS: tl.constexpr,
    LIMIT: tl.constexpr, SLOPE: tl.constexpr, UNGROUPED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCKS_PER_GROUP: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """See `moe.grouped_matmul_kernel`. Weights are words [E, C, N, 32] with scales [E, G, N], exponents if FLOATING,
    zeros [E, G, N] if not FLOATING, and order [E, K] if ORDERED."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    PLANES: tl.constexpr = 16 // BITS
    CHUNK: tl.constexpr = 32 * PLANES
    CHUNKS: tl.constexpr = (K + CHUNK - 1) // CHUNK
    GROUPS: tl.constexpr = 1 if GROUP >= K else K // GROUP
    ONE_SCALE: tl.constexpr = GROUP >= K or GROUP % CHUNK == 0
    MIDDLE: tl.constexpr = 1 << (BITS - 1)
    # A bfloat16 can represent an e2m1 number times any exponent, so sums need no scaling afterwards.
    SCALED_FIRST: tl.constexpr = FLOATING and dtype == tl.bfloat16
    SHIFT: tl.constexpr = MOST_EXPONENT - 128
    OUTPUTS: tl.constexpr = N // 2 if SWIGLU else N
    block, first_output = tile_of(max_blocks, OUTPUTS, BLOCK_N // 2 if SWIGLU else BLOCK_N, BLOCKS_PER_GROUP)
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    expert = tl.load(block_experts_ptr + block).to(tl.int64)
    if expert < 0:
        return
    assignments = assignments_of(block, assignments_ptr, num_assignments, BLOCK_M, UNGROUPED)
    filled = assignments < num_assignments
    # As in `moe.grouped_matmul_kernel`, padding loads nothing.
    x_row = tl.where(filled, assignments // ASSIGNMENTS_PER_X, 0).to(tl.int64)
    read = rows_of(first_output, OUTPUTS, BLOCK_N, SWIGLU)
    lane = tl.arange(0, 32)
    word_ptrs = words_ptr + expert * (CHUNKS * N * 32) + read[:, None] * 32 + lane[None, :]
    scale_ptrs = scales_ptr + expert * (GROUPS * N) + read
    zero_ptrs = zeros_ptr + expert * (GROUPS * N) + read

    # A product on the tensor cores, which have time for it, sums each token's features for every row.
    ones = tl.full([BLOCK_N, 32], 1.0, tl.float32 if INTERPRET else dtype)
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    # Triton does not pipeline loads of less than four bytes per thread, so scales are loaded ahead here.
    if SCALED_FIRST:
        coming_scales = _chunk_scales(scale_ptrs, 0, CHUNK, GROUP, GROUPS, N)
    else:
        next_scales = tl.load(scale_ptrs)
        next_zeros = next_scales if FLOATING else tl.load(zero_ptrs)
    for chunk in range(0, CHUNKS):
        words = tl.load(word_ptrs)
        word_ptrs += N * 32
        if SCALED_FIRST:
            chunk_scales = coming_scales
            coming_scales = _chunk_scales(scale_ptrs, chunk + 1, CHUNK, GROUP, GROUPS, N)
        else:
            total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
            x_sum = total
        for index in tl.static_range(PLANES):
            first = chunk * CHUNK + index * 32
            exists = first + lane < K
            columns = first + lane
            if ORDERED:
                columns = tl.load(order_ptr + expert * K + columns, mask=exists, other=0)
            x_ptrs = x_ptr + x_row[None, :] * K + columns[:, None]
            x = tl.load(x_ptrs, mask=filled[None, :] & exists[:, None], other=0.0)
            if SCALED_FIRST:
                acc = dot(_scaled_e2m1(words, chunk_scales[index], index, SHIFT), x, acc)
            elif FLOATING:
                total = dot(_e2m1(words, index), x, total)
            else:
                total = dot(codes_of(words, index, BITS, dtype), x, total)
                x_sum = dot(ones, x, x_sum)
            if not SCALED_FIRST and (index == PLANES - 1 or not ONE_SCALE):
                scales, zeros = factors_of(next_scales, FLOATING), next_zeros
                coming = tl.minimum((first + 32) // GROUP, GROUPS - 1)
                next_scales = tl.load(scale_ptrs + coming * N)
                if FLOATING:
                    acc += total * scales[:, None]
                else:
                    next_zeros = tl.load(zero_ptrs + coming * N)
                    left = zeros.to(tl.float32) - MIDDLE
                    acc += (total - left[:, None] * x_sum) * scales[:, None]
                total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
                x_sum = total
    if SCALED_FIRST:
        acc *= 2.0**SHIFT
    if BIAS:
        acc += tl.load(bias_ptr + expert * N + read).to(tl.float32)[:, None]
    store_block(acc, y_ptr, assignments, filled, first_output, OUTPUTS, SWIGLU, LIMIT, SLOPE)


def packed_experts(
    x: Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    weights: Tensor,
    expert_ids: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    limit: float | None = None,
) -> Tensor:
    num_tokens, top_k = expert_ids.shape
    num_experts, num_assignments = len(gate_up.words), expert_ids.numel()
    if x.element_size() != 2 or num_assignments > num_experts * MOST_PER_EXPERT:
        first, second = expand_experts(gate_up, x.dtype), expand_experts(down, x.dtype)
        return fused_experts(
            x, first, second, weights, expert_ids, gate_up_bias=gate_up_bias, down_bias=down_bias, limit=limit
        )
    out = torch.empty_like(x)
    if not num_tokens:
        return out
    if num_assignments <= max(top_k, num_experts // 8):
        ids = expert_ids.view(-1)
        blocks = Blocks(ids, ids, UNGROUPED_TILE.tokens, True)
    else:
        size = min(tokens_per_block(num_assignments, num_experts), max(TILES))
        blocks = group(expert_ids, num_experts, size)
    hidden = torch.empty(num_assignments, gate_up.out_features // 2, dtype=x.dtype, device=x.device)
    outputs = torch.empty(num_assignments, down.out_features, dtype=x.dtype, device=x.device)
    multiply(x, gate_up, hidden, blocks, top_k=top_k, swiglu=True, bias=gate_up_bias, limit=limit)
    multiply(hidden, down, outputs, blocks, top_k=1, swiglu=False, bias=down_bias)
    add_up(outputs, weights, out)
    return out


def _scaled_first(weight: PackedWeight, x: Tensor) -> bool:
    """Return whether the kernel scales the weight's numbers before the product."""
    return weight.zeros is None and x.dtype == torch.bfloat16


def multiply(
    x: Tensor,
    weight: PackedWeight,
    y: Tensor,
    blocks: Blocks,
    *,
    top_k: int,
    swiglu: bool,
    bias: Tensor | None = None,
    limit: float | None = None,
) -> None:
    """See `moe.multiply`. x [*, K] is 16-bit, bias [E, N]."""
    tiles = E2M1_TILES if _scaled_first(weight, x) else TILES
    tile = UNGROUPED_TILE if blocks.ungrouped else tiles[blocks.size]
    num_blocks = blocks.experts.shape[0]
    launch(
        packed_experts_kernel,
        (num_blocks * triton.cdiv(y.shape[1], tile.rows // 2 if swiglu else tile.rows), 1, 1),
        (
            *(x, weight.words, weight.scales, weight.scales if weight.zeros is None else weight.zeros),
            *(weight.words if weight.order is None else weight.order, y, blocks.assignments, blocks.experts),
            x if bias is None else bias,
        ),
        (y.shape[0], num_blocks),
        num_warps=tile.warps,
        num_stages=tile.stages,
        N=weight.out_features,
        K=weight.in_features,
        BITS=weight.bits,
        GROUP=weight.group_size,
        FLOATING=weight.zeros is None,
        ORDERED=weight.order is not None,
        ASSIGNMENTS_PER_X=top_k,
        SWIGLU=swiglu,
        BIAS=bias is not None,
        LIMIT=limit or 0.0,
        SLOPE=GATE_SLOPE,
        UNGROUPED=blocks.ungrouped,
        BLOCK_M=tile.tokens,
        BLOCK_N=tile.rows,
        BLOCKS_PER_GROUP=BLOCKS_PER_GROUP,
    )
