"""Attention and MLPs whose weights several layers share, each with low-rank products of its own (Zamba 2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from asyncllm import kernels
from asyncllm.kernels import KVCache, RoundedRows, Rounding
from asyncllm.layers.attention import Attention, AttentionConfig
from asyncllm.layers.layer import Layer
from asyncllm.layers.linear import Linear, MergedLinear
from asyncllm.layers.linear_method import Activation
from asyncllm.layers.mlp import GatedMLP
from asyncllm.layers.step_inputs import StepInputs

__all__ = ["LowRankProduct", "SharedAttention", "SharedMLP"]


class LowRankProduct(Layer):
    """x [T, in] -> up(down(x)) [T, out]."""

    def __init__(self, in_features: int, rank: int, up: Linear) -> None:
        super().__init__()
        self.down = Linear(in_features, rank, shard="replicated")
        self.up = up

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        out: Tensor = self.up(self.down(x, step), step)
        return out


class SharedAttention(Attention):
    """Attention from x [T, in_features] to [T, hidden], with its own cache, and with the weights of the `first` use
    unless it is that one."""

    def __init__(
        self,
        layer: int,
        in_features: int,
        hidden_size: int,
        config: AttentionConfig,
        *,
        first: SharedAttention | None,
        rank: int | None,
    ) -> None:
        """`rank`: rank of the products that this use adds to q, k and v; None: no products."""
        super().__init__(layer, in_features, config)
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.out = Linear(heads * dim, hidden_size, shard="row", unit=dim, bias=config.out_bias)
        if first is not None:
            self.qkv, self.out = first.qkv, first.out
            self.qkv.has_several_uses = self.out.has_several_uses = True
        self.added = None
        if rank is not None:
            self.added = nn.ModuleDict(
                {
                    part: LowRankProduct(in_features, rank, Linear(rank, count * dim, shard="column", unit=dim))
                    for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
                }
            )

    def _project(self, x: Tensor | RoundedRows, step: StepInputs, cache: KVCache) -> Tensor:
        if self.added is None:
            return super()._project(x, step, cache)
        rotation = None if self.rope is None else step.rotations[self.rope]
        added = torch.cat([each(x, step) for each in self.added.values()], -1)
        return self._rotate(self.qkv(x, step) + added, rotation, cache, self._cache_write(step, cache))

    def rounding(self, step: StepInputs) -> Rounding | None:
        return None if self.added is not None else super().rounding(step)


class SharedMLP(GatedMLP):
    """Like `GatedMLP`, with the weights of the `first` use unless it is that one."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation,
        bias: bool,
        first: SharedMLP | None,
        rank: int | None,
    ) -> None:
        """`rank`: rank of the product that this use adds to gate and up; None: no product."""
        super().__init__(hidden_size, intermediate_size, activation=activation, bias=bias)
        if first is not None:
            self.gate_up, self.down = first.gate_up, first.down
            self.gate_up.has_several_uses = self.down.has_several_uses = True
        self.added = None
        if rank is not None:
            up = MergedLinear(rank, {"gate": intermediate_size, "up": intermediate_size})
            self.added = LowRankProduct(hidden_size, rank, up)

    def rounding(self, step: StepInputs) -> Rounding | None:
        return None

    def forward(self, x: Tensor | RoundedRows, step: StepInputs) -> Tensor:
        both = self.gate_up(x, step)
        if self.added is not None:
            both = both + self.added(x, step)
        gate, up = both.chunk(2, -1)
        out: Tensor = self.down(kernels.activate(gate.contiguous(), self.activation) * up, step)
        return out
