"""Mamba-2 with multipliers, and with the gate after the norm or without a norm (Falcon-H1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from asyncllm import kernels
from asyncllm.layers.linear import Linear
from asyncllm.layers.mamba2 import GroupedNorm, Mamba2
from asyncllm.layers.step_inputs import StepInputs

__all__ = ["Gate", "ScaledMamba2"]

Gate = Literal["before_norm", "after_norm", "alone"]
"""Where silu of the gate is applied: to the input of the norm, to its output, or without a norm."""


class _Gate(nn.Module):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return x [T, size] times silu of a gate."""
        return (x * kernels.silu(gate.float())).to(x.dtype)


class _GatedAfterNorm(GroupedNorm):
    """RMS norm over each group of neighbouring features of x [T, size], multiplied by silu of a gate."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        grouped = x.float().view(len(x), self.groups, -1)
        normed = (grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.eps)).view_as(x)
        return (self.weight * normed * kernels.silu(gate.float())).to(x.dtype)


class ScaledMamba2(Mamba2):
    """Like `Mamba2`, with a multiplier on each part of the first product and a choice of where the gate applies."""

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        *,
        gate: Gate,
        multipliers: Sequence[float],
        out_bias: bool,
        **sizes: Any,
    ) -> None:
        """`multipliers`: of the gate, the values, the writing vectors, the reading vectors, and the steps. `out_bias`:
        bias of the last product. `sizes`: the other arguments of `Mamba2`."""
        super().__init__(layer, hidden_size, **sizes)
        inner, shared = self.sizes[0], self.num_groups * self.state_size
        if gate == "alone":
            self.norm = _Gate()  # type: ignore[assignment]
        elif gate == "after_norm":
            self.norm = _GatedAfterNorm(inner, self.num_groups, self.norm.eps)
        self.out = Linear(inner, hidden_size, shard="replicated", bias=out_bias)
        self.multipliers = tuple(zip(multipliers, (inner, inner, shared, shared, self.num_heads), strict=True))
        self.multiplier: Tensor | None = None

    def place(self, device: torch.device) -> None:
        self.multiplier = torch.cat([torch.full((size,), factor, device=device) for factor, size in self.multipliers])

    def _project(self, x: Tensor, step: StepInputs) -> Tensor:
        assert self.multiplier is not None
        return (super()._project(x, step) * self.multiplier).to(x.dtype)
