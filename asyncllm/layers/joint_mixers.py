"""Attention and a state layer side by side, instead of attention alone (Falcon-H1)."""

from __future__ import annotations

from torch import Tensor

from asyncllm.layers.attention import Attention
from asyncllm.layers.layer import Layer
from asyncllm.layers.short_convolution import StateLayer
from asyncllm.layers.step_inputs import SampledRows, StepInputs

__all__ = ["JointMixers"]


class JointMixers(Layer):
    """x [T, hidden] -> attention(x) + state(x), with a factor on each input and each output, attention's first."""

    def __init__(
        self,
        attention: Attention,
        state: StateLayer,
        *,
        in_factors: tuple[float, float],
        out_factors: tuple[float, float],
    ) -> None:
        super().__init__()
        self.attention = attention
        self.state = state
        self.in_factors, self.out_factors = in_factors, out_factors

    def forward(self, x: Tensor, step: StepInputs, sampled: SampledRows | None = None) -> Tensor:
        """`sampled`: return only these rows [R, hidden]; keys, values and states of all tokens are still written."""
        attended: Tensor = self.attention(_scaled(x, self.in_factors[0]), step, sampled)
        stated: Tensor = self.state(_scaled(x, self.in_factors[1]), step, sampled)
        return attended.mul_(self.out_factors[0]).add_(stated, alpha=self.out_factors[1])


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor
