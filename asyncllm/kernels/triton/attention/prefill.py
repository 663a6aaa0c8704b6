"""Prefill attention: many queries per row, causal, with all keys read from the cache's blocks.

Tiles of keys start at multiples of the tile from position 0, and a tile that a query does not attend to leaves its
state unchanged. With a given config a query's result therefore depends only on its row's tokens, not on the batch or on
the division of the prompt into chunks. `plan_prefill_attention(invariant=True)` fixes the config.

"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.cache import KVCache
from asyncllm.kernels.triton.attention.launch import Variant, launch_attention, variant_of
from asyncllm.kernels.triton.attention.plan import PrefillConfig, PrefillTiles, key_tile
from asyncllm.kernels.triton.attention.quantized import attend_quantized_tile, factor_of, load_queries
from asyncllm.kernels.triton.attention.tile import FLOOR, LOG2_E, attend_tile
from asyncllm.kernels.triton.language import release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.launch import Configured
from asyncllm.kernels.triton.page import page_entry, tile_start

__all__ = ["paged_prefill_attention", "prefill_attention_kernel"]


@triton.jit
def _attend_tiles(
    query,
    query_sum,
    k,
    v,
    k_ranges,
    v_ranges,
    table,
    acc,
    weight_sum,
    maximum,
    begin,
    end,
    kv_head,
    query_positions,
    kv_end,
    window,
    slopes,
    squeeze,
    steepness,
    NUM_KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    FORMAT: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
):
    """Tiles begin to end - 1 of the row's keys."""
    tokens = tl.arange(0, TILE)
    dims = tl.arange(0, acc.shape[1])
    key_offsets = tokens[None, :] * D + dims[:, None]
    value_offsets = tokens[:, None] * D + dims[None, :]
    # The block id of a tile is loaded one iteration ahead: only then can the loads of K and V run ahead as well.
    page = tl.load(page_entry(table, begin, TILE, PAGE), mask=begin < end, other=0)
    for index in range(begin, end):
        first_key = index * TILE
        block_id = page
        base = tile_start(page, first_key, kv_head, NUM_KV_HEADS, PAGE, D)
        page = tl.load(page_entry(table, tl.minimum(index + 1, end - 1), TILE, PAGE))
        if FORMAT == "":
            acc, weight_sum, maximum = attend_tile(
                query,
                k + base + key_offsets,
                v + base + value_offsets,
                acc,
                weight_sum,
                maximum,
                first_key + tokens,
                query_positions,
                kv_end,
                window,
                slopes,
                squeeze,
                steepness,
                D,
                MASKED,
                HAS_WINDOW,
                SOFTCAP,
                ALIBI,
            )
        else:
            ranges = tile_start(block_id, first_key, kv_head, NUM_KV_HEADS, PAGE, 1) + tokens
            acc, weight_sum, maximum = attend_quantized_tile(
                query,
                query_sum,
                k + base + key_offsets,
                v + base + value_offsets,
                k_ranges + ranges,
                v_ranges + ranges,
                acc,
                weight_sum,
                maximum,
                first_key + tokens,
                query_positions,
                kv_end,
                window,
                slopes,
                squeeze,
                steepness,
                D,
                FORMAT,
                MASKED,
                HAS_WINDOW,
                SOFTCAP,
                ALIBI,
            )
    return acc, weight_sum, maximum


@triton.jit(do_not_specialize=["window", "table_stride"], do_not_specialize_on_alignment=["block_tables"])
def prefill_attention_kernel(
    q,
    k,
    v,
    k_ranges,
    v_ranges,
    block_tables,
    out,
    sinks,
    alibi,
    entries,
    squeeze,
    steepness,
    window,
    table_stride,
    Q_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """See `decode_attention_kernel`, also for FORMAT."""
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    number = tl.program_id(0)
    if number >= tl.load(entries):
        return
    kv_head = tl.program_id(1)
    entry = entries + (1 + number) * 4
    row = tl.load(entry)
    first_query = tl.load(entry + 1)
    count = tl.load(entry + 2)
    position = tl.load(entry + 3)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, PADDED)
    # Row r of the scores is query r // GROUP with head r % GROUP of those that share this KV head.
    queries = rows // GROUP
    query_heads = kv_head * GROUP + rows % GROUP
    owned = queries < count
    kept = owned[:, None] & (dims < D)[None, :]
    lines = (first_query + queries).to(tl.int64)
    own = q + (lines * Q_STRIDE + query_heads * D)[:, None] + dims[None, :]
    query, query_sum = load_queries(own, kept, 1, FORMAT)
    query_positions = position + queries
    slopes = tl.zeros([ROWS], tl.float32)
    if ALIBI:
        slopes = tl.load(alibi + query_heads, mask=owned, other=0.0) * (LOG2_E / steepness)

    acc = tl.zeros([ROWS, PADDED], tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    maximum = tl.full([ROWS], FLOOR, tl.float32)
    table = block_tables + row.to(tl.int64) * table_stride
    kv_end = position + count
    end = tl.cdiv(tl.maximum(kv_end, 0), TILE)
    # Tiles that every query attends to as a whole: those before the first query that begin in the last query's window.
    whole_begin = 0
    whole_end = tl.maximum(position + 1, 0) // TILE
    if HAS_WINDOW:
        begin = tl.maximum(position + 1 - window, 0) // TILE
        whole_begin = tl.minimum(tl.cdiv(tl.maximum(kv_end - window, 0), TILE), end)
        whole_end = tl.maximum(whole_begin, whole_end)
        acc, weight_sum, maximum = _attend_tiles(
            query,
            query_sum,
            k,
            v,
            k_ranges,
            v_ranges,
            table,
            acc,
            weight_sum,
            maximum,
            begin,
            whole_begin,
            kv_head,
            query_positions,
            kv_end,
            window,
            slopes,
            squeeze,
            steepness,
            NUM_KV_HEADS,
            D,
            PAGE,
            TILE,
            FORMAT,
            True,
            HAS_WINDOW,
            SOFTCAP,
            ALIBI,
        )
    acc, weight_sum, maximum = _attend_tiles(
        query,
        query_sum,
        k,
        v,
        k_ranges,
        v_ranges,
        table,
        acc,
        weight_sum,
        maximum,
        whole_begin,
        whole_end,
        kv_head,
        query_positions,
        kv_end,
        window,
        slopes,
        squeeze,
        steepness,
        NUM_KV_HEADS,
        D,
        PAGE,
        TILE,
        FORMAT,
        False,
        HAS_WINDOW,
        SOFTCAP,
        ALIBI,
    )
    acc, weight_sum, maximum = _attend_tiles(
        query,
        query_sum,
        k,
        v,
        k_ranges,
        v_ranges,
        table,
        acc,
        weight_sum,
        maximum,
        whole_end,
        end,
        kv_head,
        query_positions,
        kv_end,
        window,
        slopes,
        squeeze,
        steepness,
        NUM_KV_HEADS,
        D,
        PAGE,
        TILE,
        FORMAT,
        True,
        HAS_WINDOW,
        SOFTCAP,
        ALIBI,
    )
    factor = factor_of(weight_sum, maximum * steepness, sinks, query_heads, owned, SINKS, FORMAT)[:, None]
    into = out + (lines * OUT_STRIDE + query_heads * D)[:, None] + dims[None, :]
    tl.store(into, round_to(acc * factor, into.dtype.element_ty), mask=kept)


def paged_prefill_attention(
    q: Tensor,
    cache: KVCache,
    plan: PrefillTiles,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `asyncllm.kernels.attention.paged_prefill_attention`. q and out may have any stride between tokens."""
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    variant = variant_of(q, out, plan, softcap, sinks, alibi)
    # The grid has as many programs as there can be tiles; surplus ones exit at once.
    num_tiles = min(q.shape[0] // plan.tokens + plan.num_rows, plan.capacity)
    grid = (num_tiles, plan.shape.num_kv_heads, 1)
    configured = _configured(variant, plan.config)
    launch_attention(configured, grid, (plan.entries,), q, cache, plan, scale, softcap, sinks, alibi, out)
    return out


@functools.cache
def _configured(variant: Variant, config: PrefillConfig) -> Configured:
    return Configured(
        prefill_attention_kernel,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        # Fused products and sums only where they are written: masked and unmasked tiles have to round alike.
        fp_fusion=False,
        ROWS=config.rows,
        TILE=key_tile(variant.shape.block_size, config.tile),
        **variant.constexprs(),
    )
