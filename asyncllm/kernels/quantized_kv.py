"""Keys and values in 8 or 4 bits: one KV head of one token's key or value, a *line*, is rounded by itself.

Of a line x of D numbers a code is kept for each, and a scale and a middle for all of them: x = scale * (code - centre)
+ middle. Codes of integers reach equally far to both sides of the middle of the line's smallest and largest number
(asymmetric rounding, as LMDeploy's `quant_policy` 8 and 4 have it, whose zero point is another form of the same). Codes
of e4m3 are x / scale; their middle is 0.

Scale and middle are bfloat16, as that has the range of every model's type. The middle is rounded first, and the scale
up, so that no code is cut off. Both together are one int32, the line's *range*: the scale in its low half. Where a line
has NaN or infinity its scale is NaN, and its codes are those of zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["FORMATS", "KVFormat", "QuantizedKV", "dequantize_lines", "quantize_lines"]

_SMALLEST = 2.0**-126
"""A scale below this has no reciprocal: then codes are 0, and less than 2^-118 is lost."""


class KVFormat(NamedTuple):
    """How the numbers of a line are rounded."""

    name: str
    bits: int
    centre: float
    """The code, if there were one, of the line's middle."""
    reach: float
    """From the centre to the outermost codes."""
    dtype: torch.dtype
    """Of what is stored. float8_e4m3fn is stored as its bytes; two codes of 4 bits are a byte: those of numbers j and
    j + D / 2, the first in the low half."""

    @property
    def per_byte(self) -> int:
        """Codes of a byte."""
        return 8 // self.bits


FORMATS = {
    each.name: each
    for each in (
        KVFormat("int8", 8, -0.5, 127.5, torch.int8),
        KVFormat("int4", 4, 7.5, 7.5, torch.uint8),
        KVFormat("fp8", 8, 0.0, 448.0, torch.uint8),
    )
}


class QuantizedKV(NamedTuple):
    """Keys and values of one layer in blocks, as `PagedKV`, in codes and ranges."""

    k: Tensor
    """Codes [blocks, kv_heads, block_size, D / codes of a byte]."""
    v: Tensor
    k_ranges: Tensor
    """int32 [blocks, kv_heads, block_size]."""
    v_ranges: Tensor
    lines: Tensor
    """[2 * blocks * kv_heads * block_size, D / codes of a byte]: the lines of k, then those of v, in the same
    memory."""
    ranges: Tensor
    """int32 [2 * blocks * kv_heads * block_size]."""
    format: KVFormat

    @staticmethod
    def over(codes: Tensor, ranges: Tensor, form: KVFormat) -> QuantizedKV:
        """Return the cache in codes [2, blocks, kv_heads, block_size, bytes] and ranges [2, blocks, kv_heads,
        block_size], contiguous: keys, then values."""
        lines = codes.view(-1, codes.shape[-1])
        return QuantizedKV(codes[0], codes[1], ranges[0], ranges[1], lines, ranges.view(-1), form)

    @property
    def head_dim(self) -> int:
        return self.k.shape[-1] * self.format.per_byte

    def write(self, lines: Tensor, kv: Tensor) -> None:
        """Write kv [N, D] to lines [N]."""
        codes, ranges = quantize_lines(kv, self.format)
        self.lines.index_copy_(0, lines, codes)
        self.ranges.index_copy_(0, lines, ranges)

    def read(self, lines: Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers of lines [N] -> [N, D]."""
        codes, ranges = self.lines.index_select(0, lines), self.ranges.index_select(0, lines)
        return dequantize_lines(codes, ranges, self.format).to(dtype)

    def read_pages(self, pages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of whole pages [N], counted head by head -> [N, block_size, D] each."""
        keys, values = (
            dequantize_lines(
                codes.flatten(0, 1).index_select(0, pages), ranges.flatten(0, 1).index_select(0, pages), self.format
            ).to(dtype)
            for codes, ranges in ((self.k, self.k_ranges), (self.v, self.v_ranges))
        )
        return keys, values

    def weigh(self, lines: Tensor, weights: Tensor) -> Tensor:
        """Sums of lines [L, S] by weights [L, G, S] -> [L * G, D]."""
        values = self.read(lines.reshape(-1), weights.dtype)
        return torch.bmm(weights, values.view(*lines.shape, -1)).flatten(0, 1)


def quantize_lines(x: Tensor, form: KVFormat) -> tuple[Tensor, Tensor]:
    """Return codes [..., D / codes of a byte] and ranges int32 [...] of x [..., D], computed in float32. D is even."""
    x = x.float()
    middle = x.new_zeros(x.shape[:-1])
    if form.centre:
        low, high = x.aminmax(dim=-1)
        middle = (low * 0.5 + high * 0.5).bfloat16().float()
    offsets = x - middle[..., None]
    scale = _round_up(offsets.abs().amax(-1) * (1 / form.reach))
    finite = scale.isfinite()
    middle = torch.where(finite, middle, 0.0)
    inverse = torch.where(finite & (scale >= _SMALLEST), 1.0 / scale, 0.0)
    steps = torch.where(finite[..., None], offsets, 0.0) * inverse[..., None]
    ranges = _bits(torch.where(finite, scale, torch.nan)) >> 16 & 0xFFFF | _bits(middle)
    if form.name == "fp8":
        return steps.clamp(-form.reach, form.reach).to(torch.float8_e4m3fn).view(form.dtype), ranges
    lowest = form.centre - form.reach
    codes = (steps + form.centre).round().clamp(lowest, lowest + 2 * form.reach).to(form.dtype)
    if form.per_byte == 1:
        return codes, ranges
    first, second = codes.chunk(2, -1)
    return first | second << 4, ranges


def dequantize_lines(codes: Tensor, ranges: Tensor, form: KVFormat) -> Tensor:
    """Return the numbers float32 [..., D] of what `quantize_lines` gave."""
    if form.name == "fp8":
        numbers = codes.view(torch.float8_e4m3fn).float()
    elif form.per_byte == 2:
        numbers = torch.cat([codes & 15, codes >> 4], -1).float()
    else:
        numbers = codes.float()
    scale, middle = (ranges << 16).view(torch.float32), (ranges & -65536).view(torch.float32)
    if form.centre:
        numbers = numbers.sub_(form.centre)
    return numbers.mul_(scale[..., None]).add_(middle[..., None])


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def _round_up(x: Tensor) -> Tensor:
    """Numbers from 0 on, to the next of bfloat16; NaN stays, and what is too large becomes infinite."""
    return torch.where(x.isfinite(), (_bits(x) + 0xFFFF & -65536).view(torch.float32), x)
