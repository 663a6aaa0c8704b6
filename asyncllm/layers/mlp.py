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

_FUSED = {(kernels.linear, kernels.silu_mul): kernels.linear_silu_mul}
"""Products and gates that are one op together, for weights without bias."""


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
        gate_up = self.gate_up
        # Whatever else the product is by now (batch invariant, say) has its own gate behind it.
        fused = _FUSED.get((gate_up.product, self.gate)) if gate_up.bias is None else None
        out: Tensor = self.down(self.gate(gate_up(x)) if fused is None else fused(x, gate_up.weight))
        return out
