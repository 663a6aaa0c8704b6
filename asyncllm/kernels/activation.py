"""Activations; of gated ones, the first half of the last axis is the gate, the second half is what it lets through."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.dispatch import op

__all__ = ["ActivationKind", "activate", "gelu_tanh_mul", "silu_mul"]

ActivationKind = Literal["gelu", "gelu_tanh", "relu", "silu", "squared_relu"]


@op("activation:activate")
def activate(x: Tensor, kind: ActivationKind) -> Tensor:
    """Return the activation of every number, in float32 and rounded once. x [..., I] -> [..., I].

    gelu is the form with erf, gelu_tanh its approximation (Hendrycks and Gimpel, 2016); squared_relu is max(x, 0)^2 (So
    et al., 2021).
    """
    if kind == "gelu":
        return F.gelu(x)
    if kind == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if kind == "silu":
        return F.silu(x)
    return x.relu() if kind == "relu" else x.relu().square()


@op("activation:silu_mul")
def silu_mul(x: Tensor) -> Tensor:
    """silu(gate) * up. x [..., 2I], gate first -> [..., I]. SwiGLU of Shazeer, 2020."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate).mul_(up)


@op("activation:gelu_tanh_mul")
def gelu_tanh_mul(x: Tensor) -> Tensor:
    """gelu(gate) * up with the tanh form of gelu. x [..., 2I], gate first -> [..., I]. GeGLU of Shazeer, 2020."""
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)
