"""Experts without a gate, with squared ReLU (Nemotron-H)."""

from __future__ import annotations

from torch import Tensor

from asyncllm.errors import UnsupportedModel
from asyncllm.kernels import Routing
from asyncllm.layers.linear import Linear
from asyncllm.layers.linear_method import LinearMethod, Unquantized, Weighted
from asyncllm.layers.mlp import PlainMLP
from asyncllm.layers.moe import ExactRouter, MoE
from asyncllm.layers.step_inputs import StepInputs

__all__ = ["PlainMoE"]


class _PlainExperts(Weighted):
    def attach(self, method: LinearMethod) -> None:
        """Take a method. Raises UnsupportedModel for a quantization, whose kernels need a gate."""
        if not isinstance(method, Unquantized):
            raise UnsupportedModel(
                f"The model's experts have no gate, and are not implemented for {method.name} weights. Use a bfloat16 "
                "checkpoint of it."
            )
        super().attach(method)


class PlainMoE(MoE):
    """Like `MoE` with a correction, but with plain experts and a plain shared MLP. `latent_size`: experts read a
    projection of the token to this size, and the sum of their outputs is projected back. `bias`: of these projections
    and the shared MLP.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        routing: Routing,
        shared_size: int,
        latent_size: int | None,
        bias: bool,
    ) -> None:
        width = latent_size or hidden_size
        super().__init__(width, intermediate_size, num_experts=num_experts, routing=routing, corrected=True)
        self.router = ExactRouter(hidden_size, num_experts, shard="replicated")
        self.gate_up = _PlainExperts(width, {"up": intermediate_size}, shard="column", num_experts=num_experts)
        self.down = _PlainExperts(intermediate_size, width, shard="row", num_experts=num_experts)
        self.shared = PlainMLP(hidden_size, shared_size, activation="squared_relu", bias=bias)
        maps = latent_size is not None
        self.into = Linear(hidden_size, width, shard="replicated", bias=bias) if maps else None
        self.back = Linear(width, hidden_size, shard="replicated", bias=bias) if maps else None

    def _experts_input(self, x: Tensor, step: StepInputs) -> Tensor:
        return x if self.into is None else self.into(x, step)

    def _layer_output(self, chosen: Tensor, step: StepInputs) -> Tensor:
        return chosen if self.back is None else self.back(chosen, step)
