"""Layer norms."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from asyncllm import kernels
from asyncllm.layers.layer import Layer
from asyncllm.layers.norm import Norm
from asyncllm.layers.unit_norm import ones

__all__ = ["LayerNorm", "OffsetLayerNorm", "UnitLayerNorm"]


class LayerNorm(Norm):
    """Normalises to mean 0 and variance 1, times a weight, plus a bias if there is one."""

    def __init__(self, size: int, eps: float, *, bias: bool = True) -> None:
        super().__init__(size, eps)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return kernels.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.add_layer_norm(x, residual, self.weight, self.bias, self.eps)


class OffsetLayerNorm(LayerNorm):
    """LayerNorm whose checkpoint stores weight - 1 (Nemotron). The sum has the model's dtype, as in training."""

    stored_less = 1.0


class UnitLayerNorm(Norm):
    """Layer norm without a weight (first generation of OLMo)."""

    def __init__(self, size: int, eps: float) -> None:
        Layer.__init__(self)
        self.size, self.eps = size, eps

    def forward(self, x: Tensor) -> Tensor:
        return kernels.layer_norm(x, ones(self.size, x.dtype, x.device), None, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.add_layer_norm(x, residual, ones(self.size, x.dtype, x.device), None, self.eps)
