"""Gated activations: the first half of the last axis is the gate, the second half is what it lets through."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.dispatch import op

__all__ = ["gelu_tanh_mul", "silu_mul"]


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
