"""Mamba-2: a state space over the tokens, instead of attention (Dao and Gu, arXiv 2405.21060)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from asyncllm import kernels
from asyncllm.layers.cache_spec import StateSpec
from asyncllm.layers.layer import ParameterOwner
from asyncllm.layers.linear import Linear
from asyncllm.layers.short_convolution import CausalConvolution, StateLayer
from asyncllm.layers.step_inputs import SampledRows, StepInputs

__all__ = ["GroupedNorm", "Mamba2", "StateSpace"]


class StateSpace(ParameterOwner):
    """The parameters of each head. Always float32."""

    parameter_dtype = torch.float32

    def __init__(self, num_heads: int, min_step: float = 0.0) -> None:
        """`min_step`: minimum step size."""
        super().__init__()
        self.min_step = min_step
        self.log_rate = nn.Parameter(torch.empty(num_heads), requires_grad=False)
        self.step_bias = nn.Parameter(torch.empty(num_heads), requires_grad=False)
        self.skip = nn.Parameter(torch.empty(num_heads), requires_grad=False)

    def forward(self, steps: Tensor) -> tuple[Tensor, Tensor]:
        """steps [T, H] -> (logarithms of the fraction of the state that stays, at most 0, and step sizes), float32 [T,
        H]."""
        sizes = kernels.softplus(steps.float() + self.step_bias).clamp(min=self.min_step)
        return -self.log_rate.exp() * sizes, sizes


class GroupedNorm(ParameterOwner):
    """RMS norm, over each group of neighbouring features, of x [T, size] times silu of a gate."""

    stored_less: ClassVar[float] = 0.0
    """See `Norm`."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.groups, self.eps = groups, eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        grouped = (x.float() * kernels.silu(gate.float())).view(len(x), self.groups, -1)
        normed = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.view_as(x).to(x.dtype)


class Mamba2(StateLayer):
    """x [T, hidden] -> [T, hidden]: the inputs, and the vectors that write and read the state, go through a short
    convolution, then `kernels.state_space`, whose result is gated and normalised.

    The state consists of the latest inputs of the convolution, in the model's dtype, and the memory [H, N, P], in
    float32.
    """

    first_products = ("inputs",)

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        *,
        num_heads: int,
        head_dim: int,
        num_groups: int,
        state_size: int,
        conv_length: int,
        conv_bias: bool,
        bias: bool,
        norm_eps: float,
        min_step: float = 0.0,
    ) -> None:
        """`num_groups`: groups of heads that share the vectors that write and read their states. `state_size`: numbers
        per feature of a head, of which there are `head_dim`. `min_step`: minimum step size."""
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_groups = num_heads, num_groups
        self.head_dim, self.state_size = head_dim, state_size
        inner, shared = num_heads * head_dim, num_groups * state_size
        self.sizes = [inner, inner + 2 * shared, num_heads]
        self.inputs = Linear(hidden_size, sum(self.sizes), shard="replicated", bias=bias)
        self.conv = CausalConvolution(inner + 2 * shared, conv_length, bias=conv_bias)
        self.space = StateSpace(num_heads, min_step)
        self.norm = GroupedNorm(inner, num_groups, norm_eps)
        self.out = Linear(inner, hidden_size, shard="replicated", bias=bias)
        memory = (num_heads, state_size, head_dim)
        self.cache_spec = StateSpec((self.conv.state_shape, memory), (None, torch.float32))

    def forward(self, x: Tensor, step: StepInputs, sampled: SampledRows | None = None) -> Tensor:
        """`sampled`: return only these rows [R, hidden]; the states of all tokens are still written."""
        step = step.of_layer(self.layer)
        cache: kernels.States = step.caches[self.layer]
        inputs, memory = cache.tensors
        plan = step.states(cache)
        gate, mixed, steps = torch.split(self._project(x, step), self.sizes, -1)
        mixed = self.conv(mixed, inputs, plan, silu=True)
        inner, shared = self.sizes[0], self.num_groups * self.state_size
        values, writes, reads = mixed.split([inner, shared, shared], -1)
        values = values.view(len(x), self.num_heads, self.head_dim)
        decay, sizes = self.space(steps)
        y = kernels.state_space(
            reads.view(len(x), self.num_groups, self.state_size),
            writes.view(len(x), self.num_groups, self.state_size),
            values,
            decay,
            sizes,
            memory,
            plan,
        )
        y = (y + self.space.skip[:, None] * values).to(x.dtype).flatten(1)
        if sampled is not None:
            y, gate = (kernels.gather_rows(each.contiguous(), sampled.indices) for each in (y, gate))
            step = sampled.inputs
        out: Tensor = self.out(self.norm(y, gate), step)
        return out

    def _project(self, x: Tensor, step: StepInputs) -> Tensor:
        """x -> [T, sum(sizes)]: gates, inputs of the convolution, and steps."""
        projected: Tensor = self.inputs(x, step)
        return projected
