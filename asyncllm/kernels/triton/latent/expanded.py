"""Prompts of latent attention in expanded form: attention over keys and values of each head, stored row after row."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.latent import LatentKV
from asyncllm.kernels.triton.attention.plan import list_tiles
from asyncllm.kernels.triton.attention.tile import FLOOR, LOG2_E, last_factor
from asyncllm.kernels.triton.language import dot, release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.launch import Configured, launch

__all__ = [
    "EXPANDED_CONFIGS",
    "ExpandedConfig",
    "expanded_prefill_attention",
    "expanded_prefill_kernel",
    "gather_lines",
    "gather_lines_kernel",
    "plan_expanded_prefill",
]

GATHERED = 16
"""Number of lines that a program gathers."""


class ExpandedConfig(NamedTuple):
    rows: int
    """Number of queries of a tile."""
    tile: int
    """Keys per step of the inner loop."""
    num_warps: int
    num_stages: int


EXPANDED_CONFIGS = {2: ExpandedConfig(128, 64, 8, 3), 4: ExpandedConfig(32, 16, 8, 2)}
"""By bytes per number. Not timed: chosen to compile for sm_90 without spilled registers."""


class ExpandedRows(NamedTuple):
    """The plan of a step on a GPU."""

    entries: Tensor
    """As in `attention.plan.PrefillTiles`."""
    starts: Tensor
    """[B] int32: the index of each row's first key among those of all rows."""
    kv_lens: Tensor
    block_tables: Tensor
    config: ExpandedConfig
    num_heads: int
    num_keys: int
    longest: int
    """Maximum number of keys of a row."""
    num_tiles: int


def plan_expanded_prefill(
    block_tables: Tensor,
    q_offsets: Tensor,
    kv_lens: Tensor,
    cache: LatentKV,
    rows: Sequence[tuple[int, int]],
    *,
    num_heads: int,
) -> ExpandedRows:
    """See `asyncllm.kernels.expanded.plan_expanded_prefill`."""
    config = EXPANDED_CONFIGS[cache.pages.element_size()]
    num_tiles = sum(-(-count // config.rows) for count, _ in rows)
    entries = list_tiles(q_offsets, kv_lens, num_tiles, config.rows)
    starts = kv_lens.cumsum(0, dtype=torch.int32).sub_(kv_lens)
    keys = [count for _, count in rows]
    return ExpandedRows(entries, starts, kv_lens, block_tables, config, num_heads, sum(keys), max(keys), num_tiles)


@triton.jit(
    do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["block_tables", "kv_lens_ptr", "starts_ptr"]
)
def gather_lines_kernel(
    pages_ptr,
    block_tables,
    kv_lens_ptr,
    starts_ptr,
    latents_ptr,
    keys_ptr,
    table_stride,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    LINES: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Copy each row's lines from the cache to contiguous latents and keys. A program has LINES lines of a row."""
    WIDTH: tl.constexpr = RANK + ROPE
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    row = tl.program_id(1)
    positions = tl.program_id(0) * LINES + tl.arange(0, LINES)
    ranks = tl.arange(0, RANK_BLOCK)
    ropes = tl.arange(0, ROPE_BLOCK)
    there = positions < tl.load(kv_lens_ptr + row)
    blocks = tl.load(block_tables + row.to(tl.int64) * table_stride + positions // PAGE, mask=there, other=0)
    source = ((blocks.to(tl.int64) * PAGE + positions % PAGE) * WIDTH)[:, None]
    target = (tl.load(starts_ptr + row) + positions).to(tl.int64)[:, None]
    inside = there[:, None] & (ranks < RANK)[None, :]
    latents = tl.load(pages_ptr + source + ranks[None, :], mask=inside)
    tl.store(latents_ptr + target * RANK + ranks[None, :], latents, mask=inside)
    inside = there[:, None] & (ropes < ROPE)[None, :]
    keys = tl.load(pages_ptr + source + RANK + ropes[None, :], mask=inside)
    tl.store(keys_ptr + target * ROPE + ropes[None, :], keys, mask=inside)


def gather_lines(pages: Tensor, plan: ExpandedRows, *, rank: int) -> tuple[Tensor, Tensor]:
    """See `asyncllm.kernels.expanded.gather_lines`."""
    _, block_size, width = pages.shape
    latents, keys = pages.new_empty(plan.num_keys, rank), pages.new_empty(plan.num_keys, width - rank)
    launch(
        gather_lines_kernel,
        (-(-plan.longest // GATHERED), len(plan.kv_lens), 1),
        (pages, plan.block_tables, plan.kv_lens, plan.starts, latents, keys),
        (plan.block_tables.stride(0),),
        RANK=rank,
        RANK_BLOCK=triton.next_power_of_2(rank),
        ROPE=width - rank,
        ROPE_BLOCK=triton.next_power_of_2(width - rank),
        PAGE=block_size,
        LINES=GATHERED,
    )
    return latents, keys


@triton.jit
def _attend_tiles(
    nope,
    rope,
    kv,
    keys,
    acc,
    weight_sum,
    maximum,
    begin,
    end,
    query_positions,
    kv_end,
    steepness,
    KV_STRIDE: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend to tiles begin to end - 1 of a row's keys. `kv` and `keys` point to the row's first key, `kv` to that of
    one head."""
    NOPE_BLOCK: tl.constexpr = nope.shape[1]
    ROPE_BLOCK: tl.constexpr = rope.shape[1]
    VALUE_BLOCK: tl.constexpr = acc.shape[1]
    tokens = tl.arange(0, TILE)
    nopes = tl.arange(0, NOPE_BLOCK)
    ropes = tl.arange(0, ROPE_BLOCK)
    values = tl.arange(0, VALUE_BLOCK)
    for index in range(begin, end):
        positions = index * TILE + tokens
        lines = positions.to(tl.int64)[:, None]
        there = (positions < kv_end)[:, None]
        if MASKED:
            inside = there & (nopes < NOPE)[None, :]
            k = tl.load(kv + lines * KV_STRIDE + nopes[None, :], mask=inside, other=0.0)
            turned = tl.load(keys + lines * ROPE + ropes[None, :], mask=there & (ropes < ROPE)[None, :], other=0.0)
            inside = there & (values < VALUE)[None, :]
            v = tl.load(kv + lines * KV_STRIDE + NOPE + values[None, :], mask=inside, other=0.0)
        else:
            k = _load(kv + lines * KV_STRIDE + nopes[None, :], nopes, NOPE)
            turned = _load(keys + lines * ROPE + ropes[None, :], ropes, ROPE)
            v = _load(kv + lines * KV_STRIDE + NOPE + values[None, :], values, VALUE)
        raw = dot(nope, tl.trans(k), tl.zeros([nope.shape[0], TILE], tl.float32))
        raw = dot(rope, tl.trans(turned), raw)
        if MASKED:
            raw = tl.where(positions[None, :] <= query_positions[:, None], raw, -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(raw, 1))
        weights = tl.exp2((raw - new_maximum[:, None]) * steepness)
        fade = tl.exp2((maximum - new_maximum) * steepness)
        weight_sum = weight_sum * fade + tl.sum(weights, 1)
        acc = dot(round_to(weights, v.dtype), v, acc * fade[:, None])
        maximum = new_maximum
    return acc, weight_sum, maximum


@triton.jit
def _load(pointers, features, SIZE: tl.constexpr):
    """Load [N, features], with zeros from SIZE on."""
    if features.shape[0] == SIZE:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(features < SIZE)[None, :], other=0.0)


@triton.jit(do_not_specialize_on_alignment=["starts_ptr"])
def expanded_prefill_kernel(
    q,
    kv,
    keys,
    out,
    entries,
    starts_ptr,
    steepness,
    NUM_HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    NOPE_BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """q [T, H, NOPE + ROPE], kv [S, H, NOPE + VALUE], keys [S, ROPE], out [T, H, VALUE], without gaps."""
    HEAD_DIM: tl.constexpr = NOPE + ROPE
    KV_STRIDE: tl.constexpr = NUM_HEADS * (NOPE + VALUE)
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    entry = entries + (1 + tl.program_id(0)) * 4
    head = tl.program_id(1)
    row = tl.load(entry)
    first_query = tl.load(entry + 1)
    count = tl.load(entry + 2)
    position = tl.load(entry + 3)
    start = tl.load(starts_ptr + row).to(tl.int64)

    queries = tl.arange(0, ROWS)
    nopes = tl.arange(0, NOPE_BLOCK)
    ropes = tl.arange(0, ROPE_BLOCK)
    values = tl.arange(0, VALUE_BLOCK)
    owned = (queries < count)[:, None]
    lines = ((first_query + queries).to(tl.int64) * NUM_HEADS + head)[:, None]
    nope = tl.load(q + lines * HEAD_DIM + nopes[None, :], mask=owned & (nopes < NOPE)[None, :], other=0.0)
    rope = tl.load(q + lines * HEAD_DIM + NOPE + ropes[None, :], mask=owned & (ropes < ROPE)[None, :], other=0.0)
    query_positions = position + queries

    acc = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    maximum = tl.full([ROWS], FLOOR, tl.float32)
    kv_end = position + count
    # Tiles that every query attends to as a whole, then those with masked keys.
    whole = (position + 1) // TILE
    own_kv = kv + start * KV_STRIDE + head * (NOPE + VALUE)
    own_keys = keys + start * ROPE
    acc, weight_sum, maximum = _attend_tiles(
        nope, rope, own_kv, own_keys, acc, weight_sum, maximum, 0, whole, query_positions, kv_end, steepness,
        KV_STRIDE, NOPE, ROPE, VALUE, TILE, False,
    )  # fmt: skip
    acc, weight_sum, maximum = _attend_tiles(
        nope, rope, own_kv, own_keys, acc, weight_sum, maximum, whole, tl.cdiv(kv_end, TILE), query_positions, kv_end,
        steepness, KV_STRIDE, NOPE, ROPE, VALUE, TILE, True,
    )  # fmt: skip
    factor = last_factor(weight_sum, maximum * steepness, q, queries, queries < count, False)
    result = round_to(acc * factor[:, None], out.dtype.element_ty)
    tl.store(out + lines * VALUE + values[None, :], result, mask=owned & (values < VALUE)[None, :])


def expanded_prefill_attention(
    q: Tensor, kv: Tensor, keys: Tensor, plan: ExpandedRows, *, scale: float, out: Tensor
) -> None:
    """See `asyncllm.kernels.expanded.expanded_prefill_attention`."""
    if not (q.is_contiguous() and kv.is_contiguous() and out.is_contiguous()):
        raise ValueError("Queries, keys, values and results are read and written without gaps: make them contiguous.")
    rope, value = keys.shape[1], out.shape[2]
    configured = _configured(plan.num_heads, q.shape[2] - rope, rope, value, plan.config)
    tensors = (q, kv, keys, out, plan.entries, plan.starts)
    configured((plan.num_tiles, plan.num_heads, 1), tensors, (scale * LOG2_E.value,))


@functools.cache
def _configured(num_heads: int, nope: int, rope: int, value: int, config: ExpandedConfig) -> Configured:
    return Configured(
        expanded_prefill_kernel,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        NUM_HEADS=num_heads,
        NOPE=nope,
        NOPE_BLOCK=max(16, triton.next_power_of_2(nope)),
        ROPE=rope,
        ROPE_BLOCK=max(16, triton.next_power_of_2(rope)),
        VALUE=value,
        VALUE_BLOCK=max(16, triton.next_power_of_2(value)),
        ROWS=config.rows,
        TILE=config.tile,
    )
