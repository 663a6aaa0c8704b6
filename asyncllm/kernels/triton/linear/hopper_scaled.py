"""8-bit products of many tokens for Hopper: `hopper.product_kernel` with codes as operands, plain or gated."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from asyncllm.kernels.scaled import ScaledWeight
from asyncllm.kernels.triton.launch import Configured, TensorMap
from asyncllm.kernels.triton.linear import hopper
from asyncllm.kernels.triton.linear.hopper import CONSUMER_TOKENS, WIDTH, launch_product, product_kernel
from asyncllm.kernels.triton.linear.narrow_scaled import LINE, LINES

__all__ = ["TOKENS", "compile_options", "product"]

TOKENS = 128
"""Tokens of a tile. Tiles of 192 are slower: 1,789 us instead of 1,493 for Llama-3-8B's gate and up at 8,192 tokens."""


def compile_options(*, shares: bool, gated: bool, with_bias: bool) -> dict[str, Any]:
    """Return the constexprs (except USE_PDL) and launch options."""
    return hopper.compile_options(TOKENS, shares=shares, gated=gated, scaled=True, with_bias=with_bias)


def product(
    codes: Tensor,
    scales: Tensor,
    weight: ScaledWeight,
    bias: Tensor | None,
    out: Tensor,
    *,
    shares: bool,
    gated: bool,
) -> None:
    """Multiply codes [T, K] with scales [T, 1] by a weight [N, K] without groups, add bias [N], and write out [T, N].
    With `gated` the result is silu(gate) * up of a weight [2 * N, K] without a bias.

    T is at least 1, and with `shares` at most `TOKENS` times the number of multiprocessors. Codes and the 16-bit `out`
    are contiguous and aligned to 16 bytes; K is a multiple of 16, N of 8.
    """
    maps = (
        TensorMap(codes, (TOKENS, LINE), LINES),
        TensorMap(weight.codes, (WIDTH, LINE), LINES),
        TensorMap(out, (CONSUMER_TOKENS, WIDTH), hopper.LINES),
    )
    kernel = _configured(shares, gated, bias is not None)
    sums = torch.int32 if codes.dtype == torch.int8 else torch.float32
    others = (scales, weight.scales, out if bias is None else bias)
    launch_product(kernel, maps, others, TOKENS, shares=shares, sums=sums)


@functools.cache
def _configured(shares: bool, gated: bool, with_bias: bool) -> Configured:
    return Configured(product_kernel, **compile_options(shares=shares, gated=gated, with_bias=with_bias))
