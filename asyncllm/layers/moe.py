"""Mixture of experts: a router, stacked SwiGLU experts, and a shared MLP for all tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from asyncllm import kernels
from asyncllm.distributed.group import RankGroup
from asyncllm.kernels import RoundedRows, Routing
from asyncllm.layers.layer import Layer, ParameterOwner
from asyncllm.layers.linear import Linear
from asyncllm.layers.linear_method import Weighted
from asyncllm.layers.mlp import GatedMLP, PlainMLP
from asyncllm.layers.step_inputs import StepInputs

__all__ = ["AveragedMoE", "Correction", "ExactRouter", "MoE"]


class ExactRouter(Linear):
    """A router with float32 weight and logits regardless of the model's dtype: rounded logits would choose other
    experts. Adapters and images do not change it."""

    parameter_dtype = torch.float32

    def forward(self, x: Tensor | RoundedRows, step: StepInputs) -> Tensor:
        assert isinstance(x, Tensor), "routers are not quantized"
        return self.method.product_exact(self, x)


class Correction(ParameterOwner):
    """Added to the experts' scores when experts are chosen, but not when they are weighted. Always float32."""

    parameter_dtype = torch.float32

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(num_experts), requires_grad=False)


class MoE(Layer):
    """x [T, hidden] -> [T, hidden]: each token's experts, chosen and weighted by `routing`, plus the shared MLP.

    `corrected`: add a `Correction` when choosing. `scaled_inputs`: the weights multiply the experts' inputs, and the
    outputs are summed unweighted. `shared_size`: inner features of an MLP for all tokens; `shared_gate`: weight it per
    token by the sigmoid of another product. `bias`: of router and experts; `limit`: of the experts' gate, see
    `kernels.fused_experts`.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        routing: Routing,
        corrected: bool = False,
        exact_router: bool = False,
        scaled_inputs: bool = False,
        shared_size: int = 0,
        shared_gate: bool = False,
        bias: bool = False,
        limit: float | None = None,
    ) -> None:
        super().__init__()
        router = ExactRouter if exact_router else Linear
        self.router = router(hidden_size, num_experts, shard="replicated", bias=bias)
        self.correction = Correction(num_experts) if corrected else None
        parts = {"gate": intermediate_size, "up": intermediate_size}
        self.gate_up = Weighted(hidden_size, parts, shard="column", bias=bias, num_experts=num_experts)
        self.down = Weighted(intermediate_size, hidden_size, shard="row", bias=bias, num_experts=num_experts)
        self.shared: GatedMLP | PlainMLP | None = GatedMLP(hidden_size, shared_size) if shared_size else None
        self.shared_gate = Linear(hidden_size, 1, shard="replicated") if shared_gate else None
        self.routing = routing
        self.scaled_inputs = scaled_inputs
        self.limit = limit

    def divide_experts(self, group: RankGroup) -> None:
        """Reduce this layer, on the meta device, to the whole experts of the group's rank. Call it before `divide`.
        Raises UnsupportedModel if the experts cannot be divided evenly."""
        for weights in (self.gate_up, self.down):
            weights.divide_experts(group)

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        chosen = self._of_experts(x, *self._route(x, step), step)
        if self.shared is None:
            return chosen
        shared = self.shared(x, step)
        if self.shared_gate is not None:
            shared = shared * kernels.sigmoid(self.shared_gate(x, step))
        return chosen.add_(shared)

    def _of_experts(self, x: Tensor, weights: Tensor, expert_ids: Tensor, step: StepInputs) -> Tensor:
        """Return the output of the chosen experts, from all ranks. x [T, hidden], weights and expert_ids [T, k]."""
        own = self.gate_up.own_experts
        if own is not None:
            # All ranks have all tokens. A token gets zeros for the experts of other ranks, so that the sum over ranks
            # has each expert once.
            elsewhere = (expert_ids < own.start) | (expert_ids >= own.stop)
            weights = weights.masked_fill(elsewhere, 0.0)
            expert_ids = (expert_ids - own.start).masked_fill_(elsewhere, -1)
        inputs = self._experts_input(x, step)
        summed = self.down.summed(self._combined_experts(inputs, weights, expert_ids))
        return self._layer_output(summed, step)

    def _route(self, x: Tensor, step: StepInputs) -> tuple[Tensor, Tensor]:
        """Apply `kernels.route` to x [T, hidden]."""
        correction = None if self.correction is None else self.correction.bias
        return kernels.route(self.router(x, step), self.routing, correction)

    def _experts_input(self, x: Tensor, step: StepInputs) -> Tensor:
        """Return the experts' input from x [T, hidden]."""
        return x

    def _layer_output(self, chosen: Tensor, step: StepInputs) -> Tensor:
        """Return the layer's output [T, hidden] from the experts' output."""
        return chosen

    def _combined_experts(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts. x [T, hidden], weights and expert_ids [T, k]."""
        experts = self.gate_up.method.experts
        if not self.scaled_inputs:
            return experts(self.gate_up, self.down, x, weights, expert_ids, limit=self.limit)
        scaled = (x[:, None] * weights[..., None].to(x.dtype)).flatten(0, 1)
        ids = expert_ids.reshape(-1, 1)
        each = experts(self.gate_up, self.down, scaled, (ids >= 0).float(), ids, limit=self.limit)
        return each if expert_ids.shape[1] == 1 else each.view(*expert_ids.shape, -1).sum(1)


class AveragedMoE(MoE):
    """Like `MoE`, but the outputs of the shared MLP and of the chosen experts are averaged rather than added (Command
    A)."""

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        return super().forward(x, step).mul_(0.5)
