"""Normalisation layers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from asyncllm import kernels
from asyncllm.layers.layer import Layer

__all__ = ["OffsetRMSNorm", "RMSNorm"]


class RMSNorm(Layer):
    """Root mean square norm of the last axis, times a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of residual + x, residual + x)."""
        return kernels.add_rms_norm(x, residual, self.weight, self.eps)

    def expected_parts(self) -> Mapping[tuple[str, str | None, int | None], tuple[int, ...]]:
        return {("weight", None, None): tuple(self.weight.shape)}

    def load_part(self, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        self.weight.copy_(tensor)


class OffsetRMSNorm(RMSNorm):
    """RMSNorm whose checkpoint stores weight - 1 (Gemma).

    One is added at load, and the sum stays float32: bfloat16 keeps 8 bits of 1 + w, and Gemma scales in float32.
    """

    parameter_dtype = torch.float32

    def load_part(self, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        self.weight.copy_(tensor).add_(1)
