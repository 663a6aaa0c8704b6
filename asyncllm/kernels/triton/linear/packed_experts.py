"""Experts with weights of 4 or 8 bits (`kernels.packed_experts`), decoded in the products of `triton.moe`'s blocks.

Where an expert has very many tokens, all weights are expanded first, and once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.packed import PackedWeight
from asyncllm.kernels.triton.activation import silu_mul
from asyncllm.kernels.triton.language import dot, release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.launch import launch
from asyncllm.kernels.triton.linear.packed import expand_experts, plane
from asyncllm.kernels.triton.linear.tiles import Tile
from asyncllm.kernels.triton.moe import Blocks, add_up, fused_experts, group, tokens_per_block

__all__ = ["MOST_PER_EXPERT", "TILES", "multiply", "packed_experts"]

TILES = {16: Tile(64, 16, 4, 4), 32: Tile(64, 32, 4, 4), 64: Tile(128, 64, 8, 4)}
"""By tokens per block: those of `linear.packed`. Not measured here. Blocks of 128 spill registers."""

MOST_PER_EXPERT = 512
"""Assignments an expert has on average, above which weights are expanded first. Not measured."""


@triton.jit(do_not_specialize=["num_assignments"])
def packed_experts_kernel(
    x_ptr, words_ptr, scales_ptr, zeros_ptr, order_ptr, y_ptr, assignments_ptr, block_experts_ptr, num_assignments,
    N: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ORDERED: tl.constexpr,
    ASSIGNMENTS_PER_X: tl.constexpr, UNGROUPED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """y[a] = weight[expert of a] @ x[a // ASSIGNMENTS_PER_X] for every assignment a of a block, BLOCK_N rows of it.

    x [*, K], words [E, C, N, 32], scales and zeros [E, G, N], order [E, K] if ORDERED, y [num_assignments, N].
    UNGROUPED: block b is assignment b, block_experts are the expert ids and assignments are not read.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    PLANES: tl.constexpr = 16 // BITS
    CHUNK: tl.constexpr = 32 * PLANES
    CHUNKS: tl.constexpr = (K + CHUNK - 1) // CHUNK
    GROUPS: tl.constexpr = 1 if GROUP >= K else K // GROUP
    block = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    read = rows if N % BLOCK_N == 0 else tl.minimum(rows, N - 1)
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    expert = tl.load(block_experts_ptr + block).to(tl.int64)
    if expert < 0:
        return
    own = tl.arange(0, BLOCK_M)
    assignments = (
        tl.where(own == 0, block, num_assignments) if UNGROUPED else tl.load(assignments_ptr + block * BLOCK_M + own)
    )
    filled = assignments < num_assignments
    # Padding computes the first row once more; its results are not stored.
    x_row = tl.where(filled, assignments // ASSIGNMENTS_PER_X, 0).to(tl.int64)
    lane = tl.arange(0, 32)
    word_ptrs = words_ptr + expert * (CHUNKS * N * 32) + read[:, None] * 32 + lane[None, :]
    scales_ptr += expert * (GROUPS * N)
    zeros_ptr += expert * (GROUPS * N)

    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for chunk in range(0, CHUNKS):
        words = tl.load(word_ptrs)
        word_ptrs += N * 32
        for index in tl.static_range(PLANES):
            first = chunk * CHUNK + index * 32
            exists = first + lane < K
            columns = first + lane
            if ORDERED:
                columns = tl.load(order_ptr + expert * K + columns, mask=exists, other=0)
            x = tl.load(x_ptr + x_row[None, :] * K + columns[:, None], mask=exists[:, None], other=0.0)
            scale_group = tl.minimum(first // GROUP, GROUPS - 1)
            scales = tl.load(scales_ptr + scale_group * N + read).to(tl.float32)
            zeros = tl.load(zeros_ptr + scale_group * N + read).to(tl.float32)
            weight = plane(words, zeros, index, BITS, dtype)
            acc += dot(weight, x, tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)) * scales[:, None]
    y_ptrs = y_ptr + assignments[None, :].to(tl.int64) * N + rows[:, None]
    tl.store(y_ptrs, round_to(acc, y_ptr.dtype.element_ty), mask=filled[None, :] & (rows < N)[:, None])


def packed_experts(x: Tensor, gate_up: PackedWeight, down: PackedWeight, weights: Tensor, expert_ids: Tensor) -> Tensor:
    num_tokens, top_k = expert_ids.shape
    num_experts, num_assignments = len(gate_up.words), expert_ids.numel()
    if x.element_size() != 2 or num_assignments > num_experts * MOST_PER_EXPERT:
        first, second = expand_experts(gate_up, x.dtype), expand_experts(down, x.dtype)
        return fused_experts(x, first, second, weights, expert_ids)
    out = torch.empty_like(x)
    if not num_tokens:
        return out
    if num_assignments <= max(top_k, num_experts // 8):
        ids = expert_ids.view(-1)
        blocks = Blocks(ids, ids, 16, True)
    else:
        size = min(tokens_per_block(num_assignments, num_experts), max(TILES))
        blocks = group(expert_ids, num_experts, size)
    hidden = torch.empty(num_assignments, gate_up.out_features, dtype=x.dtype, device=x.device)
    outputs = torch.empty(num_assignments, down.out_features, dtype=x.dtype, device=x.device)
    multiply(x, gate_up, hidden, blocks, top_k=top_k)
    multiply(silu_mul(hidden), down, outputs, blocks, top_k=1)
    add_up(outputs, weights, out)
    return out


def multiply(x: Tensor, weight: PackedWeight, y: Tensor, blocks: Blocks, *, top_k: int) -> None:
    """y[a] = weight[expert of a] @ x[a // top_k] for every assignment a. x [*, K] of 16 bits, y [assignments, N]."""
    tile = TILES[blocks.size]
    n = weight.out_features
    launch(
        packed_experts_kernel,
        (triton.cdiv(n, tile.rows), blocks.experts.shape[0], 1),
        (
            *(x, weight.words, weight.scales, weight.zeros),
            *(weight.words if weight.order is None else weight.order, y, blocks.assignments, blocks.experts),
        ),
        (y.shape[0],),
        num_warps=tile.warps,
        num_stages=tile.stages,
        N=n,
        K=weight.in_features,
        BITS=weight.bits,
        GROUP=weight.group_size,
        ORDERED=weight.order is not None,
        ASSIGNMENTS_PER_X=top_k,
        UNGROUPED=blocks.ungrouped,
        BLOCK_M=tile.tokens,
        BLOCK_N=tile.rows,
    )
