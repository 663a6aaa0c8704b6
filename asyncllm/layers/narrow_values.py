"""Attention whose values are narrower than its keys (MiMo-V2).

Values are padded with zeros to the size of keys, so that caches, plans and ops are those of equal sizes; the padding of
the result is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from asyncllm.distributed.group import RankGroup
from asyncllm.kernels import KVCache, Rotation, RoundedRows
from asyncllm.layers.attention import Attention, AttentionConfig
from asyncllm.layers.linear import Linear, MergedLinear, QKVLinear
from asyncllm.layers.step_inputs import StepInputs

__all__ = ["NarrowValueAttention"]


class _NarrowValueQKVLinear(QKVLinear):
    """The projections q, k and v, with `value_dim` features per head of v, scaled and padded to `head_dim`."""

    def __init__(
        self, in_features: int, config: AttentionConfig, *, value_dim: int, value_scale: float, stored_groups: int
    ) -> None:
        num_heads, num_kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        parts = {"q": num_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * value_dim}
        MergedLinear.__init__(self, in_features, parts, bias=config.qkv_bias)
        self.num_heads, self.num_kv_heads, self.stored_kv_heads = num_heads, num_kv_heads, num_kv_heads
        self.head_dim, self.paired = head_dim, 0
        self.value_dim, self.value_scale = value_dim, value_scale
        self.stored_groups = stored_groups

    def _slice_of_part(self, part: str | None, size: int, group: RankGroup) -> slice:
        dim = self.value_dim if part == "v" else self.head_dim
        heads = super()._slice_of_part(part, size // dim, group)
        return slice(heads.start * dim, heads.stop * dim)

    def rope_fill_kv(self, x: Tensor | RoundedRows, rotation: Rotation, cache: KVCache, plan: Tensor) -> Tensor | None:
        return None

    def forward(self, x: Tensor | RoundedRows, step: StepInputs) -> Tensor:
        """x [T, in] -> [T, (H + 2 K) D], as if values had the size of keys."""
        qkv = super().forward(x, step)
        values = qkv[:, self.rows["v"]].view(len(qkv), self.num_kv_heads, self.value_dim) * self.value_scale
        padded = pad(values, (0, self.head_dim - self.value_dim)).flatten(1)
        return torch.cat([qkv[:, : self.rows["v"].start], padded], -1)


class NarrowValueAttention(Attention):
    """Like `Attention`, with `value_dim` features per head of values and of the result, and values multiplied by
    `value_scale`."""

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        config: AttentionConfig,
        *,
        value_dim: int,
        value_scale: float,
        stored_groups: int,
    ) -> None:
        """`stored_groups`: groups of heads in a checkpoint that has q, k and v in one tensor."""
        super().__init__(layer, hidden_size, config)
        self.qkv = _NarrowValueQKVLinear(
            hidden_size, config, value_dim=value_dim, value_scale=value_scale, stored_groups=stored_groups
        )
        self.out = Linear(config.num_heads * value_dim, hidden_size, shard="row", unit=value_dim, bias=config.out_bias)
        self.value_dim = value_dim

    def _attend(self, q: Tensor, step: StepInputs, cache: KVCache) -> Tensor:
        """q [T, H, D] -> [T, H, value_dim]."""
        return super()._attend(q, step, cache)[..., : self.value_dim]
