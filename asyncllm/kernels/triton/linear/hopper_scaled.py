"""Products of many tokens in 8 bits for Hopper: `hopper.product_kernel` with codes for operands, plain or gated."""

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
"""Tokens of a tile. Tiles of 192 are slower: 1,789 us for the 1,493 of 8,192 tokens, gate and up of Llama-3-8B."""


def compile_options(*, shares: bool, gated: bool, with_bias: bool) -> dict[str, Any]:
    """Constexprs (but for USE_PDL) and launch options."""
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
    """codes [T, K], T at least 1, with scales [T, 1], times the weight [N, K], whose scales have no groups, plus bias
    [N] -> out [T, N]; with `gated` silu(gate) * up of a weight [2 * N, K], without a bias.

    Codes and `out`, of 16 bits, are contiguous and aligned to 16 bytes; K is a multiple of 16, and N of 8. With
    `shares`, T is at most `TOKENS` times the number of multiprocessors.
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
