"""Resampler: cross attention of learned queries over a picture's features, which yields a fixed number of features (Bai
et al., 2023)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.layers.layer import Layer
from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.vl.towers.parts import Dense, Table

__all__ = ["Resampler", "plane_waves", "resampler_weights"]

THETA = 10000.0


class Resampler(Layer):
    """Maps x [N, T, in] to [N, queries, size] by one cross attention."""

    def __init__(self, num_queries: int, in_size: int, size: int, num_heads: int, eps: float) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.query = Table(num_queries, size)
        self.values = Dense(in_size, size, bias=False) if in_size != size else None
        self.query_norm, self.value_norm = LayerNorm(size, eps), LayerNorm(size, eps)
        self.qkv, self.out = Dense(size, 3 * size), Dense(size, size)

    def forward(self, x: Tensor, key_positions: Tensor, query_positions: Tensor | None = None) -> Tensor:
        """Resample x [N, T, in]. `key_positions` [T, size] and `query_positions` [queries, size] are added to keys and
        queries."""
        values: Tensor = self.value_norm(x if self.values is None else self.values(x))
        queries: Tensor = self.query_norm(self.query())
        if query_positions is not None:
            queries = queries + query_positions
        inputs = queries.expand(len(x), -1, -1), values + key_positions, values
        weights = self.qkv.weight.chunk(3)
        biases = (None,) * 3 if self.qkv.bias is None else self.qkv.bias.chunk(3)
        q, k, v = (
            self._heads(F.linear(each, weight, bias))
            for each, weight, bias in zip(inputs, weights, biases, strict=True)
        )
        attended: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return attended

    def _heads(self, x: Tensor) -> Tensor:
        """Split x [N, T, size] into heads [N, heads, T, size / heads]."""
        return x.view(*x.shape[:2], self._num_heads, -1).transpose(1, 2)


def resampler_weights(source: str, target: str) -> Mapping[str, str]:
    """Return the rows of a weight table from the checkpoint's module `source` to the resampler at `target`."""
    return {
        f"{source}.query": f"{target}.query:weight",
        f"{source}.kv_proj": f"{target}.values",
        f"{source}.ln_q": f"{target}.query_norm",
        f"{source}.ln_kv": f"{target}.value_norm",
        f"{source}.attn.in_proj_weight": f"{target}.qkv:weight",
        f"{source}.attn.in_proj_bias": f"{target}.qkv:bias",
        f"{source}.attn.out_proj": f"{target}.out",
    }


def plane_waves(rows: int, columns: int, size: int, device: torch.device) -> Tensor:
    """Return two-dimensional sinusoidal positions of a grid [rows * columns, size] float32: the first half for the
    column, the second for the row."""
    frequencies = 1.0 / THETA ** (torch.arange(size // 4, dtype=torch.float32, device=device) / (size / 4))
    waves = [
        torch.cat([angles.sin(), angles.cos()], -1)
        for count in (columns, rows)
        for angles in [torch.arange(count, dtype=torch.float32, device=device)[:, None] * frequencies]
    ]
    return torch.cat([waves[0].repeat(rows, 1), waves[1].repeat_interleave(columns, 0)], -1)
