"""Writes keys and values to pages, and copies pages in all planes at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.cache import KVCache
from asyncllm.kernels.quantized_kv import QuantizedKV
from asyncllm.kernels.triton.language import release_consumers, wait_for_producers
from asyncllm.kernels.triton.launch import launch
from asyncllm.kernels.triton.page import line_of
from asyncllm.kernels.triton.quantized_kv import join_codes, quantize_halves

__all__ = ["check_cache", "copy_blocks", "fill_kv_cache", "fill_quantized", "plan_cache_write", "store_line"]

LINES = 16
"""Lines (heads of a token's key or value) per program: with heads of 128, two 16-byte loads, 26 registers."""

CHUNK = 8192
"""Numbers per copying program: 16 KiB of bfloat16, eight 16-byte loads per thread in flight, 46 registers."""


def check_cache(cache: KVCache, dtype: torch.dtype) -> None:
    """Raise ValueError unless the cache has the dtype `dtype` and its blocks are contiguous."""
    takes = isinstance(cache, QuantizedKV) or cache.k.dtype == dtype
    if not takes or not cache.lines.is_contiguous():
        raise ValueError(f"{dtype} keys and values need a contiguous cache of {dtype}, not of {cache.k.dtype}")


def plan_cache_write(places: Tensor, cache: KVCache) -> Tensor:
    return places.contiguous()


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["place_ptr"])
def fill_kv_cache_kernel(
    kv_ptr,
    place_ptr,
    k_ptr,
    v_ptr,
    tokens,
    STRIDE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LINES: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """STRIDE: distance between tokens. FEATURES: HEAD_DIM padded to a power of two."""
    row = tl.program_id(0) * LINES + tl.arange(0, LINES)
    token, head = row // (2 * NUM_KV_HEADS), row % (2 * NUM_KV_HEADS)
    feature = tl.arange(0, FEATURES)[None, :]
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    place = tl.load(place_ptr + token, mask=token < tokens, other=-1).to(tl.int64)
    inside = (place >= 0)[:, None] & (feature < HEAD_DIM)
    source = token.to(tl.int64) * STRIDE + head * HEAD_DIM
    kv = tl.load(kv_ptr + source[:, None] + feature, mask=inside)
    is_k = head < NUM_KV_HEADS
    kv_head = tl.where(is_k, head, head - NUM_KV_HEADS)
    line = line_of(place, kv_head, NUM_KV_HEADS, BLOCK_SIZE)
    offsets = line[:, None] * HEAD_DIM + feature
    tl.store(k_ptr + offsets, kv, mask=inside & is_k[:, None])
    tl.store(v_ptr + offsets, kv, mask=inside & (head >= NUM_KV_HEADS)[:, None])


def fill_kv_cache(kv: Tensor, cache: KVCache, plan: Tensor) -> None:
    """See `asyncllm.kernels.cache.fill_kv_cache`. kv may have any stride between tokens."""
    check_cache(cache, kv.dtype)
    tokens, lines, head_dim = kv.shape
    if kv.stride()[1:] != (head_dim, 1):
        kv = kv.contiguous()
    if tokens and isinstance(cache, QuantizedKV):
        fill_quantized(kv[:, : lines // 2], kv[:, lines // 2 :], cache, plan)
    elif tokens:
        launch(
            fill_kv_cache_kernel,
            (-(-tokens * lines // LINES), 1, 1),
            (kv, plan, cache.k, cache.v),
            (tokens,),
            STRIDE=kv.stride(0),
            NUM_KV_HEADS=lines // 2,
            HEAD_DIM=head_dim,
            FEATURES=triton.next_power_of_2(head_dim),
            BLOCK_SIZE=cache.k.shape[2],
            LINES=LINES,
        )


@triton.jit
def store_line(first, second, inside, code_ptr, range_ptr, HALF: tl.constexpr, FORMAT: tl.constexpr):
    """Quantize lines and store those where inside [R]. first, second [R, B] float32: numbers j and j + HALF; code_ptr
    [R] points to the lines' codes, range_ptr [R] to their ranges."""
    feature = tl.arange(0, first.shape[1])[None, :]
    within = feature < HALF
    first_codes, second_codes, ranges = quantize_halves(first, second, within, FORMAT)
    dtype: tl.constexpr = code_ptr.dtype.element_ty
    mask = inside[:, None] & within
    into = code_ptr[:, None] + feature
    tl.store(into, first_codes.to(dtype), mask=mask)
    tl.store(into + HALF, second_codes.to(dtype), mask=mask)
    tl.store(range_ptr, ranges, mask=inside)


@triton.jit
def _load_halves(pointers, mask, HALF: tl.constexpr):
    first = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    return first, tl.load(pointers + HALF, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["place_ptr"])
def fill_quantized_kernel(
    keys_ptr,
    values_ptr,
    place_ptr,
    k_ptr,
    v_ptr,
    k_range_ptr,
    v_range_ptr,
    tokens,
    STRIDE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    LINES: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (i, 0) writes keys and (i, 1) values; if they share bytes, one program writes both. STRIDE: distance
    between tokens. BLOCK: HALF padded to a power of two."""
    row = tl.program_id(0) * LINES + tl.arange(0, LINES)
    token, kv_head = row // NUM_KV_HEADS, row % NUM_KV_HEADS
    feature = tl.arange(0, BLOCK)[None, :]
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    place = tl.load(place_ptr + token, mask=token < tokens, other=-1).to(tl.int64)
    inside = place >= 0
    mask = inside[:, None] & (feature < HALF)
    source = (token.to(tl.int64) * STRIDE + kv_head * (2 * HALF))[:, None] + feature
    line = line_of(place, kv_head, NUM_KV_HEADS, BLOCK_SIZE)
    if FORMAT == "k5v3":
        first, second = _load_halves(keys_ptr + source, mask, HALF)
        first_keys, second_keys, ranges = quantize_halves(first, second, feature < HALF, "k5")
        tl.store(k_range_ptr + line, ranges, mask=inside)
        first, second = _load_halves(values_ptr + source, mask, HALF)
        first_values, second_values, ranges = quantize_halves(first, second, feature < HALF, "v3")
        tl.store(v_range_ptr + line, ranges, mask=inside)
        into = k_ptr + (line * (2 * HALF))[:, None] + feature
        tl.store(into, join_codes(first_keys, first_values, into.dtype.element_ty), mask=mask)
        tl.store(into + HALF, join_codes(second_keys, second_values, into.dtype.element_ty), mask=mask)
    else:
        if tl.program_id(1) == 0:
            source_ptr, code_ptr, range_ptr = keys_ptr, k_ptr, k_range_ptr
        else:
            source_ptr, code_ptr, range_ptr = values_ptr, v_ptr, v_range_ptr
        first, second = _load_halves(source_ptr + source, mask, HALF)
        store_line(first, second, inside, code_ptr + line * (2 * HALF), range_ptr + line, HALF, FORMAT)


def fill_quantized(k: Tensor, v: Tensor, cache: QuantizedKV, places: Tensor) -> None:
    """Write keys and values [T, kv_heads, head_dim] each, with equal strides, to the tokens' places. T is not 0."""
    tokens, num_kv_heads, head_dim = k.shape
    launch(
        fill_quantized_kernel,
        (-(-tokens * num_kv_heads // LINES), cache.format.planes, 1),
        (k, v, places, cache.k, cache.v, cache.k_ranges, cache.v_ranges),
        (tokens,),
        STRIDE=k.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        BLOCK=triton.next_power_of_2(head_dim // 2),
        BLOCK_SIZE=cache.k.shape[2],
        FORMAT=cache.format.name,
        LINES=LINES,
    )


@triton.jit(do_not_specialize=["num_blocks"], do_not_specialize_on_alignment=["source_ptr", "destination_ptr"])
def copy_blocks_kernel(
    source_ptr,
    destination_ptr,
    pool_ptr,
    num_blocks,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    pair = tl.program_id(0)
    source = tl.load(source_ptr + pair).to(tl.int64)
    destination = tl.load(destination_ptr + pair).to(tl.int64)
    offset = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    first = tl.program_id(1).to(tl.int64) * num_blocks
    inside = offset < SIZE
    copied = tl.load(pool_ptr + (first + source) * SIZE + offset, mask=inside)
    tl.store(pool_ptr + (first + destination) * SIZE + offset, copied, mask=inside)


def copy_blocks(pool: Tensor, source: Tensor, destination: Tensor) -> None:
    if not pool.is_contiguous():
        raise ValueError("blocks are copied in a contiguous pool")
    planes, num_blocks = pool.shape[:2]
    if pool.numel() == 0 or not source.shape[0]:
        return
    size = pool.stride(1)
    launch(
        copy_blocks_kernel,
        (source.shape[0], planes, -(-size // CHUNK)),
        (source.contiguous(), destination.contiguous(), pool),
        (num_blocks,),
        SIZE=size,
        CHUNK=CHUNK,
    )
