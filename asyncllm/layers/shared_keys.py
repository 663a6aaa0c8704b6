"""Attention that uses keys twice: as values of the same layer, or with the values in later layers."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.distributed.group import RankGroup
from asyncllm.kernels import KVCache, Rotation, RoundedRows
from asyncllm.layers.attention import Attention, AttentionConfig
from asyncllm.layers.linear import MergedLinear, QKVLinear
from asyncllm.layers.step_inputs import StepInputs
from asyncllm.layers.unit_norm import UnitNorm

__all__ = ["BorrowingAttention", "NormedValueAttention"]


class _PartialQKVLinear(QKVLinear):
    """The first ones of the projections q, k and v."""

    def __init__(self, in_features: int, config: AttentionConfig, *, parts: str) -> None:
        """`parts`: "q" or "qk"."""
        heads = {"q": config.num_heads, "k": config.num_kv_heads}
        sizes = {part: heads[part] * config.head_dim for part in parts}
        MergedLinear.__init__(self, in_features, sizes, unit=config.head_dim, bias=config.qkv_bias)
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.stored_kv_heads = config.num_kv_heads
        self.head_dim, self.paired = config.head_dim, 0

    def divide(self, group: RankGroup) -> None:
        if "k" in self.rows:
            super().divide(group)
            return
        MergedLinear.divide(self, group)
        self.num_heads = (self.rows["q"].stop - self.rows["q"].start) // self.head_dim
        # The layer that owns the keys divides them in the same way, or refuses to.
        self.num_kv_heads = max(1, self.num_kv_heads // group.size)

    def rope_fill_kv(self, x: Tensor | RoundedRows, rotation: Rotation, cache: KVCache, plan: Tensor) -> Tensor | None:
        return None


class NormedValueAttention(Attention):
    """Like `Attention` with norms of each head; values are normalised too, without a weight. With `keys_as_values` the
    values are the projected keys before these norms."""

    def __init__(self, layer: int, hidden_size: int, config: AttentionConfig, *, keys_as_values: bool) -> None:
        super().__init__(layer, hidden_size, config)
        if keys_as_values:
            self.qkv = _PartialQKVLinear(hidden_size, config, parts="qk")
        self.keys_as_values = keys_as_values
        self.v_norm = UnitNorm(config.head_dim, config.norm_eps)

    def _rotate(self, qkv: Tensor, rotation: Rotation | None, cache: KVCache, plan: Tensor) -> Tensor:
        heads = qkv.view(len(qkv), -1, self.head_dim)
        values = heads[:, -self.num_kv_heads :]
        kept = heads if self.keys_as_values else heads[:, : -self.num_kv_heads]
        normed = self.v_norm(values.contiguous())
        return super()._rotate(torch.cat([kept, normed], 1).flatten(1), rotation, cache, plan)


class BorrowingAttention(Attention):
    """Like `Attention` with norms of queries, over the keys and values written by another layer, `source`, with the
    same heads, window and rotation."""

    def __init__(self, source: int, hidden_size: int, config: AttentionConfig) -> None:
        super().__init__(source, hidden_size, config)
        self.qkv = _PartialQKVLinear(hidden_size, config, parts="q")
        self.k_norm = None

    def _project(self, x: Tensor | RoundedRows, step: StepInputs, cache: KVCache) -> Tensor:
        assert self.q_norm is not None
        heads = self.qkv(x, step).unflatten(1, (-1, self.head_dim))
        q: Tensor = self.q_norm(heads)
        return q if self.rope is None else kernels.apply_rotary(q, step.rotations[self.rope])
