"""Products with a weight matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.dispatch import op

__all__ = ["check_out", "linear", "linear_invariant", "linear_silu_mul"]


@op("linear:linear")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """x weight^T + bias. x [..., K], weight [N, K], bias [N], all of one dtype -> [..., N], contiguous `out` if given.

    Raises ValueError if `out` has another shape or dtype, or gaps.
    """
    check_out(x, weight, out)
    y = F.linear(x, weight, bias)
    return y if out is None else out.copy_(y)


@op("linear_gated:linear_silu_mul")
def linear_silu_mul(x: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up, where gate and up are the halves of x weight^T: `silu_mul` of `linear`, to the same roundings.

    x [..., K], weight [2 * N, K] (the N rows of the gate first), both of one dtype -> [..., N].
    """
    gate, up = F.linear(x, weight).chunk(2, -1)
    return F.silu(gate).mul_(up)


@op("linear:linear_invariant")
def linear_invariant(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """`linear` whose every row comes out with the same bits whatever other rows are in x.

    Matrix libraries choose the order of summation by the number of rows. Here it depends on the weight's shape alone,
    so that a request gets the same tokens alone and in a batch (He, "Defeating Nondeterminism in LLM Inference", 2025).
    """
    check_out(x, weight, out)
    rows = x.reshape(-1, x.shape[-1]).float()
    y = x.new_empty((rows.shape[0], weight.shape[0]), dtype=torch.float32)
    for row, result in zip(rows, y, strict=True):
        torch.mv(weight.float(), row, out=result)
    if bias is not None:
        y += bias.float()
    y = y.to(x.dtype).view(*x.shape[:-1], weight.shape[0])
    return y if out is None else out.copy_(y)


def check_out(x: Tensor, weight: Tensor, out: Tensor | None) -> None:
    """Raise ValueError unless `out` can take the product of x and weight."""
    shape = (*x.shape[:-1], weight.shape[0])
    if out is not None and (out.shape != shape or out.dtype != x.dtype or not out.is_contiguous()):
        raise ValueError(f"out is {out.dtype} {list(out.shape)}, not contiguous {x.dtype} {list(shape)}")
