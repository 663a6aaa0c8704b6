"""Gated linear recurrences, feature by feature, instead of attention (Griffin, arXiv 2402.19427)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from asyncllm import kernels
from asyncllm.layers.cache_spec import StateSpec
from asyncllm.layers.delta_net import WholeParts
from asyncllm.layers.layer import ParameterOwner
from asyncllm.layers.linear import Linear
from asyncllm.layers.linear_method import frozen_parameter
from asyncllm.layers.short_convolution import CausalConvolution, StateLayer
from asyncllm.layers.step_inputs import SampledRows, StepInputs

__all__ = ["GatedRecurrence"]

SHARPNESS = 8.0
"""Factor of the rates of forgetting, c in the paper."""


class RecurrenceGates(ParameterOwner):
    """x [T, H * W] -> gates of the input and of forgetting, float32 [T, H * W] each: sigmoids of products by head."""

    def __init__(self, num_heads: int, width: int) -> None:
        super().__init__()
        self.input_weight, self.forget_weight = (frozen_parameter(num_heads, width, width) for _ in range(2))
        self.input_bias, self.forget_bias = (frozen_parameter(num_heads, width) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._gate(x, self.input_weight, self.input_bias), self._gate(x, self.forget_weight, self.forget_bias)

    def _gate(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        heads = x.view(len(x), len(weight), -1).transpose(0, 1)
        return kernels.sigmoid(torch.baddbmm(bias[:, None], heads, weight).transpose(0, 1).flatten(1).float())


class ForgetRates(ParameterOwner):
    """The logarithm of a rate of forgetting for each feature, before softplus. Always float32."""

    parameter_dtype = torch.float32

    def __init__(self, size: int) -> None:
        super().__init__()
        self.log_rate = nn.Parameter(torch.empty(size), requires_grad=False)


class GatedRecurrence(StateLayer):
    """x [T, hidden] -> [T, hidden]: a short convolution of one product of x, then a recurrence whose gates depend on
    its result, multiplied by GELU of another product of x.

    A feature's state h becomes a h + sqrt(1 - a^2) i x, where i is the input's gate and a the fraction that the other
    gate lets stay; a sequence's first token enters whole. The state consists of the latest inputs of the convolution,
    in the model's dtype, and of h, in float32.
    """

    first_products = ("inputs",)

    def __init__(self, layer: int, hidden_size: int, *, size: int, num_heads: int, conv_length: int) -> None:
        super().__init__()
        self.layer = layer
        self.inputs = WholeParts(hidden_size, {"x": size, "gate": size}, stored_heads=num_heads, bias=True)
        self.conv = CausalConvolution(size, conv_length, bias=True)
        self.gates = RecurrenceGates(num_heads, size // num_heads)
        self.rates = ForgetRates(size)
        self.out = Linear(size, hidden_size, shard="replicated", bias=True)
        self.cache_spec = StateSpec((self.conv.state_shape, (1, size)), (None, torch.float32))

    def forward(self, x: Tensor, step: StepInputs, sampled: SampledRows | None = None) -> Tensor:
        """`sampled`: return only these rows [R, hidden]; the states of all tokens are still written."""
        step = step.of_layer(self.layer)
        cache: kernels.States = step.caches[self.layer]
        inputs, memory = cache.tensors
        plan = step.states(cache)
        values, outer = self.inputs(x, step).chunk(2, -1)
        values = self.conv(values, inputs, plan, silu=False)
        entering, forgetting = self.gates(values)
        # The scan multiplies what enters by the step's size, which is the logarithm of what is forgotten.
        sizes = (SHARPNESS * forgetting * kernels.softplus(self.rates.log_rate)).clamp_(min=1e-30)
        scale = torch.where(step.positions[:, None] == 0, 1.0, (-torch.expm1(-2 * sizes)).sqrt())
        ones = sizes.new_ones(len(x), 1)
        rates = -sizes.new_ones(sizes.shape[1], 1)
        entered = values.float() * entering * scale / sizes
        y = kernels.selective_scan(entered, sizes, rates, ones, ones, memory, plan).to(x.dtype)
        y = y * kernels.activate(outer.contiguous(), "gelu_tanh")
        if sampled is not None:
            y, step = kernels.gather_rows(y, sampled.indices), sampled.inputs
        out: Tensor = self.out(y, step)
        return out
