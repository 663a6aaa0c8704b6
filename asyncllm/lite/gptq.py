"""GPTQ: column by column, what rounding one changes is made up for by those that are not rounded yet.

Frantar and others, https://arxiv.org/abs/2210.17323.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm.lite.rounding import Grid

__all__ = ["inverse_factor", "round_columns"]

_COLUMNS_AT_ONCE = 128
"""Columns whose changes reach the rest of the weight together."""


def inverse_factor(moments: Tensor, damp: float) -> Tensor:
    """Return the upper Cholesky factor of the inverse of the inputs' second moments [K, K], with `damp` times their
    mean diagonal added. More is added where that is not positive definite in float32."""
    mean = moments.diagonal().mean().clamp(min=1e-12)
    # An input that is always 0 says nothing of its weights.
    for attempt in range(8):
        damped = moments.clone()
        damped.diagonal().add_(mean * damp * 10**attempt)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
            if not failed and upper.isfinite().all():
                return upper
    return torch.eye(len(moments), device=moments.device)


def round_columns(
    weight: Tensor, moments: Tensor, scales: Tensor, zeros: Tensor, grid: Grid, *, damp: float, ordered: bool
) -> Tensor:
    """weight [N, K] float32, scales and zero points [N, G, 1] of the file's groups -> codes [N, K] float32.

    `ordered`: the features with the largest inputs are rounded first, while there are most to make up for them.
    """
    size = weight.shape[1] // scales.shape[1]
    order = moments.diagonal().argsort(descending=True, stable=True) if ordered else torch.arange(len(moments))
    order = order.to(weight.device)
    left = weight[:, order]
    group_of = order // size
    factor = inverse_factor(moments[order][:, order], damp)
    codes = torch.empty_like(left)
    for start in range(0, left.shape[1], _COLUMNS_AT_ONCE):
        end = min(start + _COLUMNS_AT_ONCE, left.shape[1])
        part, own = left[:, start:end].clone(), factor[start:end, start:end]
        errors = torch.empty_like(part)
        for column, group in enumerate(group_of[start:end].tolist()):
            values, scale, zero = part[:, column, None], scales[:, group], zeros[:, group]
            code = grid.codes(values, scale, zero)
            error = (values - (code - zero) * scale) / own[column, column]
            part[:, column:] -= error * own[column, column:]
            codes[:, start + column, None], errors[:, column, None] = code, error
        left[:, end:] -= errors @ factor[start:end, end:]
    return torch.empty_like(codes).index_copy_(1, order, codes)
