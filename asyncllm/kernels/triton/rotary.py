"""Rotary embedding: a step's cosines and sines, and the pass over packed qkv that rotates q and k and fills the cache.

A packed qkv [T, heads, D] is a matrix with one row per head of each token, whichever of q, k or v it is. A program
takes a few rows, so it reads contiguous memory at any number of tokens, and a row's norm is summed in the same order in
any batch.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.cache import KVCache, PagedKV
from asyncllm.kernels.quantized_kv import QuantizedKV
from asyncllm.kernels.rotary import Rotation
from asyncllm.kernels.triton.cache import check_cache, fill_quantized, store_line
from asyncllm.kernels.triton.language import release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.launch import Configured, launch
from asyncllm.kernels.triton.page import line_of

__all__ = ["load_pairs", "rope_fill_kv", "rotate_heads", "rotation", "store_pairs"]

ROWS = 16
"""Heads per program: with heads of 128, two runs of 16 bytes per thread, in 40 registers (56 with norms). In a decode
step on an H200, 256 tokens of 48 heads take 2.9 us."""


@triton.jit(do_not_specialize=["factor"], do_not_specialize_on_alignment=["position_ptr"])
def rotation_kernel(
    position_ptr,
    frequency_ptr,
    cos_ptr,
    sin_ptr,
    factor,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    OWN: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    inside = pair < PAIRS
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    # OWN: each token has its own frequencies.
    frequency = tl.load(frequency_ptr + (token * PAIRS if OWN else 0) + pair, mask=inside, other=0.0)
    angle = tl.load(position_ptr + token).to(tl.float32) * frequency
    cos, sin = tl.cos(angle) * factor, tl.sin(angle) * factor
    first = token * 2 * PAIRS + pair
    tl.store(cos_ptr + first, cos, mask=inside)
    tl.store(cos_ptr + first + PAIRS, cos, mask=inside)
    tl.store(sin_ptr + first, -sin, mask=inside)
    tl.store(sin_ptr + first + PAIRS, sin, mask=inside)


def rotation(positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> Rotation:
    tokens, pairs = positions.shape[0], frequencies.shape[-1]
    both = torch.empty((2, tokens, 1, 2 * pairs), dtype=torch.float32, device=positions.device)
    cos, sin = both[0], both[1]
    if tokens:
        launch(
            rotation_kernel,
            (tokens, 1, 1),
            (positions.contiguous(), frequencies.contiguous(), cos, sin),
            (factor,),
            num_warps=1 if pairs <= 64 else 4,
            PAIRS=pairs,
            BLOCK=triton.next_power_of_2(pairs),
            OWN=frequencies.ndim == 2,
        )
    return Rotation(cos, sin)


@triton.jit
def load_pairs(row_ptr, row_inside, PAIRS: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the two features of each pair, float32 [ROWS, BLOCK] each, zeros past PAIRS. row_ptr [ROWS, 1]."""
    if INTERLEAVED:
        feature = tl.arange(0, 2 * BLOCK)[None, :]
        inside = row_inside[:, None] & (feature < 2 * PAIRS)
        x = tl.load(row_ptr + feature, mask=inside, other=0.0).to(tl.float32)
        return tl.split(tl.reshape(x, (x.shape[0], BLOCK, 2)))
    else:
        feature = tl.arange(0, BLOCK)[None, :]
        inside = row_inside[:, None] & (feature < PAIRS)
        first = tl.load(row_ptr + feature, mask=inside, other=0.0)
        second = tl.load(row_ptr + PAIRS + feature, mask=inside, other=0.0)
        return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def store_pairs(row_ptr, first, second, row_inside, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    BLOCK: tl.constexpr = first.shape[1]
    if INTERLEAVED:
        feature = tl.arange(0, 2 * BLOCK)[None, :]
        x = tl.reshape(tl.join(first, second), (first.shape[0], 2 * BLOCK))
        tl.store(row_ptr + feature, x, mask=row_inside[:, None] & (feature < 2 * PAIRS))
    else:
        feature = tl.arange(0, BLOCK)[None, :]
        inside = row_inside[:, None] & (feature < PAIRS)
        tl.store(row_ptr + feature, first, mask=inside)
        tl.store(row_ptr + PAIRS + feature, second, mask=inside)


@triton.jit
def _norm_weight(q_norm_ptr, k_norm_ptr, is_q, feature, inside):
    """Return each row's weights, [ROWS, features] float32."""
    q = tl.load(q_norm_ptr + feature, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(k_norm_ptr + feature, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_q[:, None], q[None, :], k[None, :])


@triton.jit
def _weighted(x, scale, weight, turning, dtype: tl.constexpr, ROUND_FIRST: tl.constexpr):
    """Normalise rows of q and k, rounding like `norm.rms_norm`; leave rows of v unchanged."""
    scaled = x * scale[:, None]
    if ROUND_FIRST:
        scaled = round_to(scaled, dtype).to(tl.float32)
    return tl.where(turning[:, None], round_to(scaled * weight, dtype).to(tl.float32), x)


@triton.jit(do_not_specialize=["tokens", "eps"], do_not_specialize_on_alignment=["place_ptr"])
def rope_fill_kv_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    place_ptr,
    k_ptr,
    v_ptr,
    k_range_ptr,
    v_range_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_ptr,
    tokens,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """PAIRS pairs of features are rotated; REST is HEAD_DIM - 2 * PAIRS, padded to a power of two, or 0. FORMAT is the
    format of a quantized cache in which keys and values share no byte, and for which whole heads are rotated and not
    interleaved; otherwise it is empty, and ranges are not written."""
    HEADS: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = row // HEADS, row % HEADS
    inside = token < tokens
    turning = head < NUM_HEADS + NUM_KV_HEADS
    is_q, is_k = head < NUM_HEADS, (head >= NUM_HEADS) & turning
    pair = tl.arange(0, BLOCK)
    rest = 2 * PAIRS + tl.arange(0, REST if REST else 1)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    if NORM:
        if INTERLEAVED:
            first_feature, second_feature = 2 * pair, 2 * pair + 1
        else:
            first_feature, second_feature = pair, PAIRS + pair
        first_weight = _norm_weight(q_norm_ptr, k_norm_ptr, is_q, first_feature, pair < PAIRS)
        second_weight = _norm_weight(q_norm_ptr, k_norm_ptr, is_q, second_feature, pair < PAIRS)
        if REST:
            rest_weight = _norm_weight(q_norm_ptr, k_norm_ptr, is_q, rest, rest < HEAD_DIM)
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)

    source_ptr = qkv_ptr + row.to(tl.int64)[:, None] * HEAD_DIM
    first, second = load_pairs(source_ptr, inside, PAIRS, BLOCK, INTERLEAVED)
    if REST:
        rest_inside = inside[:, None] & (rest < HEAD_DIM)[None, :]
        unturned = tl.load(source_ptr + rest[None, :], mask=rest_inside, other=0.0).to(tl.float32)
    angle = token.to(tl.int64)[:, None] * (2 * PAIRS) + pair[None, :]
    turned = (inside & turning)[:, None] & (pair < PAIRS)[None, :]
    # The second half of the table holds the sines with their own sign.
    cos = tl.load(cos_ptr + angle, mask=turned, other=1.0)
    sin = tl.load(sin_ptr + PAIRS + angle, mask=turned, other=0.0)
    # Rows of k and v go to the token's place; padding of a captured step has none.
    place = tl.load(place_ptr + token, mask=inside & (head >= NUM_HEADS), other=-1).to(tl.int64)
    written = inside & (place >= 0)

    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if REST:
            squares += tl.sum(unturned * unturned, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)
        round_first: tl.constexpr = q_norm_ptr.dtype.element_ty == dtype
        first = _weighted(first, scale, first_weight, turning, dtype, round_first)
        second = _weighted(second, scale, second_weight, turning, dtype, round_first)
        if REST:
            unturned = _weighted(unturned, scale, rest_weight, turning, dtype, round_first)

    # A row of v has cosine 1, sine 0 and no partners: 0 times an infinite partner would be NaN.
    keep = turning[:, None]
    new_first = round_to(first * cos - tl.where(keep, second, 0.0) * sin, dtype)
    new_second = round_to(second * cos + tl.where(keep, first, 0.0) * sin, dtype)

    out_row = token.to(tl.int64) * NUM_HEADS + head
    q_row_ptr = q_ptr + out_row[:, None] * HEAD_DIM
    kv_head = tl.where(is_k, head - NUM_HEADS, head - NUM_HEADS - NUM_KV_HEADS)
    line = line_of(place, kv_head, NUM_KV_HEADS, BLOCK_SIZE)
    to_q, to_k, to_v = inside & is_q, written & is_k, written & (head >= NUM_HEADS + NUM_KV_HEADS)
    store_pairs(q_row_ptr, new_first, new_second, to_q, PAIRS, INTERLEAVED)
    if FORMAT != "":
        code_ptr = tl.where(is_k, k_ptr + line * HEAD_DIM, v_ptr + line * HEAD_DIM)
        range_ptr = tl.where(is_k, k_range_ptr + line, v_range_ptr + line)
        turned_first, turned_second = new_first.to(tl.float32), new_second.to(tl.float32)
        store_line(turned_first, turned_second, to_k | to_v, code_ptr, range_ptr, PAIRS, FORMAT)
    else:
        k_row_ptr = k_ptr + line[:, None] * HEAD_DIM
        v_row_ptr = v_ptr + line[:, None] * HEAD_DIM
        store_pairs(k_row_ptr, new_first, new_second, to_k, PAIRS, INTERLEAVED)
        store_pairs(v_row_ptr, new_first, new_second, to_v, PAIRS, INTERLEAVED)
    if REST:
        kept = round_to(unturned, dtype)
        within = (rest < HEAD_DIM)[None, :]
        tl.store(q_row_ptr + rest[None, :], kept, mask=to_q[:, None] & within)
        tl.store(k_row_ptr + rest[None, :], kept, mask=to_k[:, None] & within)
        tl.store(v_row_ptr + rest[None, :], kept, mask=to_v[:, None] & within)


def rope_fill_kv(
    qkv: Tensor,
    rotation: Rotation,
    cache: KVCache,
    plan: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
) -> Tensor:
    check_cache(cache, qkv.dtype)
    qkv = qkv.contiguous()
    tokens = qkv.shape[0]
    q = torch.empty((tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return q
    cos, sin = rotation
    form, ranges = "", (cache.k, cache.v)
    if isinstance(cache, QuantizedKV):
        if cache.format.shared or interleaved or cos.shape[-1] < head_dim:
            return _rope_then_fill(
                qkv,
                rotation,
                cache,
                plan,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                q_norm=q_norm,
                k_norm=k_norm,
                eps=eps,
                interleaved=interleaved,
            )
        form, ranges = cache.format.name, (cache.k_ranges, cache.v_ranges)
    norm = q_norm is not None and k_norm is not None
    kernel = _configured(
        num_heads, num_kv_heads, head_dim, cos.shape[-1] // 2, cache.k.shape[2], form, norm, interleaved
    )
    tensors = (
        qkv,
        cos,
        sin,
        plan,
        cache.k,
        cache.v,
        *ranges,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        q,
    )
    kernel((-(-tokens * (num_heads + 2 * num_kv_heads) // ROWS), 1, 1), tensors, (tokens, eps))
    return q


def _rope_then_fill(
    qkv: Tensor, rotation: Rotation, cache: QuantizedKV, plan: Tensor, *, num_kv_heads: int, head_dim: int, **more: Any
) -> Tensor:
    """Rotate queries and keys, write keys and values unquantized to blocks of one token, and quantize them from there.
    For caches that a single kernel cannot fill: the halves of a line are not those of its rotated pairs, or a byte
    holds a key's and a value's code, which come from different rows."""
    tokens = qkv.shape[0]
    both = PagedKV.over(qkv.new_empty(2, tokens, num_kv_heads, 1, head_dim))
    own = torch.arange(tokens, device=qkv.device)
    q = rope_fill_kv(qkv, rotation, both, own, num_kv_heads=num_kv_heads, head_dim=head_dim, **more)
    fill_quantized(both.k[:, :, 0], both.v[:, :, 0], cache, plan)
    return q


@functools.cache
def _configured(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    pairs: int,
    block_size: int,
    form: str,
    norm: bool,
    interleaved: bool,
) -> Configured:
    rest = head_dim - 2 * pairs
    return Configured(
        rope_fill_kv_kernel,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAIRS=pairs,
        BLOCK=triton.next_power_of_2(pairs),
        REST=triton.next_power_of_2(rest) if rest else 0,
        BLOCK_SIZE=block_size,
        FORMAT=form,
        NORM=norm,
        INTERLEAVED=interleaved,
        ROWS=ROWS,
    )


@triton.jit(do_not_specialize=["tokens"])
def rotate_heads_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    tokens,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = row // HEADS, row % HEADS
    inside = token < tokens
    pair = tl.arange(0, BLOCK)
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    row_ptr = x_ptr + (token.to(tl.int64) * TOKEN_STRIDE + head * HEAD_STRIDE)[:, None]
    first, second = load_pairs(row_ptr, inside, PAIRS, BLOCK, INTERLEAVED)
    angle = token.to(tl.int64)[:, None] * (2 * PAIRS) + pair[None, :]
    turned = inside[:, None] & (pair < PAIRS)[None, :]
    cos = tl.load(cos_ptr + angle, mask=turned, other=1.0)
    sin = tl.load(sin_ptr + PAIRS + angle, mask=turned, other=0.0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    new_first = round_to(first * cos - second * sin, dtype)
    new_second = round_to(second * cos + first * sin, dtype)
    store_pairs(row_ptr, new_first, new_second, inside, PAIRS, INTERLEAVED)


def rotate_heads(x: Tensor, rotation: Rotation, *, interleaved: bool = False) -> None:
    """See `asyncllm.kernels.segments.rotate_heads`."""
    tokens, heads, _ = x.shape
    if not tokens:
        return
    cos, sin = rotation
    pairs = cos.shape[-1] // 2
    launch(
        rotate_heads_kernel,
        (-(-tokens * heads // ROWS), 1, 1),
        (x, cos, sin),
        (tokens,),
        TOKEN_STRIDE=x.stride(0),
        HEAD_STRIDE=x.stride(1),
        HEADS=heads,
        PAIRS=pairs,
        BLOCK=triton.next_power_of_2(pairs),
        INTERLEAVED=interleaved,
        ROWS=ROWS,
    )
