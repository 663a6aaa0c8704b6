"""Gated delta nets: a fixed-size memory of keys and values instead of attention (Qwen3-Next, OLMo Hybrid)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from asyncllm import kernels
from asyncllm.layers.cache_spec import StateSpec
from asyncllm.layers.layer import ParameterOwner
from asyncllm.layers.linear import Linear, MergedLinear
from asyncllm.layers.linear_method import Weighted
from asyncllm.layers.norm import RMSNorm
from asyncllm.layers.short_convolution import CausalConvolution, StateLayer
from asyncllm.layers.step_inputs import SampledRows, StepInputs

__all__ = ["GatedDeltaNet", "JointDeltaNet", "WholeParts"]


class Decay(ParameterOwner):
    """The decay rate of each head's memory per token. Always float32."""

    parameter_dtype = torch.float32

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.log_rate = nn.Parameter(torch.empty(num_heads), requires_grad=False)
        self.step_bias = nn.Parameter(torch.empty(num_heads), requires_grad=False)

    def forward(self, step_size: Tensor) -> Tensor:
        """step_size [T, H] -> logarithms of the fractions that stay [T, H] float32, at most 0."""
        return -self.log_rate.exp() * kernels.softplus(step_size.float() + self.step_bias)


class WholeParts(MergedLinear):
    """A merged layer whose parts every rank holds as a whole."""

    def __init__(self, in_features: int, parts: Mapping[str, int], *, stored_heads: int, bias: bool = False) -> None:
        """`stored_heads`: number of heads, if a checkpoint stores the parts by head."""
        Weighted.__init__(self, in_features, parts, shard="replicated", bias=bias)
        self.stored_heads = stored_heads


class GatedDeltaNet(StateLayer):
    """x [T, hidden] -> [T, hidden]: queries, keys and values go through a short convolution, then
    `kernels.gated_delta_rule`, whose result is normalised by head and multiplied by silu of a gate.

    The state consists of the latest inputs of the convolution, in the model's dtype, and the memory [H, K, V], in
    float32.
    """

    first_products: ClassVar[tuple[str, ...]] = ("inputs", "weights")
    unquantized: ClassVar[tuple[str, ...]] = ("weights",)

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        *,
        num_heads: int,
        num_key_heads: int,
        head_dim: int,
        key_dim: int,
        conv_length: int,
        norm_eps: float,
        top_weight: float = 1.0,
        parted_conv: bool = False,
    ) -> None:
        """`num_heads`, `head_dim`: of values. `num_key_heads`, `key_dim`: of queries and keys. `top_weight`: bound on
        how much of a memory a token replaces; above 1 it may flip the sign of the old content. `parted_conv`: a
        checkpoint stores separate convolutions for queries, keys and values."""
        super().__init__()
        self.layer = layer
        self.num_heads = num_heads
        self.num_key_heads = num_key_heads
        self.key_dim = key_dim
        self.head_dim = head_dim
        keys, values = num_key_heads * key_dim, num_heads * head_dim
        parts = {"q": keys, "k": keys, "v": values, "gate": values}
        self.inputs = WholeParts(hidden_size, parts, stored_heads=num_key_heads)
        self.weights = WholeParts(hidden_size, {"beta": num_heads, "step": num_heads}, stored_heads=num_key_heads)
        mixed = {"q": keys, "k": keys, "v": values}
        self.conv = CausalConvolution(2 * keys + values, conv_length, bias=False, parts=mixed if parted_conv else None)
        self.top_weight = top_weight
        self.decay: ParameterOwner = Decay(num_heads)
        self.norm = RMSNorm(head_dim, norm_eps)
        self.out = Linear(values, hidden_size, shard="replicated")
        memory = (num_heads, key_dim, head_dim)
        self.cache_spec = StateSpec((self.conv.state_shape, memory), (None, torch.float32))

    def forward(self, x: Tensor, step: StepInputs, sampled: SampledRows | None = None) -> Tensor:
        """`sampled`: return only these rows [R, hidden]; the states of all tokens are still written."""
        step = step.of_layer(self.layer)
        cache: kernels.States = step.caches[self.layer]
        inputs, memory = cache.tensors
        plan = step.states(cache)
        heads, keys, values = self.num_key_heads, self.num_key_heads * self.key_dim, self.out.in_features
        mixed, gate, beta, step_size = self._project(x, step)
        q, k, v = self.conv(mixed, inputs, plan, silu=True).split([keys, keys, values], -1)
        y = kernels.gated_delta_rule(
            q.view(len(x), heads, -1),
            k.view(len(x), heads, -1),
            v.view(len(x), -1, self.head_dim),
            self.decay(step_size),
            self.top_weight * kernels.sigmoid(beta.float()),
            memory,
            plan,
        ).flatten(1)
        if sampled is not None:
            y, gate = (kernels.gather_rows(each.contiguous(), sampled.indices) for each in (y, gate))
            step = sampled.inputs
        normed = self.norm(y.view(-1, self.head_dim)).view_as(y)
        out: Tensor = self.out((normed * self._opened(gate.float())).to(x.dtype), step)
        return out

    def _project(self, x: Tensor, step: StepInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the inputs of the convolution [T, queries + keys + values], gates [T, values], and the weights and
        step sizes of heads [T, H]."""
        values = self.out.in_features
        mixed, gate = self.inputs(x, step).split([self.conv.weight.shape[0], values], -1)
        beta, step_size = self.weights(x, step).chunk(2, -1)
        return mixed, gate, beta, step_size

    def _opened(self, gate: Tensor) -> Tensor:
        """Return the factors of gates."""
        return kernels.silu(gate)


class JointDeltaNet(GatedDeltaNet):
    """A gated delta net with one projection for all that its input determines (Lara)."""

    first_products = ("inputs",)
    unquantized = ()

    def __init__(self, layer: int, hidden_size: int, **sizes: Any) -> None:
        """`sizes`: the other arguments of `GatedDeltaNet`."""
        super().__init__(layer, hidden_size, **sizes)
        rows = {**self.inputs.rows, **self.weights.rows}
        parts = {part: each.stop - each.start for part, each in rows.items() if part is not None}
        self.inputs = WholeParts(hidden_size, parts, stored_heads=self.num_key_heads)
        del self.weights

    def _project(self, x: Tensor, step: StepInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        values, heads = self.out.in_features, self.num_heads
        mixed, gate, beta, step_size = self.inputs(x, step).split([self.conv.weight.shape[0], values, heads, heads], -1)
        return mixed, gate, beta, step_size
