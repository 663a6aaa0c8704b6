"""Ops that quantize their result to 8 bits, for a product that would quantize it first (`kernels.scaled`)."""

from __future__ import annotations

from torch import Tensor

from asyncllm.kernels.activation import gelu_tanh_mul, silu_mul
from asyncllm.kernels.dispatch import op
from asyncllm.kernels.norm import add_rms_norm
from asyncllm.kernels.scaled import RoundedRows, Rounding, round_rows

__all__ = ["add_rms_norm_rounded", "gate_rounded"]


@op("rounded:add_rms_norm_rounded")
def add_rms_norm_rounded(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, rounding: Rounding
) -> tuple[RoundedRows, Tensor]:
    """`add_rms_norm` of rows [T, H], with the norm quantized to 8 bits."""
    normed, total = add_rms_norm(x, residual, weight, eps)
    return round_rows(normed, rounding), total


@op("rounded:gate_rounded")
def gate_rounded(x: Tensor, rounding: Rounding, *, gelu: bool = False) -> RoundedRows:
    """`silu_mul`, or `gelu_tanh_mul`, of rows [T, 2I], quantized to 8 bits."""
    return round_rows(gelu_tanh_mul(x) if gelu else silu_mul(x), rounding)
