"""Activations. In gated ones, the first half of the last axis is the gate and the second half is what it multiplies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.dispatch import op

__all__ = ["ActivationKind", "activate", "clipped_silu_mul", "gelu_tanh_mul", "sigmoid", "silu", "silu_mul", "softplus"]

ActivationKind = Literal["gelu", "gelu_tanh", "relu", "silu", "squared_relu"]

_LANES = 64
"""A multiple of the number of elements per iteration of a vectorized loop, for any dtype and CPU."""
_ONE_THREAD = 32768
"""torch divides loops over this many elements among its threads (at::internal::GRAIN_SIZE)."""


@op("activation:activate")
def activate(x: Tensor, kind: ActivationKind) -> Tensor:
    """Apply the activation to every number, in float32, and round once. x [..., I] -> [..., I].

    gelu is the form with erf, gelu_tanh its approximation (Hendrycks and Gimpel, 2016); squared_relu is max(x, 0)^2 (So
    et al., 2021).
    """
    if kind == "gelu":
        return alike(F.gelu, x)
    if kind == "gelu_tanh":
        return alike(_gelu_tanh, x)
    if kind == "silu":
        return silu(x)
    return x.relu() if kind == "relu" else x.relu().square()


@op("activation:silu_mul")
def silu_mul(x: Tensor) -> Tensor:
    """silu(gate) * up. x [..., 2I], gate first -> [..., I]. SwiGLU (Shazeer, 2020)."""
    gate, up = x.chunk(2, -1)
    return alike(F.silu, gate).mul_(up)


@op("activation:gelu_tanh_mul")
def gelu_tanh_mul(x: Tensor) -> Tensor:
    """gelu(gate) * up with the tanh form of gelu. x [..., 2I], gate first -> [..., I]. GeGLU (Shazeer, 2020)."""
    gate, up = x.chunk(2, -1)
    return alike(_gelu_tanh, gate).mul_(up)


def clipped_silu_mul(x: Tensor, limit: float) -> Tensor:
    """min(silu(gate), limit) * up, with up within the limit on both sides. x [..., 2I], gate first -> [..., I]."""
    gate, up = x.chunk(2, -1)
    return alike(F.silu, gate).clamp_(max=limit).mul_(up.clamp(-limit, limit))


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x) of every number, as `alike` computes it."""
    return alike(F.silu, x)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) of every number, as `alike` computes it."""
    return alike(torch.sigmoid, x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) of every number, as `alike` computes it."""
    return alike(F.softplus, x)


_gelu_tanh = partial(F.gelu, approximate="tanh")


def alike(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function to every number so that its bits depend only on the number and not on its position. x [...] ->
    [...].

    On a CPU torch computes the last numbers of a tensor, and of each thread's part of it, without vector instructions,
    which round differently. Which numbers these are depends on how many rows a step has. Therefore a tensor of odd size
    is padded, and one that threads would cut at an odd position is computed in pieces.
    """
    if not x.is_cpu or _is_even(x):
        return function(x)
    flat, count = x.reshape(-1), x.numel()
    padded = F.pad(flat, (0, -count % _LANES))
    pieces = [function(piece) for piece in torch.split(padded, _ONE_THREAD // 2)]
    whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return whole[:count].view(x.shape)


def _is_even(x: Tensor) -> bool:
    """Return whether torch computes all numbers with vector instructions."""
    if x.dim() == 0 or x.stride(-1) != 1 or x.shape[-1] % _LANES:
        return False
    count = x.numel()
    if count < _ONE_THREAD:
        return True
    threads = min(torch.get_num_threads(), -(-count // _ONE_THREAD))
    return -(-count // threads) % _LANES == 0
