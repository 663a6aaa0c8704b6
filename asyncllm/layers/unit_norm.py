"""RMS norms without weights."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.layers.layer import Layer
from asyncllm.layers.norm import Norm

__all__ = ["UnitNorm", "UnitStreamNorm", "ones"]


class UnitNorm(Layer):
    """RMS norm of the last axis without a weight (Llama 4's queries and keys)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.size, self.eps = size, eps

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, ones(self.size, x.dtype, x.device), self.eps)


class UnitStreamNorm(Norm):
    """RMS norm of the stream without a weight (nanochat)."""

    def __init__(self, size: int, eps: float) -> None:
        Layer.__init__(self)
        self.size, self.eps = size, eps

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, ones(self.size, x.dtype, x.device), self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.add_rms_norm(x, residual, ones(self.size, x.dtype, x.device), self.eps)


@cache
def ones(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a weight of ones [size], for a norm without a weight."""
    return torch.ones(size, dtype=dtype, device=device)
