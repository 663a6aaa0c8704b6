"""Products of numbers of 8 bits: activations are rounded as they come, weights were before."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from asyncllm.kernels.dispatch import op
from asyncllm.kernels.linear import check_out
from asyncllm.kernels.moe import fused_experts

__all__ = ["GROUP", "LARGEST", "ScaledWeight", "expand", "linear_scaled", "round_codes", "scaled_experts"]

GROUP = 128
"""Input features with one scale, in weights of blocks; else one scale is for all of them."""

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The types of 8 bits, and their largest numbers."""


class ScaledWeight(NamedTuple):
    """A weight [N, K], or one for each of E experts: code * scale of its row, and of its group of input features."""

    codes: Tensor
    """int8 or float8_e4m3fn [N, K] or [E, N, K]."""
    scales: Tensor
    """float32 [G, N] or [E, G, N]: one group, or one for each `GROUP` input features."""
    input_scale: Tensor | None
    """float32 [1]: the activations' scale, where it does not follow from them."""

    @property
    def grouped(self) -> bool:
        """Whether scales are of groups of input features, in weight and activations."""
        return self.scales.shape[-2] > 1


@op("linear.scaled:linear_scaled")
def linear_scaled(x: Tensor, weight: ScaledWeight, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """x weight^T + bias, with x rounded to the weight's type: each row, or each group of it where the weight has
    groups, is divided by its largest magnitude, so that this becomes the largest number of the type; or x by
    `input_scale`. Products are summed in float32 and rounded once.

    x [..., K], bias [N] of its type -> [..., N], contiguous `out` if given. Raises ValueError if `out` has another
    shape or dtype, or gaps.
    """
    check_out(x, weight.codes.shape[0], out)
    k = x.shape[-1]
    rows = x.reshape(-1, k).float()
    size = GROUP if weight.grouped else k
    y = rows.new_zeros((len(rows), weight.codes.shape[0]))
    for group, scales in enumerate(weight.scales):
        columns = slice(group * size, min(k, (group + 1) * size))
        codes, own = round_codes(rows[:, columns], weight.codes.dtype, weight.input_scale)
        y += codes.float() @ weight.codes[:, columns].float().t() * own * scales
    if bias is not None:
        y += bias.float()
    y = y.to(x.dtype).view(*x.shape[:-1], -1)
    return y if out is None else out.copy_(y)


def scaled_experts(x: Tensor, gate_up: ScaledWeight, down: ScaledWeight, weights: Tensor, expert_ids: Tensor) -> Tensor:
    """`fused_experts` with the weights expanded to x's type, and x as it is."""
    return fused_experts(x, expand(gate_up, x.dtype), expand(down, x.dtype), weights, expert_ids)


def round_codes(rows: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """rows [T, K] float32 -> codes of `dtype` [T, K] and scales float32 [T, 1], or [1] if given: code * scale is the
    nearest there is, to even."""
    largest = LARGEST[dtype]
    if scale is None:
        scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-12) / largest
    divided = (rows / scale).clamp(-largest, largest)
    return (divided.round() if dtype == torch.int8 else divided).to(dtype), scale


def expand(weight: ScaledWeight, dtype: torch.dtype) -> Tensor:
    """Return the weight, rounded once to `dtype`: codes have no more than eight bits that count, so they are exact in
    it."""
    whole, scales = weight.codes.to(dtype), weight.scales.transpose(-1, -2)
    if not weight.grouped:
        return whole.mul_(scales)
    if whole.shape[-1] % GROUP == 0:
        whole.view(*whole.shape[:-1], -1, GROUP).mul_(scales[..., None])
        return whole
    for group in range(scales.shape[-1]):
        whole[..., group * GROUP : (group + 1) * GROUP].mul_(scales[..., group : group + 1])
    return whole
