"""Mamba whose maps from inputs to steps and vectors are of one head each (Zamba)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from asyncllm import kernels
from asyncllm.layers.cache_spec import StateSpec
from asyncllm.layers.layer import ParameterOwner
from asyncllm.layers.linear import Linear
from asyncllm.layers.short_convolution import CausalConvolution, StateLayer
from asyncllm.layers.step_inputs import SampledRows, StepInputs

__all__ = ["PerHeadMamba"]


class _HeadMaps(ParameterOwner):
    """The maps of each of H heads of C features: from inputs to step vectors of rank R and to the vectors that write
    and read, of N numbers, and from step vectors to steps."""

    def __init__(self, num_heads: int, head_size: int, state_size: int, step_rank: int) -> None:
        super().__init__()
        self.maps = nn.Parameter(torch.empty(num_heads, step_rank + 2 * state_size, head_size), requires_grad=False)
        self.steps = nn.Parameter(torch.empty(num_heads, head_size, step_rank), requires_grad=False)
        self.step_bias = nn.Parameter(torch.empty(num_heads, head_size), requires_grad=False)
        self.sizes = [step_rank, state_size, state_size]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, H, C] -> (step sizes, float32 [H, T, C]; the vectors that write and those that read [H, T, N])."""
        vectors, writes, reads = torch.split(torch.bmm(x.transpose(0, 1), self.maps.mT), self.sizes, -1)
        steps = torch.bmm(vectors, self.steps.mT).float() + self.step_bias.float()[:, None]
        return kernels.softplus(steps), writes.contiguous(), reads.contiguous()


class _HeadStates(ParameterOwner):
    """The parameters of each feature of each head. Always float32."""

    parameter_dtype = torch.float32

    def __init__(self, num_heads: int, head_size: int, state_size: int) -> None:
        super().__init__()
        self.log_rate = nn.Parameter(torch.empty(num_heads, head_size, state_size), requires_grad=False)
        self.skip = nn.Parameter(torch.empty(num_heads, head_size), requires_grad=False)


class PerHeadMamba(StateLayer):
    """x [T, hidden] -> [T, hidden]: like `mamba1.Mamba`, with a scan per head and without norms. Inputs and gates
    alternate in the first product.

    The state consists of the latest inputs of the convolution, in the model's dtype, and, for each head, its features'
    states [N, C], in float32.
    """

    first_products = ("inputs",)

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        *,
        num_heads: int,
        inner_size: int,
        state_size: int,
        step_rank: int,
        conv_length: int,
        conv_bias: bool,
        bias: bool,
    ) -> None:
        """`state_size`: numbers in a state of each of `inner_size` features. `step_rank`: rank of the map to step
        sizes."""
        super().__init__()
        self.layer = layer
        self.num_heads, head_size = num_heads, inner_size // num_heads
        self.inputs = Linear(hidden_size, 2 * inner_size, shard="replicated", bias=bias)
        self.conv = CausalConvolution(inner_size, conv_length, bias=conv_bias)
        self.heads = _HeadMaps(num_heads, head_size, state_size, step_rank)
        self.states = _HeadStates(num_heads, head_size, state_size)
        self.out = Linear(inner_size, hidden_size, shard="replicated", bias=bias)
        memories = ((state_size, head_size),) * num_heads
        self.cache_spec = StateSpec((self.conv.state_shape, *memories), (None, *(torch.float32,) * num_heads))

    def forward(self, x: Tensor, step: StepInputs, sampled: SampledRows | None = None) -> Tensor:
        """`sampled`: return only these rows [R, hidden]; the states of all tokens are still written."""
        step = step.of_layer(self.layer)
        cache: kernels.States = step.caches[self.layer]
        inputs, *memories = cache.tensors
        plan = step.states(cache)
        values, gate = self.inputs(x, step).unflatten(-1, (-1, 2)).unbind(-1)
        values = self.conv(values.contiguous(), inputs, plan, silu=True).unflatten(-1, (self.num_heads, -1))
        sizes, writes, reads = self.heads(values)
        rates = -self.states.log_rate.exp()
        scanned = [
            kernels.selective_scan(
                values[:, head].contiguous(), sizes[head], rates[head], writes[head], reads[head], memory, plan
            )
            for head, memory in enumerate(memories)
        ]
        y = torch.stack(scanned, 1) + self.states.skip * values
        y = (y.flatten(1) * kernels.silu(gate.float())).to(x.dtype)
        if sampled is not None:
            y, step = kernels.gather_rows(y, sampled.indices), sampled.inputs
        out: Tensor = self.out(y, step)
        return out
