"""Mixture of experts: a router and stacked SwiGLU experts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from asyncllm import kernels
from asyncllm.layers.layer import Layer
from asyncllm.layers.linear import Linear

__all__ = ["ExpertLinear", "MoE"]


class ExpertLinear(Layer):
    """The same linear layer of every expert, stacked: weight [experts, out, in]. Parts, if any, divide `out`."""

    def __init__(self, num_experts: int, in_features: int, parts: Mapping[str | None, int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, sum(parts.values()), in_features), requires_grad=False)
        self.rows: dict[str | None, slice] = {}
        start = 0
        for name, size in parts.items():
            self.rows[name] = slice(start, start + size)
            start += size

    def expected_parts(self) -> Mapping[tuple[str, str | None, int | None], tuple[int, ...]]:
        return {
            ("weight", part, expert): (rows.stop - rows.start, self.weight.shape[2])
            for expert in range(self.weight.shape[0])
            for part, rows in self.rows.items()
        }

    def load_part(self, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        self.weight[index, self.rows[part]].copy_(tensor)


class MoE(Layer):
    """x [T, hidden] -> [T, hidden]: each token's top_k experts, weighted by the router's softmax over all experts."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, num_experts: int, top_k: int, renormalize: bool
    ) -> None:
        super().__init__()
        self.router = Linear(hidden_size, num_experts)
        self.gate_up = ExpertLinear(num_experts, hidden_size, {"gate": intermediate_size, "up": intermediate_size})
        self.down = ExpertLinear(num_experts, intermediate_size, {None: hidden_size})
        self.top_k = top_k
        self.renormalize = renormalize

    def forward(self, x: Tensor) -> Tensor:
        weights, expert_ids = kernels.route(self.router(x), self.top_k, self.renormalize)
        return kernels.fused_experts(x, self.gate_up.weight, self.down.weight, weights, expert_ids)
