"""Short convolutions over the latest tokens, whose inputs are cached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from asyncllm import kernels
from asyncllm.layers.cache_spec import CacheSpec, StateSpec
from asyncllm.layers.layer import Layer, PartKey
from asyncllm.layers.linear import Linear
from asyncllm.layers.step_inputs import SampledRows, StepInputs

__all__ = ["CausalConvolution", "ShortConvolution", "StateLayer"]


class StateLayer(Layer):
    """A layer that replaces attention and carries a state from token to token. It is whole on every rank."""

    layer: int
    cache_spec: CacheSpec
    first_products: ClassVar[tuple[str, ...]]
    """Names of the projections that read the layer's input."""
    unquantized: ClassVar[tuple[str, ...]] = ()
    """Names of the projections that tools leave unquantized: small ones that decide what the state keeps."""


class CausalConvolution(Layer):
    """A convolution of each of `size` features over its latest `length` tokens."""

    def __init__(self, size: int, length: int, *, bias: bool, parts: Mapping[str, int] | None = None) -> None:
        """`parts`: features that a checkpoint stores in separate tensors, in order; there is no bias then."""
        super().__init__()
        self.parts = parts
        self.weight = nn.Parameter(torch.empty(size, length), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False) if bias else None

    @property
    def state_shape(self) -> tuple[int, int]:
        """Shape of the inputs that the next token needs."""
        size, length = self.weight.shape
        return length - 1, size

    def expected_parts(self) -> Mapping[PartKey, tuple[int, ...]]:
        size, length = self.weight.shape
        if self.parts is not None:
            return {("weight", part, None): (features, 1, length) for part, features in self.parts.items()}
        parts: dict[PartKey, tuple[int, ...]] = {("weight", None, None): (size, 1, length)}
        return parts if self.bias is None else {**parts, ("bias", None, None): (size,)}

    def load_part(self, suffix: str, part: str | None, index: int | None, tensor: Tensor) -> None:
        parameter: Tensor = self.get_parameter(suffix)
        if self.parts is not None and part is not None:
            parameter = dict(zip(self.parts, torch.split(parameter, list(self.parts.values())), strict=True))[part]
        parameter.copy_(tensor.view_as(parameter))

    def forward(self, x: Tensor, state: Tensor, plan: kernels.StatePlan, *, silu: bool) -> Tensor:
        """Apply `kernels.short_convolution`."""
        return kernels.short_convolution(x, self.weight, self.bias, state, plan, silu=silu)


class ShortConvolution(StateLayer):
    """x [T, hidden] -> [T, hidden]: a convolution between two gates that are products of x (LFM2)."""

    first_products = ("gates",)

    def __init__(self, layer: int, hidden_size: int, *, length: int, bias: bool) -> None:
        super().__init__()
        self.layer = layer
        self.gates = Linear(hidden_size, 3 * hidden_size, shard="replicated", bias=bias)
        self.conv = CausalConvolution(hidden_size, length, bias=bias)
        self.out = Linear(hidden_size, hidden_size, shard="replicated", bias=bias)
        self.cache_spec = StateSpec((self.conv.state_shape,), (None,))

    def forward(self, x: Tensor, step: StepInputs, sampled: SampledRows | None = None) -> Tensor:
        """`sampled`: return only these rows [R, hidden]; the states of all tokens are still written."""
        step = step.of_layer(self.layer)
        cache: kernels.States = step.caches[self.layer]
        before, after, values = self.gates(x, step).chunk(3, -1)
        y = after * self.conv(before * values, cache.tensors[0], step.states(cache), silu=False)
        if sampled is not None:
            y, step = kernels.gather_rows(y, sampled.indices), sampled.inputs
        out: Tensor = self.out(y, step)
        return out
