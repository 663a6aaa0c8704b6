"""Experts for so few tokens that hardly two tokens share one, multiplied without tensor cores.

`first_kernel` computes each assignment's hidden row, including the gate, and `second_kernel` the weighted sum over a
token's experts: nothing is grouped, and no extra launch sums up. A program has some rows of the weights of one expert,
or of each expert of a token in turn. It sums in float32 while its next weights are being loaded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.moe import GATE_SLOPE
from asyncllm.kernels.triton.activation import activate, apply_limited_gate
from asyncllm.kernels.triton.language import release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.launch import launch

__all__ = ["FIRST_TILE", "RowTile", "few_experts", "first_kernel", "second_kernel", "second_tile"]


class RowTile(NamedTuple):
    """A program's tile: `rows` of a weight (counting gate and up), `columns` at a time."""

    rows: int
    columns: int
    warps: int


FIRST_TILE = RowTile(4, 1024, 4)
"""On an H200, both products of a layer, with the best of 5 second tiles, take 30.8 us for one token of
DeepSeek-V2-Lite, 26.2 for one of Qwen3-30B-A3B, 40.7 for two of its tokens, and 163.5 for one of Mixtral-8x7B; blocks
on tensor cores take 37.5, 29.2, 50.0 and 191. Ten other first tiles are as fast or up to 30 % slower."""


def second_tile(columns: int) -> RowTile:
    """Return the tile for second weights with this number of columns."""
    return RowTile(4, 512, 4) if columns <= 1024 else RowTile(4, 1024, 8)


@triton.jit
def _rows_times(x_ptr, weight_ptr, rows, K: tl.constexpr, TILE: tl.constexpr):
    """x [K] times rows [R] of a weight [*, K] -> float32 [R]."""
    R: tl.constexpr = rows.shape[0]
    column = tl.arange(0, TILE)
    weight_ptrs = weight_ptr + rows[:, None] * K + column[None, :]
    coming = tl.load(weight_ptrs, mask=(column < K)[None, :], other=0.0, eviction_policy="evict_first")
    acc = tl.zeros([R, TILE // 8], tl.float32)
    for start in range(0, K, TILE):
        weight = coming.to(tl.float32)
        left = K - start
        coming = tl.load(
            weight_ptrs + start + TILE, mask=(column < left - TILE)[None, :], other=0.0, eviction_policy="evict_first"
        )
        x = tl.load(x_ptr + start + column, mask=column < left, other=0.0).to(tl.float32)
        acc += tl.sum(tl.reshape(weight * x[None, :], [R, TILE // 8, 8]), 2)
    return tl.sum(acc, 1)


@triton.jit
def first_kernel(
    x_ptr, weight_ptr, bias_ptr, ids_ptr, y_ptr,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    LIMIT: tl.constexpr, SLOPE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """x [T, K] times the weights [N, K] of their experts, ids [T, TOP_K] -> y [T * TOP_K, N], or, with GATED, [.., N /
    2] after the gate. One program per tile of rows and assignment. Results of experts on other ranks are not written.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    OUTPUTS: tl.constexpr = N // 2 if GATED else N
    OWN: tl.constexpr = ROWS // 2 if GATED else ROWS
    assignment = tl.program_id(1)
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    expert = tl.load(ids_ptr + assignment)
    if expert < 0:
        return
    first = tl.program_id(0) * OWN
    row = tl.arange(0, ROWS)
    # Rows beyond the last one repeat it, and are not stored.
    rows = tl.minimum(first + row % OWN, OUTPUTS - 1)
    if GATED:
        rows += row // OWN * OUTPUTS
    y = _rows_times(x_ptr + assignment // TOP_K * K, weight_ptr + expert * (N * K), rows, K, TILE)
    if BIAS:
        y += tl.load(bias_ptr + expert * N + rows).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.trans(tl.reshape(y, [2, OWN])))
        y = apply_limited_gate(gate, up, dtype, LIMIT, SLOPE)
    output = first + tl.arange(0, OWN)
    tl.store(y_ptr + assignment * OUTPUTS + output, round_to(y, dtype), mask=output < OUTPUTS)


@triton.jit
def second_kernel(
    x_ptr, weight_ptr, bias_ptr, ids_ptr, weights_ptr, out_ptr,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Write the sum of weights [T, TOP_K] times the rounded products of x [T * TOP_K, K] and their experts' [N, K] to
    out [T, N]. One program per tile of rows and token."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    token = tl.program_id(1)
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = tl.minimum(output, N - 1)
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    total = tl.zeros([ROWS], tl.float32)
    for choice in range(TOP_K):
        assignment = token * TOP_K + choice
        expert = tl.load(ids_ptr + assignment)
        if expert >= 0:
            y = _rows_times(x_ptr + assignment * K, weight_ptr + expert * (N * K), rows, K, TILE)
            if BIAS:
                y += tl.load(bias_ptr + expert * N + rows).to(tl.float32)
            total += tl.load(weights_ptr + assignment) * round_to(y, dtype).to(tl.float32)
    tl.store(out_ptr + token * N + output, round_to(total, dtype), mask=output < N)


def few_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    expert_ids: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    limit: float | None = None,
) -> Tensor:
    """`kernels.fused_experts` for 16-bit dtypes; with `limit` GELU the gate is GELU's."""
    num_tokens, top_k = expert_ids.shape
    first_rows, width, hidden_size = gate_up.shape[1], x.shape[1], down.shape[2]
    gated = first_rows != hidden_size
    second = second_tile(hidden_size)
    hidden = torch.empty(num_tokens * top_k, hidden_size, dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)
    launch(
        first_kernel,
        (triton.cdiv(first_rows, FIRST_TILE.rows), num_tokens * top_k, 1),
        (x, gate_up, x if gate_up_bias is None else gate_up_bias, expert_ids, hidden),
        num_warps=FIRST_TILE.warps,
        N=first_rows,
        K=width,
        TOP_K=top_k,
        GATED=gated,
        BIAS=gate_up_bias is not None,
        LIMIT=limit or 0.0,
        SLOPE=GATE_SLOPE,
        ROWS=FIRST_TILE.rows,
        TILE=FIRST_TILE.columns,
    )
    if not gated:
        hidden = activate(hidden, "squared_relu")
    launch(
        second_kernel,
        (triton.cdiv(width, second.rows), num_tokens, 1),
        (hidden, down, x if down_bias is None else down_bias, expert_ids, weights, out),
        num_warps=second.warps,
        N=width,
        K=hidden_size,
        TOP_K=top_k,
        BIAS=down_bias is not None,
        ROWS=second.rows,
        TILE=second.columns,
    )
    return out
