"""Products of 16-bit or 32-bit activations with 4-bit or 8-bit weights: integers with a scale and a zero point for each
group of input features. All file formats are converted to one layout when they are loaded."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.activation import silu_mul
from asyncllm.kernels.dispatch import op
from asyncllm.kernels.linear import check_out
from asyncllm.kernels.moe import chosen_experts, fused_experts

__all__ = [
    "PLANE",
    "PackedWeight",
    "chunk_of",
    "dequantize",
    "expand_stack",
    "linear_packed",
    "linear_packed_silu_mul",
    "natural",
    "pack_codes",
    "packed_experts",
    "unpack_codes",
]

PLANE = 32
"""Input features that are adjacent, one in each word: value i of word j is feature 32 i + j of its chunk. A shift and a
mask thus extract, from a run of words, a run of features in their natural order."""


class PackedWeight(NamedTuple):
    """A weight [N, K], or one for each of E experts. A number is (code - zero) * scale, with the zero and scale of its
    feature's group."""

    words: Tensor
    """int16 [C, N, 32] or [E, C, N, 32], C chunks of `chunk_of(bits)` input features, the last one padded."""
    scales: Tensor
    """[G, N] or [E, G, N], float16, bfloat16 or float32."""
    zeros: Tensor
    """uint8, in the shape of `scales`."""
    order: Tensor | None
    """int64 [K] or [E, K]: the input feature at each place, or None if the features of a group are adjacent."""
    bits: int
    """4 or 8."""
    group_size: int
    """Places with one scale: a multiple of 32, or K or more for a single group."""
    in_features: int

    @property
    def out_features(self) -> int:
        return self.words.shape[-2]


def chunk_of(bits: int) -> int:
    """Return the number of input features in a run of 32 words."""
    return PLANE * (16 // bits)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """codes uint8 [N, K] below 2^bits, bits 4 or 8 -> words int16 [C, N, 32], as in `PackedWeight`."""
    n, k = codes.shape
    chunk = chunk_of(bits)
    planes = F.pad(codes, (0, -k % chunk)).view(n, -1, chunk // PLANE, PLANE)
    words = planes[:, :, 0].to(torch.int32)
    for index in range(1, chunk // PLANE):
        words |= planes[:, :, index].to(torch.int32) << (bits * index)
    return words.to(torch.int16).transpose(0, 1).contiguous()


def unpack_codes(words: Tensor, bits: int, in_features: int) -> Tensor:
    """Return the inverse of `pack_codes`: words [C, N, 32] -> codes uint8 [N, in_features]."""
    shifts = torch.arange(0, 16, bits, dtype=torch.int16, device=words.device).view(-1, 1, 1)
    planes = (words.unsqueeze(1) >> shifts) & ((1 << bits) - 1)
    return planes.to(torch.uint8).permute(2, 0, 1, 3).flatten(1)[:, :in_features]


@op("linear.packed:dequantize")
def dequantize(
    words: Tensor,
    scales: Tensor,
    zeros: Tensor,
    *,
    bits: int,
    group_size: int,
    in_features: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return a single weight [N, K], with input features in the order of their places, rounded once to `dtype`. The
    other arguments are fields of `PackedWeight`."""
    codes = unpack_codes(words, bits, in_features)
    size = min(group_size, in_features)

    def spread(each: Tensor) -> Tensor:
        return each.t().repeat_interleave(size, 1)[:, :in_features]

    return codes.float().sub_(spread(zeros)).mul_(spread(scales.float())).to(dtype)


@op("linear.packed:linear_packed")
def linear_packed(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """x weight^T + bias, summed in float32. x [..., K], bias [N] of its dtype -> [..., N], contiguous `out` if given.

    The weight's values are exact here; for many tokens a launcher may round them to x's dtype first.

    Raises ValueError if `out` has another shape or dtype, or gaps.
    """
    check_out(x, weight.out_features, out)
    whole = _whole(weight, torch.float32)
    rows = x.float() if weight.order is None else x.float().index_select(-1, weight.order)
    y = F.linear(rows, whole, None if bias is None else bias.float()).to(x.dtype)
    return y if out is None else out.copy_(y)


@op("linear.packed:linear_packed_silu_mul")
def linear_packed_silu_mul(x: Tensor, weight: PackedWeight) -> Tensor:
    """silu(gate) * up of x [..., K] times a weight whose first half of rows is the gate's -> [..., N / 2], rounded like
    `silu_mul` of `linear_packed`."""
    return silu_mul(linear_packed(x, weight))


@op("linear.packed_experts:packed_experts")
def packed_experts(
    x: Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    weights: Tensor,
    expert_ids: Tensor,
) -> Tensor:
    """`fused_experts` with packed weights. Only the chosen experts are expanded, to x's dtype."""
    chosen, places = chosen_experts(expert_ids)
    dense = []
    for stack in (gate_up, down):
        each = [_natural(stack, expert, x.dtype) for expert in chosen.tolist()]
        none = x.new_empty(0, stack.out_features, stack.in_features)
        dense.append(torch.stack(each) if each else none)
    return fused_experts(x, dense[0], dense[1], weights, places)


def expand_stack(stack: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Return the weights [E, N, K] of all experts, rounded once to `dtype`."""
    return torch.stack([_natural(stack, expert, dtype) for expert in range(len(stack.words))])


def _whole(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    return dequantize(
        weight.words,
        weight.scales,
        weight.zeros,
        bits=weight.bits,
        group_size=weight.group_size,
        in_features=weight.in_features,
        dtype=dtype,
    )


def _natural(stack: PackedWeight, expert: int, dtype: torch.dtype) -> Tensor:
    """Return the weight of one expert, with input features in their natural order."""
    order = None if stack.order is None else stack.order[expert]
    one = stack._replace(words=stack.words[expert], scales=stack.scales[expert], zeros=stack.zeros[expert], order=order)
    return natural(one, dtype)


def natural(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Return a single weight [N, K], with input features in their natural order."""
    whole = _whole(weight, dtype)
    if weight.order is None:
        return whole
    return torch.empty_like(whole).index_copy_(1, weight.order, whole)
