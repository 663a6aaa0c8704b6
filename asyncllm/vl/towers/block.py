"""Blocks of vision transformers, with attention over all of an image."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from asyncllm.layers.layer import Layer
from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.layers.linear_method import PartKey
from asyncllm.layers.norm import Norm
from asyncllm.vl.towers.parts import ACTIVATIONS, Dense, Scale, TowerActivation

__all__ = ["Attention", "Block", "JoinedQKV"]


class JoinedQKV(Dense):
    """Queries, keys and values in one product; checkpoints have them apart or together."""

    def expected_parts(self) -> Mapping[PartKey, tuple[int, ...]]:
        return {
            (suffix, part, None): (len(each) // 3, *each.shape[1:])
            for suffix, each in self.named_parameters(recurse=False)
            for part in ("q", "k", "v")
        }

    def load_part(self, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        self.get_parameter(suffix).chunk(3)["qkv".index(part or "q")].copy_(tensor)


class Attention(Layer):
    """Each token of a picture sees all of it: x [N, T, hidden] -> the same. `norms`: of queries and keys."""

    def __init__(self, hidden_size: int, num_heads: int, *, bias: bool = True, norms: tuple[Norm, Norm] | None = None):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = JoinedQKV(hidden_size, 3 * hidden_size, bias=bias)
        self.out = Dense(hidden_size, hidden_size)
        self.q_norm: Norm | None = norms and norms[0]
        self.k_norm: Norm | None = norms and norms[1]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out


class Block(Layer):
    """A block of a vision transformer, norms first. `scaled`: each branch is multiplied by learned numbers."""

    def __init__(
        self,
        attention: Attention,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: TowerActivation,
        eps: float,
        norm_class: type[Norm] = LayerNorm,
        scaled: bool = False,
    ) -> None:
        super().__init__()
        self.attn_norm = norm_class(hidden_size, eps)
        self.attn = attention
        self.mlp_norm = norm_class(hidden_size, eps)
        self.up = Dense(hidden_size, intermediate_size)
        self.down = Dense(intermediate_size, hidden_size)
        self.attn_scale = Scale(hidden_size) if scaled else None
        self.mlp_scale = Scale(hidden_size) if scaled else None
        self._activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """x [N, T, hidden] -> the same."""
        branch = self.attn(self.attn_norm(x))
        x = x + (branch if self.attn_scale is None else self.attn_scale(branch))
        branch = self.down(self._activation(self.up(self.mlp_norm(x))))
        x = x + (branch if self.mlp_scale is None else self.mlp_scale(branch))
        return x
