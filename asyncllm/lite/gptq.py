"""GPTQ: round a weight column by column, and adjust the remaining columns for the error of each.

Frantar and others, https://arxiv.org/abs/2210.17323.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Nearest", "inverse_factor", "round_columns"]

Nearest = Callable[[Tensor, int], Tensor]
"""(weights of one input feature [N, 1], index of the feature) -> nearest representable values."""

_COLUMNS_AT_ONCE = 128
"""Number of columns whose adjustments are applied to the rest of the weight together."""


def inverse_factor(moments: Tensor, damp: float) -> Tensor:
    """Return the upper Cholesky factor of the inverse of the inputs' second moments [K, K], with `damp` times their
    mean diagonal added. More is added if the result is not positive definite in float32."""
    mean = moments.diagonal().mean().clamp(min=1e-12)
    # An input that is always 0 gives no information about its weights.
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


def round_columns(weight: Tensor, moments: Tensor, nearest: Nearest, *, damp: float, ordered: bool) -> Tensor:
    """Round weight [N, K] float32 and return the rounded values.

    `ordered`: round the features with the largest inputs first, while most others can still be adjusted.
    """
    order = moments.diagonal().argsort(descending=True, stable=True) if ordered else torch.arange(len(moments))
    order = order.to(weight.device)
    left = weight[:, order]
    factor = inverse_factor(moments[order][:, order], damp)
    rounded = torch.empty_like(left)
    for start in range(0, left.shape[1], _COLUMNS_AT_ONCE):
        end = min(start + _COLUMNS_AT_ONCE, left.shape[1])
        part, own = left[:, start:end].clone(), factor[start:end, start:end]
        errors = torch.empty_like(part)
        for column, feature in enumerate(order[start:end].tolist()):
            values = part[:, column, None].clone()
            found = nearest(values, feature)
            error = (values - found) / own[column, column]
            part[:, column:] -= error * own[column, column:]
            rounded[:, start + column, None], errors[:, column, None] = found, error
        left[:, end:] -= errors @ factor[start:end, end:]
    return torch.empty_like(rounded).index_copy_(1, order, rounded)
