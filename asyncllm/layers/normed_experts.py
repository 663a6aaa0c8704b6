"""Experts with norms: in parallel with an MLP (Gemma 4), or with one behind them (A.X K1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from asyncllm.kernels import Routing
from asyncllm.layers.layer import Layer, ParameterOwner
from asyncllm.layers.linear import Linear
from asyncllm.layers.moe import MoE
from asyncllm.layers.norm import Norm, RMSNorm
from asyncllm.layers.step_inputs import StepInputs

__all__ = ["NormedMoE", "NormedOutputMoE", "NormedRouter"]


class NormedRouter(Layer):
    """x [T, hidden] -> logits [T, experts] of its norm, divided by the root of the hidden size."""

    def __init__(self, hidden_size: int, num_experts: int, *, norm_eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden_size, norm_eps)
        self.proj = Linear(hidden_size, num_experts, shard="replicated")
        self.scale = hidden_size**-0.5

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        logits: Tensor = self.proj(self.norm(x), step)
        scaled: Tensor = logits.float() * self.scale
        return scaled


class ExpertScales(ParameterOwner):
    """A factor on each expert's weight. Always float32."""

    parameter_dtype = torch.float32

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.empty(num_experts), requires_grad=False)


class NormedMoE(MoE):
    """Like `MoE`, with GELU gates and norms of the router's input, the experts' input and their summed output; the
    renormalised weights are scaled by expert."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, num_experts: int, routing: Routing, norm_eps: float
    ) -> None:
        super().__init__(hidden_size, intermediate_size, num_experts=num_experts, routing=routing)
        self.router = NormedRouter(hidden_size, num_experts, norm_eps=norm_eps)  # type: ignore[assignment]
        self.gate_up.gelu = True
        self.scales = ExpertScales(num_experts)
        self.input_norm, self.output_norm = RMSNorm(hidden_size, norm_eps), RMSNorm(hidden_size, norm_eps)

    def _route(self, x: Tensor, step: StepInputs) -> tuple[Tensor, Tensor]:
        weights, expert_ids = super()._route(x, step)
        return weights * self.scales.value[expert_ids], expert_ids

    def _experts_input(self, x: Tensor, step: StepInputs) -> Tensor:
        normed: Tensor = self.input_norm(x)
        return normed

    def _layer_output(self, chosen: Tensor, step: StepInputs) -> Tensor:
        normed: Tensor = self.output_norm(chosen)
        return normed


class NormedOutputMoE(MoE):
    """Like `MoE`, with a norm of the output, that of the shared MLP included."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, norm: Norm, **options: Any) -> None:
        super().__init__(hidden_size, intermediate_size, **options)
        self.output_norm = norm

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        normed: Tensor = self.output_norm(super().forward(x, step))
        return normed
