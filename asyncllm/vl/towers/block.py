"""Blocks of vision transformers, with attention over a whole picture, and their linear layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm import kernels
from asyncllm.layers.layer import Layer, PartKey
from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.layers.norm import Norm
from asyncllm.vl.towers.parts import ACTIVATIONS, Dense, Table, TowerActivation

__all__ = ["GATED", "Attention", "Block", "GatedMLP", "JoinedQKV"]

GATED = {"gate": "mlp.gate_up[gate]", "up": "mlp.gate_up[up]", "down": "mlp.down"}
"""Names of a gated MLP's products -> targets in a weight table, for a block that has it as `mlp`."""

_GATES: Mapping[TowerActivation, Callable[[Tensor], Tensor]] = {
    "silu": kernels.silu_mul,
    "gelu_tanh": kernels.gelu_tanh_mul,
}


class JoinedQKV(Dense):
    """The projections of queries, keys and values as one product, whichever way the checkpoint stores them. `queries`:
    number of rows for queries, if there are more than for keys."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, queries: int | None = None) -> None:
        super().__init__(in_features, out_features, bias=bias)
        first = out_features // 3 if queries is None else queries
        self._rows = {"q": first, "k": (out_features - first) // 2, "v": (out_features - first) // 2}

    def expected_parts(self) -> Mapping[PartKey, tuple[int, ...]]:
        return {
            (suffix, part, None): (rows, *each.shape[1:])
            for suffix, each in self.named_parameters(recurse=False)
            for part, rows in self._rows.items()
        }

    def load_part(self, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        parts = torch.split(self.get_parameter(suffix), list(self._rows.values()))
        parts["qkv".index(part or "q")].copy_(tensor)


_WIDTH = 64
"""Inner features of a gated MLP are padded to a multiple of this. Rows of 3,420 16-bit numbers (Qwen2.5-VL) do not
begin at multiples of 16 bytes, which the fast matrix kernels require."""


class GatedMLP(Layer):
    """down(activation(gate(x)) * up(x)) of x [..., hidden]."""

    def __init__(self, size: int, inner: int, activation: TowerActivation, *, bias: bool) -> None:
        super().__init__()
        width = -(-inner // _WIDTH) * _WIDTH
        self.gate_up = _GateUp(size, 2 * width, bias=bias)
        self.down = _Down(width, size, bias=bias)
        self.gate_up.inner = self.down.inner = inner
        self._activation: TowerActivation = activation

    def forward(self, x: Tensor) -> Tensor:
        both, gate = self.gate_up(x), _GATES.get(self._activation)
        if gate is None:
            first, second = both.chunk(2, -1)
            inner = ACTIVATIONS[self._activation](first) * second
        else:
            inner = gate(both)
        out: Tensor = self.down(inner)
        return out


class _GateUp(Dense):
    """The gate and up projections as one product, each padded with zeros."""

    inner: int

    def expected_parts(self) -> Mapping[PartKey, tuple[int, ...]]:
        own = self.named_parameters(recurse=False)
        return {(suffix, part, None): (self.inner, *each.shape[1:]) for suffix, each in own for part in ("gate", "up")}

    def load_part(self, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        half = self.get_parameter(suffix).chunk(2)[part == "up"]
        half[: self.inner].copy_(tensor)
        half[self.inner :].zero_()


class _Down(Dense):
    """The down projection of `inner` features, padded with zeros."""

    inner: int

    def expected_parts(self) -> Mapping[PartKey, tuple[int, ...]]:
        return {**super().expected_parts(), ("weight", None, None): (len(self.weight), self.inner)}

    def load_part(self, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        if suffix != "weight":
            return super().load_part(suffix, part, index, tensor)
        self.weight[:, : self.inner].copy_(tensor)
        self.weight[:, self.inner :].zero_()
        return None


class Attention(Layer):
    """Attention of each token over its whole picture, for x [N, T, hidden]. `norms`: those of queries and keys."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        bias: bool = True,
        norms: tuple[Norm, Norm] | None = None,
        out_bias: bool = True,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = JoinedQKV(hidden_size, 3 * hidden_size, bias=bias)
        self.out = Dense(hidden_size, hidden_size, bias=out_bias)
        self.q_norm: Norm | None = norms and norms[0]
        self.k_norm: Norm | None = norms and norms[1]

    def forward(self, x: Tensor) -> Tensor:
        count, length, _ = x.shape
        q, k, v = self._heads(x)
        attended = kernels.segment_attention(q, k, v, kernels.split_segments([length] * count, x.device))
        out: Tensor = self.out(attended.view(count, length, -1))
        return out

    def masked(self, x: Tensor, mask: Tensor) -> Tensor:
        """Attend as `forward`, but only to the tokens of `mask` [N, T] bool."""
        q, k, v = (each.view(*x.shape[:2], self.num_heads, -1).transpose(1, 2) for each in self._heads(x))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values of all tokens [N * T, heads, size]."""
        qkv = self.qkv(x.flatten(0, 1))
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = qkv.chunk(3, -1)
            qkv = torch.cat([self.q_norm(q.contiguous()), self.k_norm(k.contiguous()), v], -1)
        heads: Tensor = qkv.view(len(qkv), 3, self.num_heads, -1)
        return heads.unbind(1)


class Block(Layer):
    """A pre-norm block of a vision transformer. `scaled`: whether each branch is multiplied by learned numbers."""

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
        self.attn_scale = Table(hidden_size) if scaled else None
        self.mlp_scale = Table(hidden_size) if scaled else None
        self._activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block for x [N, T, hidden]."""
        return self._with_mlp(self.attn(self.attn_norm(x)), x)

    def masked(self, x: Tensor, mask: Tensor) -> Tensor:
        """Compute the block as `forward`, attending only to the tokens of `mask` [N, T] bool."""
        return self._with_mlp(self.attn.masked(self.attn_norm(x), mask), x)

    def _with_mlp(self, branch: Tensor, x: Tensor) -> Tensor:
        """Return x with the attention's branch and the MLP's added."""
        if self.attn_scale is None or self.mlp_scale is None:
            h, x = self.mlp_norm.add(branch, x)
            out: Tensor = x + self.down(self._activation(self.up(h)))
            return out
        x = torch.addcmul(x, branch, self.attn_scale.weight)
        branch = self.down(self._activation(self.up(self.mlp_norm(x))))
        return torch.addcmul(x, branch, self.mlp_scale.weight)
