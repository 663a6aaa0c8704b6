"""Replacements of attention or an MLP in pruned layers: a single linear layer, or nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.layers.layer import Layer
from asyncllm.layers.linear import Linear
from asyncllm.layers.step_inputs import SampledRows, StepInputs

__all__ = ["Bypass", "LinearBypass"]


class Bypass(Layer):
    """Returns zeros for x [T, hidden], or for the `sampled` rows."""

    def forward(self, x: Tensor, step: StepInputs, sampled: SampledRows | None = None) -> Tensor:
        return torch.zeros_like(x if sampled is None else x[: len(sampled.indices)])


class LinearBypass(Layer):
    """A linear layer from x [T, hidden] to [T, hidden]."""

    def __init__(self, hidden_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.product = Linear(hidden_size, hidden_size, shard="replicated", bias=bias)

    def forward(self, x: Tensor, step: StepInputs, sampled: SampledRows | None = None) -> Tensor:
        """Return the product of x, or of the `sampled` rows only."""
        if sampled is not None:
            x, step = kernels.gather_rows(x, sampled.indices), sampled.inputs
        out: Tensor = self.product(x, step)
        return out
