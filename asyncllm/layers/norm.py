"""The interface of norms, and RMS norms."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from asyncllm import kernels
from asyncllm.distributed.group import RankGroup
from asyncllm.kernels import RoundedRows, Rounding
from asyncllm.layers.layer import Layer, ParameterOwner

__all__ = ["NoNorm", "Norm", "OffsetRMSNorm", "RMSNorm"]


class Norm(ParameterOwner):
    """A norm of the last axis, times a weight."""

    stored_less: ClassVar[float] = 0.0
    """The difference between the weight and the number that checkpoints store."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x [..., size], of the same dtype."""

    @abstractmethod
    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of residual + x, and residual + x, all [..., size]."""

    def add_rounded(self, x: Tensor, residual: Tensor, rounding: Rounding) -> tuple[RoundedRows, Tensor]:
        """Return the norm of residual + x, rounded, and residual + x, of rows [T, size]."""
        normed, total = self.add(x, residual)
        return kernels.round_rows(normed, rounding), total

    def load_part(self, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        super().load_part(suffix, part, index, tensor)
        if suffix == "weight" and self.stored_less:
            self.weight.add_(self.stored_less)


class RMSNorm(Norm):
    """Divides by the root mean square."""

    ranks: RankGroup | None = None
    """The ranks over which `add` and `add_rounded` sum x, if x is a summand."""

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        if self.ranks is not None:
            return self.ranks.all_reduce_rms_norm(x, residual, self.weight, self.eps)
        return kernels.add_rms_norm(x, residual, self.weight, self.eps)

    def add_rounded(self, x: Tensor, residual: Tensor, rounding: Rounding) -> tuple[RoundedRows, Tensor]:
        if self.ranks is not None:
            x = self.ranks.all_reduce(x)
        return kernels.add_rms_norm_rounded(x, residual, self.weight, self.eps, rounding)


class NoNorm(Norm):
    """Returns x unchanged, instead of a norm."""

    def __init__(self) -> None:
        Layer.__init__(self)

    def forward(self, x: Tensor) -> Tensor:
        return x

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + x
        return total, total


class OffsetRMSNorm(RMSNorm):
    """RMSNorm whose checkpoint stores weight - 1 (Gemma).

    One is added at load, and the sum stays float32, because bfloat16 keeps only 8 bits of 1 + w and Gemma scales in
    float32.
    """

    parameter_dtype = torch.float32
    stored_less = 1.0
