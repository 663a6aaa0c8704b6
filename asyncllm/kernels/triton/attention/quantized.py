"""One step of attention over codes: `attend_tile` and `attend_keys` of `tile.py` for a quantized cache.

Products are computed with codes, and sums with weights multiplied by the values' scales. The centre and the midpoints
add one number per key, and one per query and tile. Weights are also scaled up by BOOST, which is divided out at the
end, since in float16 the weights of small values would be too small to be exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

from asyncllm.kernels.triton.attention.tile import last_factor, weigh_keys, weigh_tile
from asyncllm.kernels.triton.language import INTERPRET, dot, round_to
from asyncllm.kernels.triton.quantized_kv import (
    INT8_CENTRE,
    K5_CENTRE,
    V3_CENTRE,
    middles_of,
    numbers_of,
    pairs_of,
    scales_of,
)

__all__ = [
    "attend_quantized_keys",
    "attend_quantized_tile",
    "factor_of",
    "join_pairs",
    "load_queries",
    "load_query_pairs",
]

BOOST: tl.constexpr = tl.constexpr(256.0)

_LARGEST: tl.constexpr = tl.constexpr(65504.0)
"""The largest float16 number."""


@triton.jit
def load_queries(pointers, kept, AXIS: tl.constexpr, FORMAT: tl.constexpr):
    """Load queries, and the sums of their numbers along AXIS, which are unused without a format."""
    query = tl.load(pointers, mask=kept, other=0.0)
    if FORMAT == "":
        return query, 0.0
    else:
        query = _to_dot(query, FORMAT)
        return query, tl.sum(query.to(tl.float32), AXIS)


@triton.jit
def factor_of(weight_sum, exponent, sinks, heads, mask, SINKS: tl.constexpr, FORMAT: tl.constexpr):
    """Return `last_factor`, divided by BOOST."""
    factor = last_factor(weight_sum, exponent, sinks, heads, mask, SINKS)
    if FORMAT != "":
        factor *= 1.0 / BOOST
    return factor


@triton.jit
def _to_dot(q, FORMAT: tl.constexpr):
    """Convert queries for products with codes: e4m3 becomes float16 by one instruction for two numbers, and bfloat16
    via float32."""
    if FORMAT == "fp8" and q.dtype.primitive_bitwidth == 16:
        return _to_float16(q.to(tl.float32))
    else:
        return q


@triton.jit
def _to_float16(x):
    """Convert float32 to float16. Values out of range are clamped to the largest, and NaN stays NaN."""
    return round_to(tl.where(x > _LARGEST, _LARGEST, tl.where(x < -_LARGEST, -_LARGEST, x)), tl.float16)


@triton.jit
def _scaled(weights, dtype: tl.constexpr):
    if dtype == tl.float16:
        return _to_float16(weights)
    else:
        return round_to(weights, dtype)


@triton.jit
def _offsets(scales, middles, FORMAT: tl.constexpr):
    """Return the term that a key adds to its products with a query, per sum of the query's numbers."""
    if FORMAT == "int8":
        return middles - scales * INT8_CENTRE
    else:
        return middles - scales * K5_CENTRE


@triton.jit
def _shares(weights, middles, scaled, FORMAT: tl.constexpr):
    """Return the term that keys add to each of the sums of their values."""
    if FORMAT == "int8":
        return weights * (middles * BOOST) - scaled.to(tl.float32) * INT8_CENTRE
    else:
        return weights * (middles * BOOST) - scaled.to(tl.float32) * V3_CENTRE


@triton.jit
def attend_quantized_tile(
    q,
    q_sum,
    key_pointers,
    value_pointers,
    key_ranges,
    value_ranges,
    acc,
    weight_sum,
    maximum,
    key_positions,
    query_positions,
    kv_end,
    window,
    slopes,
    squeeze,
    steepness,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
):
    """As `attend_tile`. q and acc [M, P], q_sum [M]; lines are D bytes, padded to P; key_ranges
    and value_ranges point to [N]."""
    PADDED: tl.constexpr = acc.shape[1]
    dims = tl.arange(0, PADDED)
    there = key_positions < kv_end
    codes = tl.load(key_pointers) if PADDED == D else tl.load(key_pointers, mask=(dims < D)[:, None], other=0)
    ranges = tl.load(key_ranges)
    raw = tl.zeros([acc.shape[0], key_pointers.shape[1]], tl.float32)
    raw = dot(q, numbers_of(codes, FORMAT, False, q.dtype), raw)
    scales = scales_of(ranges)
    raw = raw * scales[None, :]
    if FORMAT != "fp8":
        raw += q_sum[:, None] * _offsets(scales, middles_of(ranges), FORMAT)[None, :]
    weights, fade, weight_sum, new_maximum = weigh_tile(
        raw,
        weight_sum,
        maximum,
        key_positions,
        query_positions,
        window,
        slopes,
        squeeze,
        steepness,
        MASKED,
        HAS_WINDOW,
        SOFTCAP,
        ALIBI,
    )
    # Ranges of other rows may be NaN and are masked; codes are always finite.
    ranges = tl.load(value_ranges, mask=there, other=0) if MASKED else tl.load(value_ranges)
    codes = tl.load(value_pointers) if PADDED == D else tl.load(value_pointers, mask=(dims < D)[None, :], other=0)
    scaled = _scaled(weights * (scales_of(ranges) * BOOST)[None, :], q.dtype)
    acc = acc * fade[:, None]
    if FORMAT != "fp8":
        acc += tl.sum(_shares(weights, middles_of(ranges)[None, :], scaled, FORMAT), 1)[:, None]
    acc = dot(scaled, numbers_of(codes, FORMAT, True, q.dtype), acc)
    return acc, weight_sum, new_maximum


@triton.jit
def load_query_pairs(lines, kept):
    """Load queries for products with `pairs_of`: the first and the second numbers of adjacent pairs [P / 2, H], and the
    sums [H] of both. `lines` [P / 2, H] points to the first numbers."""
    first = tl.load(lines, mask=kept, other=0.0)
    second = tl.load(lines + 1, mask=kept, other=0.0)
    if not INTERPRET:
        first, second = _to_float16(first.to(tl.float32)), _to_float16(second.to(tl.float32))
    return first, second, tl.sum(first.to(tl.float32) + second.to(tl.float32), 0)


@triton.jit
def join_pairs(first, second):
    """Interleave first and second [P / 2, H] to [P, H]."""
    joined = tl.permute(tl.join(first, second), [0, 2, 1])
    return tl.reshape(joined, [2 * first.shape[0], first.shape[1]])


@triton.jit
def attend_quantized_keys(
    first_q,
    second_q,
    q_sum,
    key_pointers,
    value_pointers,
    key_ranges,
    value_ranges,
    first_acc,
    second_acc,
    weight_sum,
    maximum,
    key_positions,
    kv_end,
    window,
    slopes,
    squeeze,
    steepness,
    D: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
):
    """Attend as `attend_keys`, with words of two adjacent codes each: key_pointers [N, P / 2], value_pointers
    [P / 2, N]. Queries and sums of values are split into those of first and of second codes [P / 2, H]. q_sum [H]."""
    HALF: tl.constexpr = first_acc.shape[0]
    pairs = tl.arange(0, HALF)
    there = key_positions < kv_end
    whole: tl.constexpr = 2 * HALF == D
    words = tl.load(key_pointers) if whole else tl.load(key_pointers, mask=(pairs < D // 2)[None, :], other=0)
    ranges = tl.load(key_ranges)
    first, second = pairs_of(words, FORMAT, False)
    raw = dot(first, first_q, tl.zeros([key_pointers.shape[0], first_acc.shape[1]], tl.float32))
    raw = dot(second, second_q, raw)
    scales = scales_of(ranges)
    raw = raw * scales[:, None]
    if FORMAT != "fp8":
        raw += _offsets(scales, middles_of(ranges), FORMAT)[:, None] * q_sum[None, :]
    weights, fade, weight_sum, new_maximum = weigh_keys(
        raw,
        weight_sum,
        maximum,
        key_positions,
        kv_end,
        window,
        slopes,
        squeeze,
        steepness,
        HAS_WINDOW,
        SOFTCAP,
        ALIBI,
    )
    ranges = tl.load(value_ranges, mask=there, other=0)
    words = tl.load(value_pointers) if whole else tl.load(value_pointers, mask=(pairs < D // 2)[:, None], other=0)
    scaled = weights * (scales_of(ranges) * BOOST)[:, None]
    if not INTERPRET:
        scaled = _to_float16(scaled)
    first_acc, second_acc = first_acc * fade[None, :], second_acc * fade[None, :]
    if FORMAT != "fp8":
        shares = tl.sum(_shares(weights, middles_of(ranges)[:, None], scaled, FORMAT), 0)[None, :]
        first_acc, second_acc = first_acc + shares, second_acc + shares
    first, second = pairs_of(words, FORMAT, True)
    first_acc, second_acc = dot(first, scaled, first_acc), dot(second, scaled, second_acc)
    return first_acc, second_acc, weight_sum, new_maximum
