"""Products with a weight matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.activation import alike
from asyncllm.kernels.dispatch import op

__all__ = [
    "check_out",
    "linear",
    "linear_by_head",
    "linear_by_head_invariant",
    "linear_exact",
    "linear_invariant",
    "linear_silu_mul",
]


@op("linear.product:linear")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """x weight^T + bias. x [..., K], weight [N, K], bias [N], all of one dtype -> [..., N], contiguous `out` if given.

    Raises ValueError if `out` has another shape or dtype, or gaps.
    """
    if out is None:
        return F.linear(x, weight, bias)
    check_out(x, weight.shape[0], out)
    return out.copy_(F.linear(x, weight, bias))


@op("linear.gated:linear_silu_mul")
def linear_silu_mul(x: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up, where gate and up are the halves of x weight^T; rounds like `silu_mul` of `linear`.

    x [..., K], weight [2 * N, K] (the N rows of the gate first), both of one dtype -> [..., N].
    """
    gate, up = F.linear(x, weight).chunk(2, -1)
    return alike(F.silu, gate).mul_(up)


@op("linear.product:linear_invariant")
def linear_invariant(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """`linear`, with every row rounded to the same bits whatever other rows are in x.

    Matrix libraries choose the order of summation by the number of rows. Here it depends only on the weight's shape, so
    that a request gets the same tokens alone and in a batch (He, "Defeating Nondeterminism in LLM Inference", 2025).
    """
    check_out(x, weight.shape[0], out)
    rows = x.reshape(-1, x.shape[-1]).float()
    y = x.new_empty((rows.shape[0], weight.shape[0]), dtype=torch.float32)
    for row, result in zip(rows, y, strict=True):
        torch.mv(weight.float(), row, out=result)
    if bias is not None:
        y += bias.float()
    y = y.to(x.dtype).view(*x.shape[:-1], weight.shape[0])
    return y if out is None else out.copy_(y)


@op("linear.exact:linear_exact")
def linear_exact(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias with float32 precision, whatever the dtype of x. x [..., K], weight [N, K] and bias [N] float32
    -> [..., N] float32."""
    return F.linear(x.float(), weight, bias)


@op("linear.by_head:linear_by_head")
def linear_by_head(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return each head's product: x [T, H, K] times weight [H, N, K] transposed -> [T, H, N], contiguous `out` if
    given.

    x and weight may have any strides, except that the last axis of x is contiguous.
    """
    return torch.einsum("thk,hnk->thn", x, weight) if out is None else out.copy_(linear_by_head(x, weight))


@op("linear.by_head:linear_by_head_invariant")
def linear_by_head_invariant(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`linear_by_head`, with every row rounded to the same bits whatever other rows are in x."""
    y = x.new_empty((*x.shape[:2], weight.shape[1])) if out is None else out
    wide = weight.float()
    for row, result in zip(x, y, strict=True):
        result.copy_(torch.bmm(wide, row.float()[..., None])[..., 0])
    return y


def check_out(x: Tensor, out_features: int, out: Tensor | None) -> None:
    """Raise ValueError unless `out` can hold the product of x and a weight with `out_features` output features."""
    shape = (*x.shape[:-1], out_features)
    if out is not None and (out.shape != shape or out.dtype != x.dtype or not out.is_contiguous()):
        raise ValueError(f"out is {out.dtype} {list(out.shape)}, not contiguous {x.dtype} {list(shape)}")
