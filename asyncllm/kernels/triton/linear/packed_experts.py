"""Experts with 4-bit or 8-bit weights (`kernels.packed_experts`), decoded in the products of `triton.moe`'s blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.packed import PackedWeight
from asyncllm.kernels.triton.expert_blocks import Blocks, group
from asyncllm.kernels.triton.language import INTERPRET, dot, release_consumers, wait_for_producers
from asyncllm.kernels.triton.launch import launch
from asyncllm.kernels.triton.linear.packed import codes_of, expand_experts, scaled_codes, shifted_codes
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

__all__ = ["LEAST_ROUNDED", "TILES", "multiply", "packed_experts"]

TILES = {16: Tile(64, 16, 4, 4), 32: Tile(128, 32, 4, 3), 64: Tile(128, 64, 4, 3), 128: Tile(128, 128, 4, 3)}
"""By tokens per block. A layer of Qwen3-30B-A3B's experts takes 153, 203, 324, 489 and 1,551 us for 256, 512, 1,024,
2,048 and 8,192 tokens on an H100 (4 bits, bfloat16). With 8 warps in blocks of 64 and 128 it is 272, 419, 655 and
2,198 us from 512 tokens on; with the sums scaled afterwards 193, 354, 540, 847 and 2,821; and with the weights expanded
first 2,097 for 8,192."""

LEAST_ROUNDED = 32
"""As `packed.LEAST_ROUNDED`. Such tiles need no products for the sums of tokens' features."""

UNGROUPED_TILE = TILES[16]
"""For blocks with one token each. There are few of them, and twice as many rows would halve the number of programs."""

LEAST_WIDE = 128
"""Average number of assignments per expert from which blocks have 128 tokens. Those of 64 are as fast up to there."""


@triton.jit(do_not_specialize=["num_assignments", "max_blocks"])
def packed_experts_kernel(
    x_ptr, words_ptr, scales_ptr, zeros_ptr, order_ptr, y_ptr, assignments_ptr, block_experts_ptr, num_assignments,
    max_blocks,
    N: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ORDERED: tl.constexpr,
    ASSIGNMENTS_PER_X: tl.constexpr, SWIGLU: tl.constexpr, UNGROUPED: tl.constexpr, ROUNDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS_PER_GROUP: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """See `moe.grouped_matmul_kernel`. Weights are words [E, C, N, 32] with scales and zeros [E, G, N], and order [E,
    K] if ORDERED. ROUNDED: see `packed.packed_kernel`."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    PLANES: tl.constexpr = 16 // BITS
    CHUNK: tl.constexpr = 32 * PLANES
    CHUNKS: tl.constexpr = (K + CHUNK - 1) // CHUNK
    GROUPS: tl.constexpr = 1 if GROUP >= K else K // GROUP
    ONE_SCALE: tl.constexpr = GROUP >= K or GROUP % CHUNK == 0
    MIDDLE: tl.constexpr = 1 << (BITS - 1)
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

    if not ROUNDED:
        # A product on the tensor cores, which have time for it, sums each token's features for every row.
        ones = tl.full([BLOCK_N, 32], 1.0, tl.float32 if INTERPRET else dtype)
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    # Triton does not pipeline loads of less than four bytes per thread, so scales are loaded ahead here.
    next_scales = tl.load(scale_ptrs)
    next_zeros = tl.load(zero_ptrs)
    for chunk in range(0, CHUNKS):
        words = tl.load(word_ptrs)
        word_ptrs += N * 32
        if not ROUNDED:
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
            if index == 0 or not ONE_SCALE:
                scales, zeros = next_scales, next_zeros.to(tl.float32)
                coming = tl.minimum((first + (CHUNK if ONE_SCALE else 32)) // GROUP, GROUPS - 1)
                next_scales = tl.load(scale_ptrs + coming * N)
                next_zeros = tl.load(zero_ptrs + coming * N)
            if ROUNDED:
                acc = dot(scaled_codes(shifted_codes(words, zeros, index, BITS, dtype), scales, dtype), x, acc)
            else:
                total = dot(codes_of(words, index, BITS, dtype), x, total)
                x_sum = dot(ones, x, x_sum)
                if index == PLANES - 1 or not ONE_SCALE:
                    acc += (total - (zeros - MIDDLE)[:, None] * x_sum) * scales.to(tl.float32)[:, None]
                    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
                    x_sum = total
    store_block(acc, y_ptr, assignments, filled, first_output, OUTPUTS, SWIGLU, 0.0, 0.0)


def packed_experts(
    x: Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    weights: Tensor,
    expert_ids: Tensor,
) -> Tensor:
    num_tokens, top_k = expert_ids.shape
    num_experts, num_assignments = len(gate_up.words), expert_ids.numel()
    if x.element_size() != 2:
        return fused_experts(x, expand_experts(gate_up, x.dtype), expand_experts(down, x.dtype), weights, expert_ids)
    out = torch.empty_like(x)
    if not num_tokens:
        return out
    most = 128 if num_assignments >= LEAST_WIDE * num_experts else 64
    blocks = blocks_of(expert_ids, num_experts, UNGROUPED_TILE.tokens, most)
    hidden = torch.empty(num_assignments, gate_up.out_features // 2, dtype=x.dtype, device=x.device)
    outputs = torch.empty(num_assignments, down.out_features, dtype=x.dtype, device=x.device)
    multiply(x, gate_up, hidden, blocks, top_k=top_k, swiglu=True)
    multiply(hidden, down, outputs, blocks, top_k=1, swiglu=False)
    add_up(outputs, weights, out)
    return out


def blocks_of(expert_ids: Tensor, num_experts: int, ungrouped: int, most: int) -> Blocks:
    """Return the assignments expert_ids [T, k] in blocks of at most `most`, or in blocks of `ungrouped` places with one
    each if they are so few that they rarely share an expert."""
    num_assignments, top_k = expert_ids.numel(), expert_ids.shape[1]
    if num_assignments <= max(top_k, num_experts // 8):
        ids = expert_ids.view(-1)
        return Blocks(ids, ids, ungrouped, True)
    return group(expert_ids, num_experts, min(tokens_per_block(num_assignments, num_experts), most))


def multiply(x: Tensor, weight: PackedWeight, y: Tensor, blocks: Blocks, *, top_k: int, swiglu: bool) -> None:
    """See `moe.multiply`. x [*, K] is 16-bit."""
    tile = UNGROUPED_TILE if blocks.ungrouped else TILES[blocks.size]
    num_blocks = blocks.experts.shape[0]
    launch(
        packed_experts_kernel,
        (num_blocks * triton.cdiv(y.shape[1], tile.rows // 2 if swiglu else tile.rows), 1, 1),
        (
            *(x, weight.words, weight.scales, weight.zeros, weight.words if weight.order is None else weight.order),
            *(y, blocks.assignments, blocks.experts),
        ),
        (y.shape[0], num_blocks),
        num_warps=tile.warps,
        num_stages=tile.stages,
        N=weight.out_features,
        K=weight.in_features,
        BITS=weight.bits,
        GROUP=weight.group_size,
        ORDERED=weight.order is not None,
        ASSIGNMENTS_PER_X=top_k,
        SWIGLU=swiglu,
        UNGROUPED=blocks.ungrouped,
        ROUNDED=tile.tokens >= LEAST_ROUNDED,
        BLOCK_M=tile.tokens,
        BLOCK_N=tile.rows,
        BLOCKS_PER_GROUP=BLOCKS_PER_GROUP,
    )
