"""8-bit experts (`kernels.scaled_experts`): the products of `linear.scaled` in the blocks of `triton.moe`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.scaled import GROUP, RoundedRows, ScaledWeight
from asyncllm.kernels.triton.expert_blocks import Blocks, group
from asyncllm.kernels.triton.language import release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.launch import launch
from asyncllm.kernels.triton.linear.scaled import added_products, operand, products
from asyncllm.kernels.triton.linear.tiles import Tile
from asyncllm.kernels.triton.moe import add_up, tokens_per_block
from asyncllm.kernels.triton.rounded import gate_rounded, round_rows

__all__ = ["TILES", "multiply", "scaled_experts"]

TILES = {16: Tile(64, 16, 4, 4), 32: Tile(64, 32, 4, 4), 64: Tile(128, 64, 4, 4), 128: Tile(128, 128, 8, 4)}
"""By tokens per block. A layer of Qwen3-30B-A3B's experts in fp8 with scales of groups takes 23, 156, 225, 247, 355 and
1,541 us for 1, 16, 64, 256, 1,024 and 8,192 tokens on an H100. The last two are 436 and 2,035 with 8 warps, and 374 and
1,500 in blocks of 128 with tiles of 64 rows. Tiles of 128 rows in blocks of 16 and 32 are as fast. That of 128 tokens,
for single scales, is not timed."""


@triton.jit(do_not_specialize=["num_assignments"])
def scaled_experts_kernel(
    x_ptr, x_scales_ptr, weight_ptr, scales_ptr, y_ptr, assignments_ptr, block_experts_ptr, num_assignments,
    N: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, INTEGER: tl.constexpr, ASSIGNMENTS_PER_X: tl.constexpr,
    UNGROUPED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """y[a] = weight[expert of a] @ x[a // ASSIGNMENTS_PER_X] for every assignment a of a block, BLOCK_N rows of it.

    Codes x [*, K] with scales [*, GROUPS], codes weight [E, N, K] with scales [E, GROUPS, N], y [num_assignments, N].
    BLOCK_K is the size of a group. UNGROUPED: block b is assignment b, block_experts are the expert ids, and
    assignments are not read.
    """
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
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
    # As in `moe.grouped_matmul_kernel`, padding loads nothing.
    x_row = tl.where(filled, assignments // ASSIGNMENTS_PER_X, 0).to(tl.int64)
    lane = tl.arange(0, BLOCK_K)
    w_ptrs = weight_ptr + expert * (N * K) + read[:, None].to(tl.int64) * K + lane[None, :]
    x_ptrs = x_ptr + x_row[:, None] * K + lane[None, :]
    scales_ptr += expert * (GROUPS * N)

    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.int32 if INTEGER and GROUPS == 1 else tl.float32)
    if GROUPS > 1:
        # Triton copies ahead what is multiplied only.
        next_scales = tl.load(scales_ptr + read)
        next_x_scales = tl.load(x_scales_ptr + x_row * GROUPS)
    for step in range(0, (K + BLOCK_K - 1) // BLOCK_K):
        first = step * BLOCK_K
        if EVEN_K:
            w = tl.load(w_ptrs + first)
            x = tl.load(x_ptrs + first, mask=filled[:, None], other=0.0)
        else:
            w = tl.load(w_ptrs + first, mask=(first + lane < K)[None, :], other=0.0)
            x = tl.load(x_ptrs + first, mask=filled[:, None] & (first + lane < K)[None, :], other=0.0)
        if GROUPS > 1:
            factors = next_scales[:, None] * next_x_scales[None, :]
            coming = tl.minimum(step + 1, GROUPS - 1)
            next_scales = tl.load(scales_ptr + coming * N + read)
            next_x_scales = tl.load(x_scales_ptr + x_row * GROUPS + coming)
            acc += products(w, tl.trans(x), INTEGER).to(tl.float32) * factors
        else:
            acc = added_products(w, tl.trans(x), acc, INTEGER)
    total = acc.to(tl.float32)
    if GROUPS == 1:
        total *= tl.load(scales_ptr + read)[:, None] * tl.load(x_scales_ptr + x_row)[None, :]
    y_ptrs = y_ptr + assignments[None, :].to(tl.int64) * N + rows[:, None]
    tl.store(y_ptrs, round_to(total, y_ptr.dtype.element_ty), mask=filled[None, :] & (rows < N)[:, None])


def scaled_experts(x: Tensor, gate_up: ScaledWeight, down: ScaledWeight, weights: Tensor, expert_ids: Tensor) -> Tensor:
    num_tokens, top_k = expert_ids.shape
    num_experts, num_assignments = len(gate_up.codes), expert_ids.numel()
    out = torch.empty_like(x)
    if not num_tokens:
        return out
    if num_assignments <= max(top_k, num_experts // 8):
        ids = expert_ids.view(-1)
        blocks = Blocks(ids, ids, 16, True)
    else:
        # With groups there are two sets of sums, for which registers suffice up to 64 tokens.
        most = 64 if gate_up.rounding.grouped or down.rounding.grouped else 128
        blocks = group(expert_ids, num_experts, min(most, tokens_per_block(num_assignments, num_experts)))
    hidden = torch.empty(num_assignments, gate_up.codes.shape[1], dtype=x.dtype, device=x.device)
    outputs = torch.empty(num_assignments, down.codes.shape[1], dtype=x.dtype, device=x.device)
    multiply(round_rows(x, gate_up.rounding), gate_up, hidden, blocks, top_k=top_k)
    multiply(gate_rounded(hidden, down.rounding), down, outputs, blocks, top_k=1)
    add_up(outputs, weights, out)
    return out


def multiply(rows: RoundedRows, weight: ScaledWeight, y: Tensor, blocks: Blocks, *, top_k: int) -> None:
    """y[a] = weight[expert of a] @ rows[a // top_k] for every assignment a. y [assignments, N]."""
    tile = TILES[blocks.size]
    _, n, k = weight.codes.shape
    launch(
        scaled_experts_kernel,
        (triton.cdiv(n, tile.rows), blocks.experts.shape[0], 1),
        (
            *(operand(rows.codes), rows.scales, operand(weight.codes), weight.scales),
            *(y, blocks.assignments, blocks.experts),
        ),
        (y.shape[0],),
        num_warps=tile.warps,
        num_stages=tile.stages,
        N=n,
        K=k,
        GROUPS=weight.scales.shape[1],
        INTEGER=weight.codes.dtype == torch.int8,
        ASSIGNMENTS_PER_X=top_k,
        UNGROUPED=blocks.ungrouped,
        BLOCK_M=tile.tokens,
        BLOCK_N=tile.rows,
        BLOCK_K=GROUP,
    )
