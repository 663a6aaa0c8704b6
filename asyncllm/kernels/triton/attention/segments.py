"""Attention within segments: like prefill, but with keys and values next to the queries, and without a causal mask.

A program has a tile of queries of one segment and one head. If all segments have the same length, the program's number
determines the tile; otherwise a table does.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.segments import Segments
from asyncllm.kernels.triton.attention.tile import FLOOR, LOG2_E, attend_tile
from asyncllm.kernels.triton.language import release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.launch import Configured

__all__ = ["SegmentConfig", "config_of", "segment_attention", "segment_attention_kernel"]


class SegmentConfig(NamedTuple):
    """The sizes of a program."""

    rows: int
    """Number of queries, a divisor of the number in a plan's tile."""
    tile: int
    """Number of keys per step of the inner loop."""
    num_warps: int
    num_stages: int


def config_of(rows: int, padded: int, itemsize: int) -> SegmentConfig:
    """Return the config for tiles of `rows` queries with heads of this padded size: the largest that compiles for sm_90
    with few spilled registers."""
    if itemsize == 4:
        return SegmentConfig(32, 16, 4, 2)
    warps = 8 if padded > 128 or (rows > 64 and padded > 64) else 4
    return SegmentConfig(min(rows, 64) if padded > 128 else rows, 64, warps, 3 if padded <= 128 else 2)


@triton.jit
def _attend_keys_of_segment(
    query,
    k,
    v,
    acc,
    weight_sum,
    maximum,
    begin,
    end,
    start,
    stop,
    steepness,
    K_TOKEN: tl.constexpr,
    V_TOKEN: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend to tiles begin to end - 1 of keys start to stop - 1."""
    tokens = tl.arange(0, TILE)
    dims = tl.arange(0, acc.shape[1])
    last = tl.zeros([acc.shape[0]], tl.int32) + (stop - 1)
    for index in range(begin, end):
        keys = start + index * TILE + tokens
        # Beyond the last segment memory belongs to others, so its last key is read again and masked.
        lines = (tl.minimum(keys, stop - 1) if MASKED else keys).to(tl.int64)
        acc, weight_sum, maximum = attend_tile(
            query,
            k + (lines * K_TOKEN)[None, :] + dims[:, None],
            v + (lines * V_TOKEN)[:, None] + dims[None, :],
            acc,
            weight_sum,
            maximum,
            keys,
            last,
            stop,
            0,
            0.0,
            0.0,
            steepness,
            D,
            MASKED,
            False,
            False,
            False,
        )
    return acc, weight_sum, maximum


@triton.jit(do_not_specialize=["length", "tiles_each"])
def segment_attention_kernel(
    q,
    k,
    v,
    out,
    tiles,
    steepness,
    length,
    tiles_each,
    Q_TOKEN: tl.constexpr,
    Q_HEAD: tl.constexpr,
    K_TOKEN: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_TOKEN: tl.constexpr,
    V_HEAD: tl.constexpr,
    OUT_TOKEN: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    EVEN: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """q, k, v [T, H, D] with the given strides, out [T, H, D]. `tiles`: as in `Segments`. EVEN: segments have `length`
    tokens and `tiles_each` tiles instead."""
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    number, head = tl.program_id(0), tl.program_id(1)
    if EVEN:
        start = (number // tiles_each) * length
        stop = start + length
        first = start + (number % tiles_each) * tl.num_programs(2) * ROWS
    else:
        first = tl.load(tiles + number * 3)
        start = tl.load(tiles + number * 3 + 1)
        stop = tl.load(tiles + number * 3 + 2)
    # A tile with too many queries for a program is divided.
    first += tl.program_id(2) * ROWS
    if first >= stop:
        return
    dims = tl.arange(0, PADDED)
    queries = first + tl.arange(0, ROWS)
    kept = (queries < stop)[:, None] & (dims < D)[None, :]
    lines = queries.to(tl.int64)
    query = tl.load(q + (lines * Q_TOKEN + head * Q_HEAD)[:, None] + dims[None, :], mask=kept, other=0.0)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    maximum = tl.full([ROWS], FLOOR, tl.float32)
    whole = (stop - start) // TILE
    k += head * K_HEAD
    v += head * V_HEAD
    acc, weight_sum, maximum = _attend_keys_of_segment(
        query, k, v, acc, weight_sum, maximum, 0, whole, start, stop, steepness, K_TOKEN, V_TOKEN, D, TILE, False
    )
    end = tl.cdiv(stop - start, TILE)
    acc, weight_sum, maximum = _attend_keys_of_segment(
        query, k, v, acc, weight_sum, maximum, whole, end, start, stop, steepness, K_TOKEN, V_TOKEN, D, TILE, True
    )
    into = out + (lines * OUT_TOKEN + head * D)[:, None] + dims[None, :]
    tl.store(into, round_to(acc / weight_sum[:, None], into.dtype.element_ty), mask=kept)


def segment_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
    """See `asyncllm.kernels.segments.segment_attention`."""
    tokens, heads, head_dim = q.shape
    out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    q, k, v = (each if each.stride(2) == 1 else each.contiguous() for each in (q, k, v))
    strides = tuple(stride for each in (q, k, v) for stride in each.stride()[:2])
    variant = _variant(strides, heads, head_dim, segments.rows, segments.tiles is None, q.element_size())
    steepness = head_dim**-0.5 * LOG2_E.value
    if segments.tiles is None:
        each = -(-segments.length // segments.rows)
        grid = (tokens // segments.length * each, heads, variant.parts)
        variant.kernel(grid, (q, k, v, out, out), (steepness, segments.length, each))
    else:
        grid = (len(segments.tiles), heads, variant.parts)
        variant.kernel(grid, (q, k, v, out, segments.tiles), (steepness, 0, 0))
    return out


class _Variant(NamedTuple):
    kernel: Configured
    parts: int
    """Number of programs of a tile."""


@functools.cache
def _variant(strides: tuple[int, ...], heads: int, head_dim: int, rows: int, even: bool, itemsize: int) -> _Variant:
    padded = max(16, triton.next_power_of_2(head_dim))
    config = config_of(rows, padded, itemsize)
    q_token, q_head, k_token, k_head, v_token, v_head = strides
    kernel = Configured(
        segment_attention_kernel,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        Q_TOKEN=q_token,
        Q_HEAD=q_head,
        K_TOKEN=k_token,
        K_HEAD=k_head,
        V_TOKEN=v_token,
        V_HEAD=v_head,
        OUT_TOKEN=heads * head_dim,
        D=head_dim,
        PADDED=padded,
        ROWS=config.rows,
        TILE=config.tile,
        EVEN=even,
    )
    return _Variant(kernel, rows // config.rows)
