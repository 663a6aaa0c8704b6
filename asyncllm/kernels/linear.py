"""Products with a weight matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.dispatch import op

__all__ = ["linear", "linear_invariant"]


@op("linear:linear")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias. x [..., K], weight [N, K], bias [N], all of one dtype -> [..., N]."""
    return F.linear(x, weight, bias)


@op("linear:linear_invariant")
def linear_invariant(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` whose every row comes out with the same bits whatever other rows are in x.

    Matrix libraries choose the order of summation by the number of rows. Here it depends on the weight's shape alone,
    so that a request gets the same tokens alone and in a batch (He, "Defeating Nondeterminism in LLM Inference", 2025).
    """
    rows = x.reshape(-1, x.shape[-1]).float()
    y = x.new_empty((rows.shape[0], weight.shape[0]), dtype=torch.float32)
    for row, result in zip(rows, y, strict=True):
        torch.mv(weight.float(), row, out=result)
    if bias is not None:
        y += bias.float()
    return y.to(x.dtype).view(*x.shape[:-1], weight.shape[0])
