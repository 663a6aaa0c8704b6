"""Keys and values in 8 or 4 bits. One KV head of one token's key or value, a *line*, is quantized by itself.

A line x of D numbers is stored as one code per number, and a scale and a midpoint for all of them: x = scale * (code -
centre) + midpoint. Integer codes extend equally far to both sides of the midpoint between the line's smallest and
largest number (asymmetric quantization, as in LMDeploy's `quant_policy` 8 and 4, whose zero point is an equivalent
form). Codes of e4m3 are x / scale, with midpoint 0.

Four bits per number are five for keys and three for values, because an error in a key changes weights, whereas errors
in values average out: with four bits for both, all of `tiny-chat`'s loss comes from its keys. One byte holds the code
of a key's number and of the same number of the value. The outermost codes lie inside the line's ends, by half a step
for keys and an eighth for values, which makes all steps smaller: `tiny-chat` diverges a tenth less than with exact
ends.

Scale and midpoint are bfloat16, which has the range of every model's dtype. The midpoint is rounded first, and the
scale is rounded up, so that no code is clipped. For 5-bit keys and e4m3, codes are multiplied by a different scale than
the one they were computed with: the one that preserves the line's product with itself, about its midpoint. The error is
then orthogonal to the line, which helps because queries that look for a key have its direction. It costs nothing to
read; `tiny-chat` diverges half as much in e4m3 (1.8e-4 to 8.3e-5 nats) and a tenth less in four bits. For coarse values
it gains nothing.

Scale and midpoint together are one int32, the line's *range*, with the scale in the low half. If a line has NaN or
infinity, its scale is NaN and its codes are those of zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["FORMATS", "KVFormat", "QuantizedKV", "Rounding", "dequantize_lines", "quantize_lines"]

_SMALLEST = 2.0**-126
"""A scale below this has no reciprocal: codes are then 0, and less than 2^-118 is lost."""

_KEY_BITS = 5
"""Bits of a key in a byte that holds two codes, starting at the lowest."""


class Rounding(NamedTuple):
    """How the numbers of a line are quantized."""

    centre: float
    """The (possibly fractional) code of the line's midpoint; 0 for e4m3."""
    reach: float
    """Number of codes from the midpoint of the line to its smallest and largest number."""
    outermost: float
    """Distance from the centre to the outermost codes."""
    dtype: torch.dtype
    """Dtype of codes. float8_e4m3fn is stored as bytes."""
    fit: int = 0
    """If the scale is recomputed once codes are known: the number of parts of one in which products of steps and codes
    are summed, as integers, so that their order does not matter. 0: the scale stays."""


class KVFormat(NamedTuple):
    """How keys and values are quantized and stored."""

    name: str
    keys: Rounding
    values: Rounding
    shared: bool = False
    """Whether a byte holds the codes of a key and of a value."""

    @property
    def planes(self) -> int:
        """Number of code tensors of one shape: one each for keys and values, or one for both."""
        return 1 if self.shared else 2

    def join(self, keys: Tensor, values: Tensor) -> Tensor:
        """Return the codes of both in shared bytes."""
        return keys | values << _KEY_BITS

    def key_codes(self, codes: Tensor) -> Tensor:
        """Return the key codes in stored codes."""
        return codes & (1 << _KEY_BITS) - 1 if self.shared else codes

    def value_codes(self, codes: Tensor) -> Tensor:
        return codes >> _KEY_BITS if self.shared else codes


_INT8 = Rounding(-0.5, 127.5, 127.5, torch.int8)
_FIVE_BITS = Rounding(15.5, 16.0, 15.5, torch.uint8, fit=1024)
_THREE_BITS = Rounding(3.5, 3.625, 3.5, torch.uint8)
_E4M3 = Rounding(0.0, 448.0, 448.0, torch.uint8, fit=8)

FORMATS = {
    each.name: each
    for each in (
        KVFormat("int8", _INT8, _INT8),
        KVFormat("k5v3", _FIVE_BITS, _THREE_BITS, shared=True),
        KVFormat("fp8", _E4M3, _E4M3),
    )
}


class QuantizedKV(NamedTuple):
    """Keys and values of one layer in blocks, like `PagedKV`, as codes and ranges."""

    k: Tensor
    """Codes [blocks, kv_heads, block_size, D]."""
    v: Tensor
    """The same for values; in a shared format, the same memory."""
    k_ranges: Tensor
    """int32 [blocks, kv_heads, block_size]."""
    v_ranges: Tensor
    lines: Tensor
    """[planes * blocks * kv_heads * block_size, D]: the lines of k, then those of v, in the same memory."""
    ranges: Tensor
    """int32 [2 * blocks * kv_heads * block_size]."""
    format: KVFormat

    @staticmethod
    def over(codes: Tensor, ranges: Tensor, form: KVFormat) -> QuantizedKV:
        """Return the cache over contiguous codes [planes, blocks, kv_heads, block_size, D] and ranges [2, blocks,
        kv_heads, block_size]: keys, then values."""
        lines = codes.view(-1, codes.shape[-1])
        return QuantizedKV(codes[0], codes[-1], ranges[0], ranges[1], lines, ranges.view(-1), form)

    @staticmethod
    def of(k: Tensor, v: Tensor, form: KVFormat) -> QuantizedKV:
        """Return a new cache with keys and values [blocks, kv_heads, block_size, D] each."""
        (k_codes, k_ranges), (v_codes, v_ranges) = quantize_lines(k, form.keys), quantize_lines(v, form.values)
        codes = form.join(k_codes, v_codes)[None] if form.shared else torch.stack([k_codes, v_codes])
        return QuantizedKV.over(codes, torch.stack([k_ranges, v_ranges]), form)

    @property
    def head_dim(self) -> int:
        return self.k.shape[-1]

    def write(self, lines: Tensor, kv: Tensor) -> None:
        """Write kv [N, D] to lines [N]: for each token its key heads, then its value heads (`plan_cache_write`)."""
        by_token = lines.view(-1, 2, self.k.shape[1])
        keys, values = kv.view(*by_token.shape, -1).unbind(1)
        (k_codes, k_ranges), (v_codes, v_ranges) = (
            quantize_lines(keys, self.format.keys),
            quantize_lines(values, self.format.values),
        )
        self.ranges.index_copy_(0, lines, torch.stack([k_ranges, v_ranges], 1).view(-1))
        if self.format.shared:
            codes = self.format.join(k_codes, v_codes)
            lines = by_token[:, 0].reshape(-1)
        else:
            codes = torch.stack([k_codes, v_codes], 1)
        self.lines.index_copy_(0, lines, codes.view(-1, codes.shape[-1]))

    def read(self, lines: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the numbers of lines [N] -> [N, D]: of keys, or of keys followed by as many values."""
        if int(lines[-1]) < len(self.ranges) // 2:
            return self._numbers(lines, dtype, values=False)
        keys, values = lines.chunk(2)
        return torch.cat([self._numbers(keys, dtype, values=False), self._numbers(values, dtype, values=True)])

    def read_pages(self, pages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values of whole pages [N], numbered head by head -> [N, block_size, D] each."""
        form = self.format
        k, v, k_ranges, v_ranges = (
            part.flatten(0, 1).index_select(0, pages) for part in (self.k, self.v, self.k_ranges, self.v_ranges)
        )
        keys = dequantize_lines(form.key_codes(k), k_ranges, form.keys)
        return keys.to(dtype), dequantize_lines(form.value_codes(v), v_ranges, form.values).to(dtype)

    def weigh(self, lines: Tensor, weights: Tensor) -> Tensor:
        """Return the sums of lines of values [L, G, S], equal for all G, weighted by weights [L, G, S] -> [L * G,
        D]."""
        shared = lines[:, 0]
        values = self._numbers(shared.reshape(-1), weights.dtype, values=True)
        return torch.bmm(weights, values.view(*shared.shape, -1)).flatten(0, 1)

    def _numbers(self, lines: Tensor, dtype: torch.dtype, *, values: bool) -> Tensor:
        form = self.format
        # A value in a shared byte has the line of its key.
        there = lines - len(self.lines) if values and form.shared else lines
        codes, ranges = self.lines.index_select(0, there), self.ranges.index_select(0, lines)
        if values:
            return dequantize_lines(form.value_codes(codes), ranges, form.values).to(dtype)
        return dequantize_lines(form.key_codes(codes), ranges, form.keys).to(dtype)


def quantize_lines(x: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Return codes [..., D] and ranges int32 [...] of x [..., D], computed in float32."""
    x = x.float()
    middle = x.new_zeros(x.shape[:-1])
    if rounding.centre:
        low, high = x.aminmax(dim=-1)
        middle = (low * 0.5 + high * 0.5).bfloat16().float()
    offsets = x - middle[..., None]
    scale = _round_up(offsets.abs().amax(-1) * (1 / rounding.reach))
    finite = scale.isfinite()
    middle = torch.where(finite, middle, 0.0)
    inverse = torch.where(finite & (scale >= _SMALLEST), 1.0 / scale, 0.0)
    steps = torch.where(finite[..., None], offsets, 0.0) * inverse[..., None]
    if rounding.centre:
        lowest, highest = rounding.centre - rounding.outermost, rounding.centre + rounding.outermost
        codes = (steps + rounding.centre).round().clamp(lowest, highest).to(rounding.dtype)
        numbers = codes.float() - rounding.centre
    else:
        coded = steps.clamp(-rounding.reach, rounding.reach).to(torch.float8_e4m3fn)
        codes, numbers = coded.view(rounding.dtype), coded.float()
    if rounding.fit:
        own, said = (((steps * each) * rounding.fit).round().int().sum(-1).float() for each in (steps, numbers))
        scale = (scale * torch.where(said > 0, own / said, 1.0)).bfloat16().float()
    return codes, _bits(torch.where(finite, scale, torch.nan)) >> 16 & 0xFFFF | _bits(middle)


def dequantize_lines(codes: Tensor, ranges: Tensor, rounding: Rounding) -> Tensor:
    """Return the numbers float32 [..., D] that `quantize_lines` encoded."""
    scale, middle = (ranges << 16).view(torch.float32), (ranges & -65536).view(torch.float32)
    numbers = codes.float().sub_(rounding.centre) if rounding.centre else codes.view(torch.float8_e4m3fn).float()
    return numbers.mul_(scale[..., None]).add_(middle[..., None])


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def _round_up(x: Tensor) -> Tensor:
    """Round numbers >= 0 up to bfloat16; NaN stays, and numbers out of range become infinity."""
    return torch.where(x.isfinite(), (_bits(x) + 0xFFFF & -65536).view(torch.float32), x)
