"""8-bit products: weights are stored in 8 bits, and activations are rounded to 8 bits for each product."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from asyncllm.kernels.activation import silu_mul
from asyncllm.kernels.dispatch import op
from asyncllm.kernels.linear import check_out

__all__ = [
    "GROUP",
    "LARGEST",
    "RoundedRows",
    "Rounding",
    "ScaledWeight",
    "expand",
    "linear_rounded",
    "linear_rounded_silu_mul",
    "linear_scaled",
    "round_codes",
    "round_rows",
    "scaled_experts",
]

GROUP = 128
"""Number of input features with one scale, in weights with groups; otherwise one scale applies to a whole row."""

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""8-bit dtype -> its largest number."""


class ScaledWeight(NamedTuple):
    """A weight [N, K], or one for each of E experts: each number is its code times the scale of its row and group of
    input features."""

    codes: Tensor
    """int8 or float8_e4m3fn [N, K] or [E, N, K]."""
    scales: Tensor
    """float32 [G, N] or [E, G, N]: one group, or one for each `GROUP` input features."""
    input_scale: Tensor | None
    """float32 [1]: the activations' scale, or None if it is computed from them."""

    @property
    def rounding(self) -> Rounding:
        """The rounding of rows for a product with the weight."""
        return Rounding(self.codes.dtype, self.scales.shape[-2] > 1, self.input_scale)


class Rounding(NamedTuple):
    """How rows are rounded to 8 bits: each row, or each group of it, is scaled so that its largest magnitude becomes
    the dtype's largest number, or all rows by a given scale."""

    dtype: torch.dtype
    """int8 or float8_e4m3fn."""
    grouped: bool = False
    """Whether each `GROUP` features of a row have their own scale."""
    scale: Tensor | None = None
    """float32 [1]: the scale of all rows, or None if it is computed from them."""

    def groups(self, size: int) -> int:
        """Return the number of scales of a row of `size` features."""
        return -(-size // GROUP) if self.grouped else 1


class RoundedRows(NamedTuple):
    """Rows [T, K]: each number is its code times the scale of its row or group of features."""

    codes: Tensor
    """int8 or float8_e4m3fn [T, K]."""
    scales: Tensor
    """float32 [T, G]."""
    dtype: torch.dtype
    """The rows' dtype before rounding, and that of products with them."""


@op("linear.scaled:linear_scaled")
def linear_scaled(x: Tensor, weight: ScaledWeight, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """x weight^T + bias, with x rounded by the weight's `rounding`. Products are summed in float32 and rounded once.

    x [..., K], bias [N] of its dtype -> [..., N], contiguous `out` if given. Raises ValueError if `out` has another
    shape or dtype, or gaps.
    """
    check_out(x, weight.codes.shape[0], out)
    rows = _rounded(x.reshape(-1, x.shape[-1]), weight.rounding)
    y = _product(rows.codes, rows.scales, weight, bias, x.dtype).view(*x.shape[:-1], -1)
    return y if out is None else out.copy_(y)


@op("linear.scaled:linear_rounded")
def linear_rounded(
    codes: Tensor, scales: Tensor, weight: ScaledWeight, bias: Tensor | None = None, *, dtype: torch.dtype
) -> Tensor:
    """`linear_scaled` for rows that are already rounded.

    codes [T, K] of the weight's dtype and scales float32 [T, G], contiguous, bias [N] of `dtype` -> [T, N] in `dtype`.
    """
    return _product(codes, scales, weight, bias, dtype)


@op("linear.scaled:linear_rounded_silu_mul")
def linear_rounded_silu_mul(
    codes: Tensor, scales: Tensor, weight: ScaledWeight, *, dtype: torch.dtype
) -> Tensor | None:
    """Return `silu_mul` of `linear_rounded` [T, N // 2] in `dtype`, or None if `linear_rounded` and `gate_rounded` take
    less time.

    For one row they do not, since a kernel that gates and rounds a row runs on a single multiprocessor.
    """
    return silu_mul(_product(codes, scales, weight, None, dtype)) if len(codes) == 1 else None


def _product(codes: Tensor, scales: Tensor, weight: ScaledWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    y = torch.zeros((len(codes), weight.codes.shape[0]), dtype=torch.float32, device=codes.device)
    parts = zip(_groups(codes, weight.rounding), _groups(weight.codes, weight.rounding), strict=True)
    for group, (rows, columns) in enumerate(parts):
        y += rows.float() @ columns.float().t() * scales[:, group : group + 1] * weight.scales[group]
    if bias is not None:
        y += bias.float()
    return y.to(dtype)


def _groups(rows: Tensor, rounding: Rounding) -> tuple[Tensor, ...]:
    return torch.split(rows, GROUP, 1) if rounding.grouped else (rows,)


@op("rounded:round_rows")
def round_rows(x: Tensor, rounding: Rounding) -> RoundedRows:
    """Round the rows of x [T, K] to 8 bits."""
    return _rounded(x, rounding)


def _rounded(x: Tensor, rounding: Rounding) -> RoundedRows:
    largest = LARGEST[rounding.dtype]
    codes, scales = [], []
    for part in _groups(x.float(), rounding):
        scale = rounding.scale
        if scale is None:
            scale = part.abs().amax(-1, keepdim=True).clamp(min=1e-12) / largest
        # A multiplication is cheaper than a division.
        code = (part * scale.reciprocal()).clamp(-largest, largest)
        codes.append((code.round() if rounding.dtype == torch.int8 else code).to(rounding.dtype))
        scales.append(scale.expand(len(x), 1))
    return RoundedRows(torch.cat(codes, 1), torch.cat(scales, 1), x.dtype)


@op("linear.scaled_experts:scaled_experts")
def scaled_experts(x: Tensor, gate_up: ScaledWeight, down: ScaledWeight, weights: Tensor, expert_ids: Tensor) -> Tensor:
    """`fused_experts` with the products of `linear_scaled`."""
    outputs = x.new_zeros((*expert_ids.shape, x.shape[1]))
    for expert in sorted(set(expert_ids.flatten().tolist())):
        if expert >= 0:
            token, choice = (expert_ids == expert).nonzero(as_tuple=True)
            first, second = (ScaledWeight(each.codes[expert], each.scales[expert], None) for each in (gate_up, down))
            hidden = silu_mul(linear_scaled(x[token], first))
            outputs[token, choice] = linear_scaled(hidden, second)
    return torch.einsum("tk,tkh->th", weights, outputs.float()).to(x.dtype)


def round_codes(rows: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Round the rows of a weight [N, K] float32. Return codes of `dtype` [N, K], nearest with ties to even, and scales
    float32 [N, 1], or the given `scale`."""
    largest = LARGEST[dtype]
    if scale is None:
        scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-12) / largest
    divided = (rows / scale).clamp(-largest, largest)
    return (divided.round() if dtype == torch.int8 else divided).to(dtype), scale


def expand(weight: ScaledWeight, dtype: torch.dtype) -> Tensor:
    """Return the weight, rounded once to `dtype`, which represents 8-bit codes exactly."""
    whole, scales = weight.codes.to(dtype), weight.scales.transpose(-1, -2)
    if scales.shape[-1] == 1:
        return whole.mul_(scales)
    if whole.shape[-1] % GROUP == 0:
        whole.view(*whole.shape[:-1], -1, GROUP).mul_(scales[..., None])
        return whole
    for group in range(scales.shape[-1]):
        whole[..., group * GROUP : (group + 1) * GROUP].mul_(scales[..., group : group + 1])
    return whole
