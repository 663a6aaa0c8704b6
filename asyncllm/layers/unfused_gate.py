"""Gated MLPs with activations that no fused op has."""

from __future__ import annotations

from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels import RoundedRows, Rounding
from asyncllm.layers.mlp import GatedMLP
from asyncllm.layers.step_inputs import StepInputs

__all__ = ["UnfusedGatedMLP"]


class UnfusedGatedMLP(GatedMLP):
    """Like `GatedMLP`, with any activation, such as the GELU that has erf (ModernBERT)."""

    def rounding(self, step: StepInputs) -> Rounding | None:
        return None

    def forward(self, x: Tensor | RoundedRows, step: StepInputs) -> Tensor:
        gate, up = self.gate_up(x, step).chunk(2, -1)
        out: Tensor = self.down(kernels.activate(gate.contiguous(), self.activation).mul_(up), step)
        return out
