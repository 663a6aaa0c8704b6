"""The gated MLP: down(act(gate(x)) * up(x))."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from asyncllm import kernels
from asyncllm.layers.layer import Layer
from asyncllm.layers.linear import Linear, MergedLinear

__all__ = ["Activation", "GatedMLP"]

Activation = Literal["silu", "gelu_tanh"]

_GATES = {"silu": kernels.silu_mul, "gelu_tanh": kernels.gelu_tanh_mul}


class GatedMLP(Layer):
    """x [T, hidden] -> [T, hidden]."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, activation: Activation = "silu", bias: bool = False
    ) -> None:
        super().__init__()
        self.gate_up = MergedLinear(hidden_size, {"gate": intermediate_size, "up": intermediate_size}, bias=bias)
        self.down = Linear(intermediate_size, hidden_size, bias=bias)
        self.gate = _GATES[activation]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.gate(self.gate_up(x)))
        return out
