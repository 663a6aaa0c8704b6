"""Kimi's delta attention: gated delta nets in which each feature of a key has a decay of its own; Ling 3.0's has no
bottlenecks."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from asyncllm import kernels
from asyncllm.layers.delta_net import GatedDeltaNet, WholeParts
from asyncllm.layers.layer import ParameterOwner
from asyncllm.layers.linear import Linear
from asyncllm.layers.step_inputs import StepInputs

__all__ = ["BoundedDeltaNet", "KimiDeltaNet"]


class FeatureDecay(ParameterOwner):
    """The decay rate of each head, and the bias of each feature's steps. Always float32."""

    parameter_dtype = torch.float32

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.log_rate = nn.Parameter(torch.empty(1, 1, num_heads, 1), requires_grad=False)
        self.step_bias = nn.Parameter(torch.empty(num_heads * head_dim), requires_grad=False)

    def forward(self, step_size: Tensor) -> Tensor:
        """step_size [T, H * K] -> logarithms of the fractions that stay [T, H, K] float32, at most 0."""
        heads = self.log_rate.shape[2]
        sizes = kernels.softplus(step_size.float() + self.step_bias).view(len(step_size), heads, -1)
        return -self.log_rate[0].exp() * sizes


class KimiDeltaNet(GatedDeltaNet):
    """A gated delta net whose gates and steps go through bottlenecks as wide as a head; its gates are sigmoids."""

    first_products: ClassVar[tuple[str, ...]] = ("inputs", "weights")
    unquantized: ClassVar[tuple[str, ...]] = ("weights", "steps")

    def __init__(
        self, layer: int, hidden_size: int, *, num_heads: int, head_dim: int, conv_length: int, norm_eps: float
    ) -> None:
        super().__init__(
            layer,
            hidden_size,
            num_heads=num_heads,
            num_key_heads=num_heads,
            head_dim=head_dim,
            key_dim=head_dim,
            conv_length=conv_length,
            norm_eps=norm_eps,
            parted_conv=True,
        )
        size = num_heads * head_dim
        self.inputs = WholeParts(hidden_size, dict.fromkeys("qkv", size), stored_heads=num_heads)
        parts = {"beta": num_heads, "step": head_dim, "gate": head_dim}
        self.weights = WholeParts(hidden_size, parts, stored_heads=num_heads)
        self.steps = Linear(head_dim, size, shard="replicated")
        self.gates = Linear(head_dim, size, shard="replicated")
        self.decay = FeatureDecay(num_heads, head_dim)
        self.sizes = list(parts.values())

    def _project(self, x: Tensor, step: StepInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        beta, inner_step, inner_gate = self.weights(x, step).split(self.sizes, -1)
        steps: Tensor = self.steps(inner_step.contiguous(), step)
        gates: Tensor = self.gates(inner_gate.contiguous(), step)
        return self.inputs(x, step), gates, beta, steps

    def _opened(self, gate: Tensor) -> Tensor:
        return kernels.sigmoid(gate)


class BoundedDecay(ParameterOwner):
    """The decay rate of each head, and the bias of each feature's steps. Always float32."""

    parameter_dtype = torch.float32

    def __init__(self, num_heads: int, head_dim: int, bound: float | None) -> None:
        """`bound`: what no logarithm of a fraction that stays falls below."""
        super().__init__()
        self.log_rate = nn.Parameter(torch.empty(num_heads), requires_grad=False)
        self.step_bias = nn.Parameter(torch.empty(num_heads * head_dim), requires_grad=False)
        self.bound = bound

    def forward(self, step_size: Tensor) -> Tensor:
        """See `FeatureDecay.forward`."""
        rates = self.log_rate.exp()[:, None]
        steps = (step_size.float() + self.step_bias).view(len(step_size), len(rates), -1)
        return -rates * kernels.softplus(steps) if self.bound is None else self.bound * kernels.sigmoid(rates * steps)


class BoundedDeltaNet(GatedDeltaNet):
    """A gated delta net with a decay of each feature, which may be bounded, and gates that are sigmoids (Ling 3.0)."""

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        *,
        num_heads: int,
        head_dim: int,
        conv_length: int,
        norm_eps: float,
        bound: float | None,
    ) -> None:
        super().__init__(
            layer,
            hidden_size,
            num_heads=num_heads,
            num_key_heads=num_heads,
            head_dim=head_dim,
            key_dim=head_dim,
            conv_length=conv_length,
            norm_eps=norm_eps,
            parted_conv=True,
        )
        parts = {"beta": num_heads, "step": num_heads * head_dim}
        self.weights = WholeParts(hidden_size, parts, stored_heads=num_heads)
        self.decay = BoundedDecay(num_heads, head_dim, bound)

    def _project(self, x: Tensor, step: StepInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        values = self.out.in_features
        mixed, gate = self.inputs(x, step).split([self.conv.weight.shape[0], values], -1)
        beta, step_size = self.weights(x, step).split([self.num_heads, values], -1)
        return mixed, gate, beta, step_size

    def _opened(self, gate: Tensor) -> Tensor:
        return kernels.sigmoid(gate)
