"""The plain MLP with xIELU, an activation of learned curvature (Huang and Schlag, arXiv 2411.13010)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asyncllm.layers.layer import Layer, ParameterOwner
from asyncllm.layers.linear import Linear
from asyncllm.layers.step_inputs import StepInputs

__all__ = ["XIELU", "XIELUMLP"]


class XIELU(ParameterOwner):
    """alpha_p x^2 + beta x above 0; below, alpha_n (e^x - 1 - x) + beta x. Computed in float32, and rounded once.

    The stored parameters are the softplus inputs for alpha_p and for alpha_n - beta.
    """

    parameter_dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.empty(1), requires_grad=False)
        self.alpha_n = nn.Parameter(torch.empty(1), requires_grad=False)
        self.beta = nn.Parameter(torch.empty(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., I] -> [..., I]."""
        wide = x.float()
        below, above = wide.clamp(max=0), wide.clamp(min=0)
        curved = F.softplus(self.alpha_p) * above.square()
        curved += (self.beta + F.softplus(self.alpha_n)) * (torch.expm1(below) - below)
        return curved.add_(self.beta * wide).to(x.dtype)


class XIELUMLP(Layer):
    """x [T, hidden] -> [T, hidden]."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.up = Linear(hidden_size, intermediate_size, shard="column")
        self.act = XIELU()
        self.down = Linear(intermediate_size, hidden_size, shard="row")

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        out: Tensor = self.down(self.act(self.up(x, step)), step)
        return out
