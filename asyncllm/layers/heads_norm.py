"""Norms of queries and keys that ranks divide, as their weights belong to heads."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from asyncllm import kernels
from asyncllm.distributed.group import RankGroup, heads_of
from asyncllm.layers.layer import Layer, PartKey
from asyncllm.layers.norm import RMSNorm

__all__ = ["HeadsLayerNorm", "HeadsRMSNorm", "ListedHeadsLayerNorm"]


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
        taken = heads_of(group, self._num_heads)
        self.weight, self._first = nn.Parameter(self.weight[taken], requires_grad=False), taken.start

    def expected_parts(self) -> Mapping[PartKey, tuple[int, ...]]:
        return {("weight", None, None): (self._num_heads, self.weight.shape[1])}

    def load_part(self, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        rotated, rest = tensor[:, : self.paired], tensor[:, self.paired :]
        halves = torch.cat([rotated[:, 0::2], rotated[:, 1::2], rest], 1)
        self.weight.copy_(halves[self._first :][: len(self.weight)])


class ListedHeadsLayerNorm(HeadsLayerNorm):
    """The same, with each head's weight in a separate tensor (StableLM 2 12B)."""

    def expected_parts(self) -> Mapping[PartKey, tuple[int, ...]]:
        return {("weight", None, head): (self.weight.shape[1],) for head in range(self._num_heads)}

    def load_part(self, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        own = (index or 0) - self._first
        if 0 <= own < len(self.weight):
            self.weight[own].copy_(tensor)


class HeadsRMSNorm(RMSNorm):
    """A norm over all heads of a token together, of which a rank has some (OLMo 2, MiniMax-M2)."""

    def __init__(self, num_heads: int, head_dim: int, eps: float) -> None:
        super().__init__(num_heads * head_dim, eps)
        self._num_heads, self._head_dim = num_heads, head_dim
        self._taken = slice(0, num_heads * head_dim)

    def divide(self, group: RankGroup) -> None:
        heads = heads_of(group, self._num_heads)
        self._taken = slice(heads.start * self._head_dim, heads.stop * self._head_dim)
        self.weight = nn.Parameter(self.weight[self._taken], requires_grad=False)

    def expected_parts(self) -> Mapping[PartKey, tuple[int, ...]]:
        return {("weight", None, None): (self._num_heads * self._head_dim,)}

    def load_part(self, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        super().load_part(suffix, part, index, tensor[self._taken])

    def scaled(self, x: Tensor, mean_square: Tensor) -> Tensor:
        """Return the norm of a rank's x [..., size], whose `mean_square` [..., 1] is that of all ranks."""
        return (x * torch.rsqrt(mean_square + self.eps)).to(x.dtype) * self.weight
