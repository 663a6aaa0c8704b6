"""One step of attention: queries against one tile of keys and values (FlashAttention), in two forms.

Prefill has many queries, and they are the first operand of both products (`attend_tile`). Decode has the few query
heads that share a KV head. Its first operands are keys and values (`attend_keys`), so that heads are the narrow side: 8
columns suffice for up to 8 heads, whereas 16 rows are the minimum. This halves the products and the sums.

Scores are kept *raw*: q k^T, or tanh of it with a softcap, plus the ALiBi bias in the same units; `steepness` turns raw
scores into exponents of 2. A running maximum starts at a finite floor, so that a fully masked tile leaves a query's
state unchanged, bit for bit.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from asyncllm.kernels.triton.language import dot, round_to

__all__ = ["FLOOR", "LOG2_E", "attend_keys", "attend_tile", "last_factor", "weigh_keys", "weigh_tile"]

FLOOR: tl.constexpr = tl.constexpr(-1e30)
"""Initial value of running maxima, in raw scores and in exponents of 2."""

LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))


@triton.jit
def attend_tile(
    q,
    key_pointers,
    value_pointers,
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
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
):
    """One step of the online softmax.

    q [M, P], key_pointers [P, N], value_pointers [N, P] with head_dim D padded to P; acc [M, P], weight_sum and maximum
    [M]; key_positions [N], query_positions [M]; keys from kv_end on belong to no row; slopes [M] in raw units.
    """
    PADDED: tl.constexpr = acc.shape[1]
    dims = tl.arange(0, PADDED)
    k = tl.load(key_pointers) if PADDED == D else tl.load(key_pointers, mask=(dims < D)[:, None], other=0.0)
    raw = dot(q, k, tl.zeros([acc.shape[0], key_pointers.shape[1]], tl.float32))
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
    # Keys and values of no row may be NaN, and 0 times NaN is NaN: such values are replaced, not just given no weight.
    if MASKED and PADDED == D:
        v = tl.load(value_pointers, mask=(key_positions < kv_end)[:, None], other=0.0)
    elif MASKED:
        v = tl.load(value_pointers, mask=(key_positions < kv_end)[:, None] & (dims < D)[None, :], other=0.0)
    elif PADDED == D:
        v = tl.load(value_pointers)
    else:
        v = tl.load(value_pointers, mask=(dims < D)[None, :], other=0.0)
    acc = dot(round_to(weights, v.dtype), v, acc * fade[:, None])
    return acc, weight_sum, new_maximum


@triton.jit
def weigh_tile(
    raw,
    weight_sum,
    maximum,
    key_positions,
    query_positions,
    window,
    slopes,
    squeeze,
    steepness,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
):
    """Return, for raw products [M, N] of queries and keys, the weights [M, N], the factor for earlier weights [M], and
    the new sum and maximum [M]. Fused multiply-adds are explicit, so that masked and unmasked tiles round alike."""
    if SOFTCAP:
        # 1 - 2 / (e^2x + 1) is tanh(x); e^2x may overflow to infinity, which gives 1.
        raw = 1.0 - 2.0 / (tl.exp2(raw * (squeeze * (2.0 * LOG2_E))) + 1.0)
    if ALIBI or (MASKED and HAS_WINDOW):
        distance = key_positions[None, :] - query_positions[:, None]
    if ALIBI:
        raw = tl.fma(distance.to(tl.float32), slopes[:, None] + tl.zeros_like(raw), raw)
    if MASKED:
        visible = key_positions[None, :] <= query_positions[:, None]
        if HAS_WINDOW:
            visible = visible & (distance > -window)
        raw = tl.where(visible, raw, -float("inf"))
    new_maximum = tl.maximum(maximum, tl.max(raw, 1))
    offset = (-new_maximum * steepness)[:, None] + tl.zeros_like(raw)
    weights = tl.exp2(tl.fma(raw, tl.zeros_like(raw) + steepness, offset))
    fade = tl.exp2((maximum - new_maximum) * steepness)
    weight_sum = tl.fma(weight_sum, fade, tl.sum(weights, 1))
    return weights, fade, weight_sum, new_maximum


@triton.jit
def attend_keys(
    q,
    key_pointers,
    value_pointers,
    acc,
    weight_sum,
    maximum,
    key_positions,
    kv_end,
    window,
    slopes,
    squeeze,
    steepness,
    D: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
):
    """Attend as `attend_tile`, transposed, for the query at kv_end - 1 only.

    q [P, H], key_pointers [N, P], value_pointers [P, N]; acc [P, H], weight_sum, maximum and slopes [H].
    """
    PADDED: tl.constexpr = acc.shape[0]
    dims = tl.arange(0, PADDED)
    there = key_positions < kv_end
    k = tl.load(key_pointers) if PADDED == D else tl.load(key_pointers, mask=(dims < D)[None, :], other=0.0)
    raw = dot(k, q, tl.zeros([key_pointers.shape[0], acc.shape[1]], tl.float32))
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
    kept = there[None, :] if PADDED == D else there[None, :] & (dims < D)[:, None]
    v = tl.load(value_pointers, mask=kept, other=0.0)
    acc = dot(v, round_to(weights, v.dtype), acc * fade[None, :])
    return acc, weight_sum, new_maximum


@triton.jit
def weigh_keys(
    raw,
    weight_sum,
    maximum,
    key_positions,
    kv_end,
    window,
    slopes,
    squeeze,
    steepness,
    HAS_WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
):
    """Weight as `weigh_tile`, transposed: raw and weights [N, H], fade, sum and maximum [H]."""
    if SOFTCAP:
        raw = 1.0 - 2.0 / (tl.exp2(raw * (squeeze * (2.0 * LOG2_E))) + 1.0)
    there = key_positions < kv_end
    distance = key_positions - (kv_end - 1)
    if ALIBI:
        raw += distance.to(tl.float32)[:, None] * slopes[None, :]
    visible = there & (distance > -window) if HAS_WINDOW else there
    raw = tl.where(visible[:, None], raw, -float("inf"))
    new_maximum = tl.maximum(maximum, tl.max(raw, 0))
    weights = tl.exp2((raw - new_maximum[None, :]) * steepness)
    fade = tl.exp2((maximum - new_maximum) * steepness)
    weight_sum = weight_sum * fade + tl.sum(weights, 0)
    return weights, fade, weight_sum, new_maximum


@triton.jit
def last_factor(weight_sum, exponent, sinks, heads, mask, SINKS: tl.constexpr):
    """Return the final factors of sums of weighted values [M]: 1 / weight_sum, or 1 without keys. exponent [M]: the
    maximum in exponents of 2. SINKS: the heads' sink logits are included in the sum."""
    fade = 1.0
    if SINKS:
        sink = tl.load(sinks + heads, mask=mask, other=0.0) * LOG2_E
        highest = tl.maximum(exponent, sink)
        fade = tl.exp2(exponent - highest)
        weight_sum = weight_sum * fade + tl.exp2(sink - highest)
    return fade / tl.where(weight_sum == 0.0, 1.0, weight_sum)
