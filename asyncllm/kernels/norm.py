"""Root mean square normalisation (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

__all__ = ["add_rms_norm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale the last axis to unit root mean square, times weight. x [..., H], weight [H] -> [..., H], in x's dtype.

    The mean is taken in float32 whatever x's dtype; so is the product when weight is float32.
    """
    if weight.dtype != x.dtype:
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """residual + x, normalised, and that sum itself: the next residual. All [..., H]; neither input is changed."""
    residual = residual + x
    return rms_norm(residual, weight, eps), residual
