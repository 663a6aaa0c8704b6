"""Decode attention: one query per row, with the keys of all rows divided evenly over a fixed grid."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.cache import KVCache
from asyncllm.kernels.triton.attention.launch import Variant, launch_attention, variant_of
from asyncllm.kernels.triton.attention.plan import (
    ENTRY,
    ENTRY_PAGE,
    HEADER,
    DecodeConfig,
    DecodeWork,
    key_tile,
    padded_head_dim,
)
from asyncllm.kernels.triton.attention.quantized import attend_quantized_keys, factor_of, join_pairs, load_query_pairs
from asyncllm.kernels.triton.attention.tile import FLOOR, LOG2_E, attend_keys
from asyncllm.kernels.triton.language import release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.launch import Configured
from asyncllm.kernels.triton.page import page_entry, tile_start

__all__ = ["decode_attention_kernel", "paged_decode_attention"]


@triton.jit
def _merge(
    partials,
    first_block,
    num_parts,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Return the parts of one row and KV head, first to last, PARTS at a time, as one softmax state: acc [P, G], sums
    [G].

    Other blocks wrote them during this kernel, so they are read from L2 (.cg)."""
    parts = tl.arange(0, PARTS)
    heads = tl.arange(0, GROUP_BLOCK)
    dims = tl.arange(0, PADDED)
    acc = tl.zeros([PADDED, GROUP_BLOCK], tl.float32)
    weight_sum = tl.zeros([GROUP_BLOCK], tl.float32)
    exponent = tl.full([GROUP_BLOCK], FLOOR, tl.float32)
    for first in tl.range(0, num_parts, PARTS, num_stages=1):
        part = first + parts
        partial = (2 * (first_block + part) + (part == 0).to(tl.int32))[:, None] * GROUP + heads[None, :]
        there = (part < num_parts)[:, None] & (heads < GROUP)[None, :]
        states = partials + 2 * tl.num_programs(0) * GROUP * D + partial * 2
        exponents = tl.load(states, mask=there, other=FLOOR, cache_modifier=".cg")
        sums = tl.load(states + 1, mask=there, other=0.0, cache_modifier=".cg")
        values = tl.load(
            partials + partial[:, None, :] * D + dims[None, :, None],
            mask=there[:, None, :] & (dims < D)[None, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        highest = tl.maximum(exponent, tl.max(exponents, 0))
        fade = tl.exp2(exponent - highest)
        shares = tl.exp2(exponents - highest[None, :])
        weight_sum = weight_sum * fade + tl.sum(sums * shares, 0)
        acc = acc * fade[None, :] + tl.sum(values * shares[:, None, :], 0)
        exponent = highest
    return acc, weight_sum, exponent


@triton.jit(do_not_specialize=["window", "table_stride"], do_not_specialize_on_alignment=["block_tables"])
def decode_attention_kernel(
    q,
    k,
    v,
    k_ranges,
    v_ranges,
    block_tables,
    out,
    sinks,
    alibi,
    work,
    partials,
    squeeze,
    steepness,
    window,
    table_stride,
    Q_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """FORMAT: the format of a quantized cache, for which k_ranges and v_ranges are read, or empty. PADDED is D
    padded."""
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    block = tl.program_id(0)
    entry = work + HEADER + block * ENTRY
    row = tl.load(entry)
    kv_head = tl.load(entry + 1)
    tile = tl.load(entry + 2)
    left = tl.load(entry + 3)
    start = tl.load(entry + 4)
    per_head = tl.load(entry + 5)
    first_tile = tl.load(entry + 6)
    length = tl.load(entry + 7)
    page = tl.load(entry + ENTRY_PAGE)
    share = tl.load(work)

    heads = tl.arange(0, HEADS)
    dims = tl.arange(0, PADDED)
    tokens = tl.arange(0, TILE)
    if FORMAT == "":
        key_offsets = tokens[:, None] * D + dims[None, :]
        value_offsets = tokens[None, :] * D + dims[:, None]
    else:
        pairs = tl.arange(0, PADDED // 2)
        key_offsets = tokens[:, None] * (D // 2) + pairs[None, :]
        value_offsets = tokens[None, :] * (D // 2) + pairs[:, None]
        k = k.to(tl.pointer_type(tl.int16), bitcast=True)
        v = v.to(tl.pointer_type(tl.int16), bitcast=True)
    while left > 0:
        taken = tl.minimum(per_head - tile, left)
        begin = first_tile + tile
        end = tl.minimum(begin + taken, tl.cdiv(length, TILE))
        # The next part, whose description is loaded ahead of its use.
        next_head = (kv_head + 1) % NUM_KV_HEADS
        next_row = row + (next_head == 0).to(tl.int32)
        more = left > taken
        info = work + HEADER + (ENTRY + 1) * tl.num_programs(0) + next_row * 4
        next_start = tl.load(info, mask=more, other=0)
        next_per_head = tl.load(info + 1, mask=more, other=0)
        next_first_tile = tl.load(info + 2, mask=more, other=0)
        next_length = tl.load(info + 3, mask=more, other=0)

        query_heads = kv_head * GROUP + heads
        grouped = heads < GROUP
        kept = grouped[None, :] & (dims < D)[:, None]
        # A decode step has few rows: 32 bits suffice, and with 64 the kernel spills registers at head_dim 80.
        lines = q + row * Q_STRIDE + query_heads[None, :] * D
        if FORMAT == "":
            query = tl.load(lines + dims[:, None], mask=kept, other=0.0)
        else:
            asked = grouped[None, :] & (pairs < D // 2)[:, None]
            first_query, second_query, query_sum = load_query_pairs(lines + 2 * pairs[:, None], asked)
        slopes = tl.zeros([HEADS], tl.float32)
        if ALIBI:
            slopes = tl.load(alibi + query_heads, mask=grouped, other=0.0) * (LOG2_E / steepness)

        if FORMAT == "":
            acc = tl.zeros([PADDED, HEADS], tl.float32)
        else:
            first_acc = tl.zeros([PADDED // 2, HEADS], tl.float32)
            second_acc = first_acc
        weight_sum = tl.zeros([HEADS], tl.float32)
        maximum = tl.full([HEADS], FLOOR, tl.float32)
        table = block_tables + row.to(tl.int64) * table_stride
        # The block id of a tile is loaded one iteration ahead: only then can the loads of K and V run ahead as well.
        for index in range(begin, end):
            first_key = index * TILE
            block_id = page
            base = tile_start(page, first_key, kv_head, NUM_KV_HEADS, PAGE, D if FORMAT == "" else D // 2)
            page = tl.load(page_entry(table, tl.minimum(index + 1, end - 1), TILE, PAGE))
            if FORMAT == "":
                acc, weight_sum, maximum = attend_keys(
                    query,
                    k + base + key_offsets,
                    v + base + value_offsets,
                    acc,
                    weight_sum,
                    maximum,
                    first_key + tokens,
                    length,
                    window,
                    slopes,
                    squeeze,
                    steepness,
                    D,
                    HAS_WINDOW,
                    SOFTCAP,
                    ALIBI,
                )
            else:
                ranges = tile_start(block_id, first_key, kv_head, NUM_KV_HEADS, PAGE, 1) + tokens
                first_acc, second_acc, weight_sum, maximum = attend_quantized_keys(
                    first_query, second_query, query_sum, k + base + key_offsets, v + base + value_offsets,
                    k_ranges + ranges, v_ranges + ranges, first_acc, second_acc, weight_sum, maximum,
                    first_key + tokens, length, window, slopes, squeeze, steepness,
                    D, FORMAT, HAS_WINDOW, SOFTCAP, ALIBI,
                )  # fmt: skip
        if FORMAT != "":
            acc = join_pairs(first_acc, second_acc)
        exponent = maximum * steepness
        next_table = block_tables + next_row.to(tl.int64) * table_stride
        page = tl.load(page_entry(next_table, next_first_tile, TILE, PAGE), mask=more & (next_length > 0), other=0)

        place = start + kv_head * per_head
        first_block = place // share
        num_tiles = tl.maximum(tl.cdiv(length, TILE) - first_tile, 1)
        num_parts = (place + num_tiles - 1) // share - first_block + 1
        target = out + row.to(tl.int64) * OUT_STRIDE + kv_head * (GROUP * D)
        if num_parts == 1:
            factor = factor_of(weight_sum, exponent, sinks, query_heads, grouped, SINKS, FORMAT)[None, :]
            into = target + heads[None, :] * D + dims[:, None]
            tl.store(into, round_to(acc * factor, into.dtype.element_ty), mask=kept)
        else:
            # A block has at most one part that starts its row and head, and at most one that does not.
            partial = (2 * block + (tile == 0).to(tl.int32)) * GROUP + heads
            tl.store(partials + partial[None, :] * D + dims[:, None], acc, mask=kept)
            states = partials + 2 * tl.num_programs(0) * GROUP * D + partial * 2
            tl.store(states, exponent, mask=grouped)
            tl.store(states + 1, weight_sum, mask=grouped)
            # All threads of the block must have stored their share before one of them draws the ticket.
            tl.debug_barrier()
            counter = work + HEADER + ENTRY * tl.num_programs(0) + first_block
            ticket = tl.atomic_add(counter, 1, sem="acq_rel")
            if ticket == num_parts - 1:
                merged, merged_sum, merged_exponent = _merge(
                    partials, first_block, num_parts, GROUP, GROUP_BLOCK, D, PADDED, PARTS
                )
                own = tl.arange(0, GROUP_BLOCK)
                owned = own < GROUP
                own_heads = kv_head * GROUP + own
                factor = factor_of(merged_sum, merged_exponent, sinks, own_heads, owned, SINKS, FORMAT)
                result = round_to(merged * factor[None, :], out.dtype.element_ty)
                inside = owned[None, :] & (dims < D)[:, None]
                tl.store(target + own[None, :] * D + dims[:, None], result, mask=inside)
                # Reset the counter for the next layer.
                tl.store(counter, 0)

        left -= taken
        tile = 0
        kv_head = next_head
        row = next_row
        start = next_start
        per_head = next_per_head
        first_tile = next_first_tile
        length = next_length


def paged_decode_attention(
    q: Tensor,
    cache: KVCache,
    plan: DecodeWork,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `asyncllm.kernels.attention.paged_decode_attention`. q and out may have any stride between tokens."""
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    configured = _configured(variant_of(q, out, plan, softcap, sinks, alibi), plan.config)
    own = (plan.work, plan.partials)
    launch_attention(configured, (plan.grid, 1, 1), own, q, cache, plan, scale, softcap, sinks, alibi, out)
    return out


@functools.cache
def _configured(variant: Variant, config: DecodeConfig) -> Configured:
    shape = variant.shape
    group_block = triton.next_power_of_2(shape.group)
    heads = max(8, group_block)
    return Configured(
        decode_attention_kernel,
        # A warp's registers hold the sums of 16 heads.
        num_warps=max(config.num_warps, heads // 16),
        num_stages=config.num_stages,
        GROUP_BLOCK=group_block,
        HEADS=heads,
        TILE=key_tile(shape.block_size, config.tile),
        PARTS=max(1, 4096 // (padded_head_dim(shape.head_dim) * group_block)),
        **variant.constexprs(),
    )
