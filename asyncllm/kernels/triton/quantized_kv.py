"""Lines of a quantized cache in registers: from numbers to codes and back (`asyncllm.kernels.quantized_kv`).

A format is given by its name; "" is none. A rounding has a name too: "k5" and "v3" are those of keys and values in
"k5v3". A line is quantized in two halves, as rotations produce it. Codes are converted to numbers of the dtype in which
products are computed; scale and midpoint are applied to the products: q k = scale * (q code) + (midpoint - scale *
centre) * sum of q, and likewise for sums of values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from asyncllm.kernels.quantized_kv import FORMATS
from asyncllm.kernels.triton.language import INTERPRET, e4m3_bits, e4m3_value, nearest_integer

__all__ = [
    "INT8_CENTRE",
    "K5_CENTRE",
    "V3_CENTRE",
    "join_codes",
    "middles_of",
    "numbers_of",
    "pairs_of",
    "quantize_halves",
    "scales_of",
]

INT8_CENTRE: tl.constexpr = tl.constexpr(FORMATS["int8"].keys.centre)
K5_CENTRE: tl.constexpr = tl.constexpr(FORMATS["k5v3"].keys.centre)
V3_CENTRE: tl.constexpr = tl.constexpr(FORMATS["k5v3"].values.centre)
_PER_INT8: tl.constexpr = tl.constexpr(1 / FORMATS["int8"].keys.reach)
_PER_K5: tl.constexpr = tl.constexpr(1 / FORMATS["k5v3"].keys.reach)
_PER_V3: tl.constexpr = tl.constexpr(1 / FORMATS["k5v3"].values.reach)
_FIT_K5: tl.constexpr = tl.constexpr(float(FORMATS["k5v3"].keys.fit))
_FIT_FP8: tl.constexpr = tl.constexpr(float(FORMATS["fp8"].keys.fit))
_PER_FP8: tl.constexpr = tl.constexpr(1 / FORMATS["fp8"].keys.reach)
_SMALLEST: tl.constexpr = tl.constexpr(2.0**-126)


@triton.jit
def scales_of(ranges):
    """Return the scales in ranges, int32 -> float32."""
    return (ranges << 16).to(tl.float32, bitcast=True)


@triton.jit
def middles_of(ranges):
    """Return the midpoints in ranges, int32 -> float32."""
    return (ranges & -65536).to(tl.float32, bitcast=True)


@triton.jit
def numbers_of(codes, FORMAT: tl.constexpr, VALUES: tl.constexpr, dtype: tl.constexpr):
    """Convert stored codes of keys, or of VALUES, to numbers of `dtype`, or of float32 under the interpreter."""
    if FORMAT == "k5v3":
        codes = ((codes >> 5) if VALUES else (codes & 31)).to(tl.int8)
    if FORMAT == "fp8":
        if INTERPRET:
            return e4m3_value(codes)
        else:
            return codes.to(tl.float8e4nv, bitcast=True).to(dtype)
    elif INTERPRET:
        return codes.to(tl.float32)
    else:
        return codes.to(dtype)


@triton.jit
def pairs_of(words, FORMAT: tl.constexpr, VALUES: tl.constexpr):
    """Split words int16 of two neighbouring stored codes, of keys or of VALUES, into the first and the second numbers
    of all words, float16, or float32 under the interpreter."""
    if INTERPRET:
        return _by_arithmetic(words & 255, FORMAT, VALUES), _by_arithmetic((words >> 8) & 255, FORMAT, VALUES)
    elif FORMAT == "fp8":
        return _from_e4m3(words, False), _from_e4m3(words, True)
    else:
        # Two words at a time; bits shifted in from the upper one are masked.
        shifted = tl.inline_asm_elementwise("shr.u32 $0, $1, 8;", "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2)
        return _from_integers(words, FORMAT, VALUES), _from_integers(shifted, FORMAT, VALUES)


@triton.jit
def _from_e4m3(words, SECOND: tl.constexpr):
    if SECOND:
        bits = tl.inline_asm_elementwise(
            "{.reg .b32 t; .reg .b16 l; prmt.b32 t, $1, 0, 0x4431; cvt.u16.u32 l, t; cvt.rn.f16x2.e4m3x2 $0, l;}",
            "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        bits = tl.inline_asm_elementwise(
            "{.reg .b32 t; .reg .b16 l; prmt.b32 t, $1, 0, 0x4420; cvt.u16.u32 l, t; cvt.rn.f16x2.e4m3x2 $0, l;}",
            "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def _from_integers(words, FORMAT: tl.constexpr, VALUES: tl.constexpr):
    """Convert the lower bytes of words to float16. A mask puts them into the last bits of 1024, or of a multiple of it,
    which is then subtracted."""
    if FORMAT == "int8":
        # The code plus 128.
        bits = tl.inline_asm_elementwise(
            "{.reg .b32 t, c; mov.b32 c, 0x64806480; lop3.b32 t, $1, 0x00ff00ff, c, 0x6a; sub.rn.f16x2 $0, t, c;}",
            "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
    elif VALUES:
        # 1024 + 32 code; a 32nd of it, minus 32, remains.
        bits = tl.inline_asm_elementwise(
            "{.reg .b32 t, c, d; mov.b32 c, 0x28002800; mov.b32 d, 0xd000d000; "
            "lop3.b32 t, $1, 0x00e000e0, 0x64006400, 0xea; fma.rn.f16x2 $0, t, c, d;}",
            "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        bits = tl.inline_asm_elementwise(
            "{.reg .b32 t, c; mov.b32 c, 0x64006400; lop3.b32 t, $1, 0x001f001f, c, 0xea; sub.rn.f16x2 $0, t, c;}",
            "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def _by_arithmetic(codes, FORMAT: tl.constexpr, VALUES: tl.constexpr):
    """Convert bytes in int16 to float32."""
    if FORMAT == "fp8":
        return e4m3_value(codes.to(tl.uint8))
    elif FORMAT == "int8":
        return ((codes ^ 128) - 128).to(tl.float32)
    else:
        return ((codes >> 5) if VALUES else (codes & 31)).to(tl.float32)


@triton.jit
def _to_bfloat16(x):
    """Round float32 to the nearest bfloat16 number, ties to even, and return it as float32."""
    bits = x.to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def quantize_halves(first, second, within, ROUNDING: tl.constexpr):
    """Quantize lines first and second [R, B] float32, numbers where within [1, B] -> codes of both, int32 or bytes of
    e4m3, and ranges int32 [R]. See `kernels.quantized_kv.quantize_lines`."""
    if ROUNDING == "fp8":
        middle = tl.zeros([first.shape[0]], tl.float32)
    else:
        far = float("inf")
        low = tl.minimum(tl.min(tl.where(within, first, far), 1), tl.min(tl.where(within, second, far), 1))
        high = tl.maximum(tl.max(tl.where(within, first, -far), 1), tl.max(tl.where(within, second, -far), 1))
        middle = _to_bfloat16(low * 0.5 + high * 0.5)
    first = tl.where(within, first - middle[:, None], 0.0)
    second = tl.where(within, second - middle[:, None], 0.0)
    largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
    # A maximum may pass over NaN, a sum does not; and 0 times infinity is NaN.
    odd = tl.sum(first * 0.0, 1) + tl.sum(second * 0.0, 1)
    finite = odd == 0.0
    bits = tl.where(finite, _per_reach(largest, ROUNDING), 0.0).to(tl.uint32, bitcast=True)
    scale = ((bits + 0xFFFF) & 0xFFFF0000).to(tl.float32, bitcast=True)
    usable = finite & (scale >= _SMALLEST)
    inverse = tl.where(usable, 1.0 / tl.where(usable, scale, 1.0), 0.0)
    first = tl.where(finite[:, None], first, 0.0) * inverse[:, None]
    second = tl.where(finite[:, None], second, 0.0) * inverse[:, None]
    first_codes, second_codes = _code(first, ROUNDING), _code(second, ROUNDING)
    if ROUNDING == "k5" or ROUNDING == "fp8":
        own = _product(first, first, ROUNDING) + _product(second, second, ROUNDING)
        said = _product(first, _number(first_codes, ROUNDING), ROUNDING)
        said += _product(second, _number(second_codes, ROUNDING), ROUNDING)
        gain = tl.div_rn(own.to(tl.float32), tl.where(said > 0, said, 1).to(tl.float32))
        scale = _to_bfloat16(scale * tl.where(said > 0, gain, 1.0))
    upper = tl.where(finite, middle, 0.0).to(tl.int32, bitcast=True)
    lower = tl.where(finite, (scale.to(tl.uint32, bitcast=True) >> 16).to(tl.int32), 0x7FC0)
    return first_codes, second_codes, upper | lower


@triton.jit
def _product(steps, numbers, ROUNDING: tl.constexpr):
    """Return products of lines [R, B] each -> int32 [R], in the fractions of one that the rounding specifies."""
    if ROUNDING == "k5":
        parts = nearest_integer((steps * numbers) * _FIT_K5)
    else:
        parts = nearest_integer((steps * numbers) * _FIT_FP8)
    return tl.sum(parts.to(tl.int32), 1)


@triton.jit
def _number(codes, ROUNDING: tl.constexpr):
    """Convert codes of `_code` to float32, relative to the centre."""
    if ROUNDING == "k5":
        return codes.to(tl.float32) - K5_CENTRE
    elif INTERPRET:
        return e4m3_value(codes.to(tl.uint8))
    else:
        return codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _per_reach(largest, ROUNDING: tl.constexpr):
    if ROUNDING == "int8":
        return largest * _PER_INT8
    elif ROUNDING == "k5":
        return largest * _PER_K5
    elif ROUNDING == "v3":
        return largest * _PER_V3
    else:
        return largest * _PER_FP8


@triton.jit
def _code(steps, ROUNDING: tl.constexpr):
    if ROUNDING == "int8":
        codes = nearest_integer(steps + INT8_CENTRE)
        return tl.minimum(tl.maximum(codes, -128.0), 127.0).to(tl.int32)
    elif ROUNDING == "k5":
        codes = nearest_integer(steps + K5_CENTRE)
        return tl.minimum(tl.maximum(codes, 0.0), 31.0).to(tl.int32)
    elif ROUNDING == "v3":
        codes = nearest_integer(steps + V3_CENTRE)
        return tl.minimum(tl.maximum(codes, 0.0), 7.0).to(tl.int32)
    else:
        return e4m3_bits(tl.minimum(tl.maximum(steps, -448.0), 448.0)).to(tl.int32)


@triton.jit
def join_codes(keys, values, dtype: tl.constexpr):
    """Combine codes of keys and values into shared bytes."""
    return (keys | (values << 5)).to(dtype)
