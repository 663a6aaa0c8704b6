"""Products of one row in 8 bits, without tensor cores: a program owns whole rows of the weight, the first of which it
asks for before it waits for the kernel before, as `small.gemv_kernel` does."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.scaled import ScaledWeight
from asyncllm.kernels.triton.language import INTERPRET, e4m3_value, release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.launch import launch
from asyncllm.kernels.triton.linear.small import GemvConfig

__all__ = ["gemv_scaled", "gemv_scaled_kernel"]

_LANE = 16
"""Codes that one thread loads at once, and whose products it adds first."""


@triton.jit
def _value(codes, INTEGER: tl.constexpr):
    """Bytes -> float32."""
    if INTEGER:
        return codes.to(tl.int8, bitcast=True).to(tl.float32)
    elif INTERPRET:
        return e4m3_value(codes)
    else:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def gemv_scaled_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LANE: tl.constexpr, INTEGER: tl.constexpr,
    HAS_BIAS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Bytes x [K] with its scale [1], times BLOCK_N rows of bytes weight [N, K] with scales [N] -> out [N]."""
    release_consumers(USE_PDL)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    w_ptrs = weight_ptr + rows[:, None].to(tl.int64) * K + lane[None, :]
    w_next = tl.load(w_ptrs, eviction_policy="evict_first")
    wait_for_producers(USE_PDL)

    acc = tl.zeros([BLOCK_N, BLOCK_K // LANE], tl.float32)
    for start in range(0, K, BLOCK_K):
        # The next tile of the weight is on its way while this one is multiplied.
        w = _value(w_next, INTEGER)
        w_next = tl.load(w_ptrs + start + BLOCK_K, mask=start + BLOCK_K < K, other=0, eviction_policy="evict_first")
        products = w * _value(tl.load(x_ptr + start + lane), INTEGER)[None, :]
        acc += tl.sum(tl.reshape(products, [BLOCK_N, BLOCK_K // LANE, LANE]), 2)
    y = tl.sum(acc, 1) * tl.load(scales_ptr + rows) * tl.load(x_scale_ptr)
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows).to(tl.float32)
    tl.store(out_ptr + rows, round_to(y, out_ptr.dtype.element_ty))


def gemv_scaled(
    codes: Tensor, scales: Tensor, weight: ScaledWeight, bias: Tensor | None, config: GemvConfig, out: Tensor
) -> None:
    """codes [1, K] with its scale [1, 1], times the weight, whose scales have no groups, plus bias [N] -> out [1, N].

    `config.rows` divides N, `config.columns` divides K.
    """
    n, k = weight.codes.shape
    launch(
        gemv_scaled_kernel,
        (n // config.rows, 1, 1),
        (
            *(codes.view(torch.uint8), scales, weight.codes.view(torch.uint8), weight.scales),
            *(scales if bias is None else bias, out),
        ),
        num_warps=config.warps,
        K=k,
        BLOCK_N=config.rows,
        BLOCK_K=config.columns,
        LANE=_LANE,
        INTEGER=codes.dtype == torch.int8,
        HAS_BIAS=bias is not None,
    )
