"""Gated MLPs with limits of what the gate multiplies (Step 3.5)."""

from __future__ import annotations

from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels import RoundedRows, Rounding
from asyncllm.layers.mlp import GatedMLP
from asyncllm.layers.step_inputs import StepInputs

__all__ = ["ClippedMLP"]


class ClippedMLP(GatedMLP):
    """Like `GatedMLP`, with the silu of the gate at most `limit`, and what it multiplies within it."""

    def __init__(self, *sizes: int, limit: float) -> None:
        super().__init__(*sizes)
        self.limit = limit

    def rounding(self, step: StepInputs) -> Rounding | None:
        return None

    def forward(self, x: Tensor | RoundedRows, step: StepInputs) -> Tensor:
        out: Tensor = self.down(kernels.clipped_silu_mul(self.gate_up(x, step), self.limit), step)
        return out
