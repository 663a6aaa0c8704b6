"""Latent prefill attention in absorbed form: many queries per row, causal, with all lines read from the cache's blocks.

Tiles of keys start at multiples of the tile from position 0, and all of them are computed alike, whether masked or not.
A query's result therefore depends only on its row's tokens, not on the batch or on the division of the prompt into
chunks, and a row of one query gets the same bits as in a longer one.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.latent import LatentKV
from asyncllm.kernels.triton.attention.plan import key_tile
from asyncllm.kernels.triton.attention.tile import FLOOR, LOG2_E, last_factor
from asyncllm.kernels.triton.language import dot, release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.latent.plan import LatentPrefillConfig, LatentPrefillTiles, LatentShape, constexprs
from asyncllm.kernels.triton.launch import Configured
from asyncllm.kernels.triton.page import page_entry, tile_start

__all__ = ["latent_prefill_attention", "latent_prefill_kernel"]


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["block_tables"])
def latent_prefill_kernel(
    q_latent,
    q_rope,
    pages,
    block_tables,
    out,
    entries,
    steepness,
    table_stride,
    LATENT_STRIDE: tl.constexpr,
    LATENT_HEAD: tl.constexpr,
    ROPE_STRIDE: tl.constexpr,
    ROPE_HEAD: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """STRIDE and HEAD: strides of a token and of a head. Padded sizes end in BLOCK."""
    WIDTH: tl.constexpr = RANK + ROPE
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    number = tl.program_id(0)
    if number >= tl.load(entries):
        return
    entry = entries + (1 + number) * 4
    row = tl.load(entry)
    first_query = tl.load(entry + 1)
    count = tl.load(entry + 2)
    position = tl.load(entry + 3)

    rows = tl.arange(0, ROWS)
    ranks = tl.arange(0, RANK_BLOCK)
    ropes = tl.arange(0, ROPE_BLOCK)
    tokens = tl.arange(0, TILE)
    # Row r of the scores is query r // HEADS with head r % HEADS of the tile's.
    queries = rows // HEADS
    query_heads = tl.program_id(1) * HEADS + rows % HEADS
    owned = (queries < count) & (query_heads < NUM_HEADS)
    places = (first_query + queries).to(tl.int64)
    kept = owned[:, None] & (ranks < RANK)[None, :]
    latent_lines = places * LATENT_STRIDE + query_heads * LATENT_HEAD
    latent = tl.load(q_latent + latent_lines[:, None] + ranks[None, :], mask=kept, other=0.0)
    rope_lines = places * ROPE_STRIDE + query_heads * ROPE_HEAD
    turning = owned[:, None] & (ropes < ROPE)[None, :]
    rope = tl.load(q_rope + rope_lines[:, None] + ropes[None, :], mask=turning, other=0.0)
    query_positions = position + queries

    acc = tl.zeros([ROWS, RANK_BLOCK], tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    maximum = tl.full([ROWS], FLOOR, tl.float32)
    table = block_tables + row.to(tl.int64) * table_stride
    kv_end = position + count
    end = tl.cdiv(tl.maximum(kv_end, 0), TILE)
    # The block id of a tile is loaded one iteration ahead: only then can the loads of lines run ahead as well.
    page = tl.load(table, mask=end > 0, other=0)
    for index in range(0, end):
        first_key = index * TILE
        base = tile_start(page, first_key, 0, 1, PAGE, WIDTH)
        page = tl.load(page_entry(table, tl.minimum(index + 1, end - 1), TILE, PAGE))
        keys = first_key + tokens
        # Lines beyond the row's end may be NaN, and 0 times NaN is NaN, so they are replaced, not just weighted 0.
        there = (keys < kv_end)[:, None]
        inside = there if RANK_BLOCK == RANK else there & (ranks < RANK)[None, :]
        lines = tl.load(pages + base + tokens[:, None] * WIDTH + ranks[None, :], mask=inside, other=0.0)
        inside = there if ROPE_BLOCK == ROPE else there & (ropes < ROPE)[None, :]
        turned = tl.load(pages + base + tokens[:, None] * WIDTH + (RANK + ropes)[None, :], mask=inside, other=0.0)
        raw = dot(latent, tl.trans(lines), tl.zeros([ROWS, TILE], tl.float32))
        raw = dot(rope, tl.trans(turned), raw)
        raw = tl.where(keys[None, :] <= query_positions[:, None], raw, -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(raw, 1))
        weights = tl.exp2((raw - new_maximum[:, None]) * steepness)
        fade = tl.exp2((maximum - new_maximum) * steepness)
        weight_sum = weight_sum * fade + tl.sum(weights, 1)
        acc = dot(round_to(weights, lines.dtype), lines, acc * fade[:, None])
        maximum = new_maximum
    factor = last_factor(weight_sum, maximum * steepness, q_latent, query_heads, owned, False)
    result = round_to(acc * factor[:, None], out.dtype.element_ty)
    target = out + (places * OUT_STRIDE + query_heads * RANK)[:, None] + ranks[None, :]
    tl.store(target, result, mask=kept)


def latent_prefill_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: LatentKV,
    plan: LatentPrefillTiles,
    *,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """See `asyncllm.kernels.latent.latent_prefill_attention`. `out` may have any stride between tokens."""
    if out is None:
        out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
    strides = (*q_latent.stride()[:2], *q_rope.stride()[:2], out.stride(0))
    # The grid has as many programs as there can be tiles; surplus ones exit at once.
    num_tiles = min(q_latent.shape[0] // plan.tokens + plan.num_rows, plan.capacity)
    grid = (num_tiles, -(-plan.shape.num_heads // plan.heads), 1)
    tensors = (q_latent, q_rope, cache.pages, plan.block_tables, out, plan.entries)
    _configured(plan.shape, strides, plan.config, plan.heads)(grid, tensors, (scale * LOG2_E.value, plan.table_stride))
    return out


@functools.cache
def _configured(shape: LatentShape, strides: tuple[int, ...], config: LatentPrefillConfig, heads: int) -> Configured:
    return Configured(
        latent_prefill_kernel,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **constexprs(shape, strides),
        HEADS=heads,
        ROWS=config.rows,
        TILE=key_tile(shape.block_size, config.tile),
    )
