"""Normalisation of rows: RMS norm (Zhang and Sennrich, 2019) and layer norm (Ba et al., 2016)."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.dispatch import op

__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "mean_squares", "rms_norm"]


@op("norm:rms_norm")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale the last axis to unit root mean square, times weight. x [..., H], weight [H] -> [..., H], in x's dtype.

    The mean is computed in float32 whatever x's dtype; so is the product if weight is float32.
    """
    return _rms_norm(x, weight, eps)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # torch's own rms_norm makes nine calls on a CPU, where a decode step of a small model would spend a tenth of its
    # time.
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = torch.addcmul(_scalar(eps, x.device), length, length, value=1 / x.shape[-1]).rsqrt_()
    scaled = x * scale
    if scaled.dtype == x.dtype:
        return scaled.mul_(weight)
    return scaled.to(x.dtype).mul_(weight) if weight.dtype == x.dtype else scaled.mul_(weight).to(x.dtype)


@op("norm:mean_squares")
def mean_squares(x: Tensor, sizes: tuple[int, int]) -> Tensor:
    """The means of the squares of each row's first `sizes[0]` numbers and of the next `sizes[1]`, in float32.

    x [T, H] -> [T, 2].
    """
    parts = torch.split(x[:, : sum(sizes)], list(sizes), 1)
    lengths = [torch.linalg.vector_norm(part, dim=1, dtype=torch.float32) for part in parts]
    return torch.stack([length.square_() / size for length, size in zip(lengths, sizes, strict=True)], 1)


@op("norm:add_rms_norm")
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of residual + x, and that sum, the next residual. All [..., H]; neither input is changed."""
    residual = residual + x
    return _rms_norm(residual, weight, eps), residual


@op("norm:layer_norm")
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Shift and scale the last axis to mean 0 and variance 1, times weight, plus bias if given.

    x [..., H], weight and bias [H] of x's dtype -> [..., H], computed in float32 and rounded once.
    """
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


@op("norm:add_layer_norm")
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the `layer_norm` of residual + x, and that sum, the next residual. All [..., H]; neither input is
    changed."""
    residual = residual + x
    return layer_norm(residual, weight, bias, eps), residual


@cache
def _scalar(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device)
