"""Layer norms."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from asyncllm import kernels
from asyncllm.distributed.group import RankGroup
from asyncllm.layers.layer import Layer, PartKey
from asyncllm.layers.norm import Norm
from asyncllm.layers.unit_norm import ones

__all__ = ["HeadsLayerNorm", "LayerNorm", "ListedHeadsLayerNorm", "OffsetLayerNorm", "UnitLayerNorm"]


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


class HeadsLayerNorm(Layer):
    """Layer norms of queries or keys, with a weight per head and no biases (Command R+). `paired`: see `QKVLinear`."""

    def __init__(self, num_heads: int, size: int, eps: float, *, paired: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, size), requires_grad=False)
        self.eps, self.paired = eps, paired
        self._num_heads, self._first = num_heads, 0

    def forward(self, x: Tensor) -> Tensor:
        """x [T, heads, size] -> [T, heads, size]."""
        wide = x.float()
        return (kernels.layer_norm(wide, torch.ones_like(wide[0, 0]), None, self.eps) * self.weight.float()).to(x.dtype)

    def divide(self, group: RankGroup) -> None:
        # With fewer key heads than ranks, several ranks share one.
        copies = max(group.size // self._num_heads, 1)
        share = max(self._num_heads // group.size, 1)
        self.weight = nn.Parameter(self.weight[:share], requires_grad=False)
        self._first = group.rank // copies * share

    def expected_parts(self) -> Mapping[PartKey, tuple[int, ...]]:
        return {("weight", None, None): (self._num_heads, self.weight.shape[1])}

    def load_part(self, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        turned, rest = tensor[:, : self.paired], tensor[:, self.paired :]
        halves = torch.cat([turned[:, 0::2], turned[:, 1::2], rest], 1)
        self.weight.copy_(halves[self._first :][: len(self.weight)])


class ListedHeadsLayerNorm(HeadsLayerNorm):
    """The same, with each head's weight in a separate tensor (StableLM 2 12B)."""

    def expected_parts(self) -> Mapping[PartKey, tuple[int, ...]]:
        return {("weight", None, head): (self.weight.shape[1],) for head in range(self._num_heads)}

    def load_part(self, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        own = (index or 0) - self._first
        if 0 <= own < len(self.weight):
            self.weight[own].copy_(tensor)
