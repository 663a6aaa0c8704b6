"""Mamba: a selective state space per feature, instead of attention (Gu and Dao, arXiv 2312.00752)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from asyncllm import kernels
from asyncllm.layers.cache_spec import StateSpec
from asyncllm.layers.layer import ParameterOwner
from asyncllm.layers.linear import Linear
from asyncllm.layers.short_convolution import CausalConvolution, StateLayer
from asyncllm.layers.step_inputs import SampledRows, StepInputs

__all__ = ["Mamba"]


class FeatureStates(ParameterOwner):
    """The parameters of each feature. Always float32."""

    parameter_dtype = torch.float32

    def __init__(self, size: int, state_size: int) -> None:
        super().__init__()
        self.log_rate = nn.Parameter(torch.empty(size, state_size), requires_grad=False)
        self.skip = nn.Parameter(torch.empty(size), requires_grad=False)


class Mamba(StateLayer):
    """x [T, hidden] -> [T, hidden]: the inputs go through a short convolution. What they write and read, and their step
    sizes, are linear maps of the result, each followed by a norm in some models (Jamba, Falcon Mamba). The output is
    gated.

    The state consists of the latest inputs of the convolution, in the model's dtype, and the features' states [N, C],
    in float32.
    """

    first_products = ("inputs",)
    unquantized = ("maps", "steps")

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        *,
        inner_size: int,
        state_size: int,
        step_rank: int,
        conv_length: int,
        conv_bias: bool,
        bias: bool,
        norm: Callable[[int], nn.Module],
    ) -> None:
        """`state_size`: numbers in a state of each of `inner_size` features. `step_rank`: rank of the map to step
        sizes. `norm` makes the norms of the maps, given their size."""
        super().__init__()
        self.layer = layer
        self.sizes = [step_rank, state_size, state_size]
        self.inputs = Linear(hidden_size, 2 * inner_size, shard="replicated", bias=bias)
        self.conv = CausalConvolution(inner_size, conv_length, bias=conv_bias)
        self.maps = Linear(inner_size, sum(self.sizes), shard="replicated")
        self.step_norm, self.write_norm, self.read_norm = (norm(size) for size in self.sizes)
        self.steps = Linear(step_rank, inner_size, shard="replicated", bias=True)
        self.states = FeatureStates(inner_size, state_size)
        self.out = Linear(inner_size, hidden_size, shard="replicated", bias=bias)
        self.cache_spec = StateSpec((self.conv.state_shape, (state_size, inner_size)), (None, torch.float32))

    def forward(self, x: Tensor, step: StepInputs, sampled: SampledRows | None = None) -> Tensor:
        """`sampled`: return only these rows [R, hidden]; the states of all tokens are still written."""
        step = step.of_layer(self.layer)
        cache: kernels.States = step.caches[self.layer]
        inputs, memory = cache.tensors
        plan = step.states(cache)
        values, gate = self.inputs(x, step).chunk(2, -1)
        values = self.conv(values, inputs, plan, silu=True)
        steps, writes, reads = (each.contiguous() for each in self.maps(values, step).split(self.sizes, -1))
        y = kernels.selective_scan(
            values,
            kernels.softplus(self.steps(self.step_norm(steps), step).float()),
            -self.states.log_rate.exp(),
            self.write_norm(writes),
            self.read_norm(reads),
            memory,
            plan,
        )
        y = (y + self.states.skip * values) * kernels.silu(gate.float())
        y = y.to(x.dtype)
        if sampled is not None:
            y, step = kernels.gather_rows(y, sampled.indices), sampled.inputs
        out: Tensor = self.out(y, step)
        return out
