"""Latent decode attention: one query per row, with the lines of all rows divided evenly over a fixed grid.

A block has a tile of query heads and reads each of its lines once: an operand of the product with the queries is,
transposed, also the first operand of the product with the weights. On Hopper, 16-bit lines of supported sizes use
`latent.hopper`; this kernel serves the others.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.latent import LatentKV
from asyncllm.kernels.triton.attention.plan import ENTRY, ENTRY_PAGE, HEADER, key_tile
from asyncllm.kernels.triton.attention.tile import FLOOR, LOG2_E, last_factor
from asyncllm.kernels.triton.language import dot, release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.latent.plan import (
    HopperDecodeConfig,
    LatentDecodeConfig,
    LatentDecodeWork,
    LatentShape,
    constexprs,
)
from asyncllm.kernels.triton.launch import Configured
from asyncllm.kernels.triton.page import page_entry, tile_start

__all__ = ["latent_decode_attention", "latent_decode_kernel"]


@triton.jit
def _store_merged(
    partials,
    target,
    first_block,
    num_parts,
    owned,
    RANK: tl.constexpr,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Merge the softmax states of the parts of one row and head tile, and store the result, CHUNK numbers of a head at
    a time.

    target [1, HEADS]: pointers to the heads' results. Other blocks wrote the parts during this kernel, so they are read
    from L2 (.cg)."""
    heads = tl.arange(0, HEADS)
    states = partials + 2 * tl.num_programs(0) * HEADS * RANK
    weight_sum = tl.zeros([HEADS], tl.float32)
    highest = tl.full([HEADS], FLOOR, tl.float32)
    for part in tl.range(0, num_parts, num_stages=1):
        entries = (2 * (first_block + part) + 1 - min(part, 1)) * HEADS + heads
        exponent = tl.load(states + entries * 2, cache_modifier=".cg")
        sums = tl.load(states + entries * 2 + 1, cache_modifier=".cg")
        above = tl.maximum(highest, exponent)
        weight_sum = weight_sum * tl.exp2(highest - above) + sums * tl.exp2(exponent - above)
        highest = above
    factor = last_factor(weight_sum, highest, partials, heads, owned, False)
    for first in tl.range(0, RANK, CHUNK, num_stages=1):
        ranks = first + tl.arange(0, CHUNK)
        inside = (ranks < RANK)[:, None]
        acc = tl.zeros([CHUNK, HEADS], tl.float32)
        for part in tl.range(0, num_parts, num_stages=1):
            entries = (2 * (first_block + part) + 1 - min(part, 1)) * HEADS + heads
            exponent = tl.load(states + entries * 2, cache_modifier=".cg")
            lines = partials + entries[None, :] * RANK + ranks[:, None]
            acc += tl.load(lines, mask=inside, other=0.0, cache_modifier=".cg") * tl.exp2(exponent - highest)[None, :]
        result = round_to(acc * factor[None, :], target.dtype.element_ty)
        tl.store(target + ranks[:, None], result, mask=inside & owned[None, :])


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["block_tables"])
def latent_decode_kernel(
    q_latent,
    q_rope,
    pages,
    block_tables,
    out,
    work,
    partials,
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
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """STRIDE and HEAD: strides of a token and of a head. Padded sizes end in BLOCK."""
    WIDTH: tl.constexpr = RANK + ROPE
    HEAD_TILES: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    block = tl.program_id(0)
    entry = work + HEADER + block * ENTRY
    row = tl.load(entry)
    head_tile = tl.load(entry + 1)
    tile = tl.load(entry + 2)
    left = tl.load(entry + 3)
    start = tl.load(entry + 4)
    per_head = tl.load(entry + 5)
    length = tl.load(entry + 7)
    page = tl.load(entry + ENTRY_PAGE)
    share = tl.load(work)

    heads = tl.arange(0, HEADS)
    ranks = tl.arange(0, RANK_BLOCK)
    ropes = tl.arange(0, ROPE_BLOCK)
    tokens = tl.arange(0, TILE)
    latent_offsets = tokens[:, None] * WIDTH + ranks[None, :]
    rope_offsets = tokens[:, None] * WIDTH + (RANK + ropes)[None, :]
    while left > 0:
        taken = tl.minimum(per_head - tile, left)
        begin = tile
        end = tl.minimum(begin + taken, tl.cdiv(length, TILE))
        # The next part, whose description is loaded ahead of its use.
        next_head = (head_tile + 1) % HEAD_TILES
        next_row = row + (next_head == 0).to(tl.int32)
        more = left > taken
        info = work + HEADER + (ENTRY + 1) * tl.num_programs(0) + next_row * 4
        next_start = tl.load(info, mask=more, other=0)
        next_per_head = tl.load(info + 1, mask=more, other=0)
        next_length = tl.load(info + 3, mask=more, other=0)

        query_heads = head_tile * HEADS + heads
        owned = query_heads < NUM_HEADS
        latent_lines = q_latent + row * LATENT_STRIDE + query_heads[None, :] * LATENT_HEAD
        rope_lines = q_rope + row * ROPE_STRIDE + query_heads[None, :] * ROPE_HEAD
        kept = owned[None, :] & (ranks < RANK)[:, None]
        latent = tl.load(latent_lines + ranks[:, None], mask=kept, other=0.0)
        rope = tl.load(rope_lines + ropes[:, None], mask=owned[None, :] & (ropes < ROPE)[:, None], other=0.0)

        acc = tl.zeros([RANK_BLOCK, HEADS], tl.float32)
        weight_sum = tl.zeros([HEADS], tl.float32)
        maximum = tl.full([HEADS], FLOOR, tl.float32)
        table = block_tables + row.to(tl.int64) * table_stride
        # The block id of a tile is loaded one iteration ahead: only then can the loads of lines run ahead as well.
        for index in range(begin, end):
            first_key = index * TILE
            base = tile_start(page, first_key, 0, 1, PAGE, WIDTH)
            page = tl.load(page_entry(table, tl.minimum(index + 1, end - 1), TILE, PAGE))
            there = first_key + tokens < length
            # Lines beyond the row's end may be NaN, and 0 times NaN is NaN, so they are replaced, not just weighted 0.
            inside = there[:, None] if RANK_BLOCK == RANK else there[:, None] & (ranks < RANK)[None, :]
            lines = tl.load(pages + base + latent_offsets, mask=inside, other=0.0)
            inside = there[:, None] if ROPE_BLOCK == ROPE else there[:, None] & (ropes < ROPE)[None, :]
            turned = tl.load(pages + base + rope_offsets, mask=inside, other=0.0)
            raw = dot(turned, rope, dot(lines, latent, tl.zeros([TILE, HEADS], tl.float32)))
            raw = tl.where(there[:, None], raw, -float("inf"))
            new_maximum = tl.maximum(maximum, tl.max(raw, 0))
            weights = tl.exp2((raw - new_maximum[None, :]) * steepness)
            fade = tl.exp2((maximum - new_maximum) * steepness)
            weight_sum = weight_sum * fade + tl.sum(weights, 0)
            acc = dot(tl.trans(lines), round_to(weights, lines.dtype), acc * fade[None, :])
            maximum = new_maximum
        exponent = maximum * steepness
        next_table = block_tables + next_row.to(tl.int64) * table_stride
        page = tl.load(next_table, mask=more & (next_length > 0), other=0)

        place = start + head_tile * per_head
        first_block = place // share
        num_tiles = tl.maximum(tl.cdiv(length, TILE), 1)
        num_parts = (place + num_tiles - 1) // share - first_block + 1
        target = out + row.to(tl.int64) * OUT_STRIDE + query_heads[None, :] * RANK
        if num_parts == 1:
            factor = last_factor(weight_sum, exponent, partials, query_heads, owned, False)
            tl.store(target + ranks[:, None], round_to(acc * factor[None, :], out.dtype.element_ty), mask=kept)
        else:
            # A block has at most one part that starts its row and head tile, and at most one that does not.
            entries = (2 * block + (tile == 0).to(tl.int32)) * HEADS + heads
            tl.store(partials + entries[None, :] * RANK + ranks[:, None], acc, mask=(ranks < RANK)[:, None])
            states = partials + 2 * tl.num_programs(0) * HEADS * RANK + entries * 2
            tl.store(states, exponent)
            tl.store(states + 1, weight_sum)
            # All threads of the block have stored their share before one of them draws the ticket.
            tl.debug_barrier()
            counter = work + HEADER + ENTRY * tl.num_programs(0) + first_block
            ticket = tl.atomic_add(counter, 1, sem="acq_rel")
            if ticket == num_parts - 1:
                _store_merged(partials, target, first_block, num_parts, owned, RANK, HEADS, CHUNK)
                # The next layer finds the counter as this one did.
                tl.store(counter, 0)

        left -= taken
        tile = 0
        head_tile = next_head
        row = next_row
        start = next_start
        per_head = next_per_head
        length = next_length


def latent_decode_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: LatentKV,
    plan: LatentDecodeWork,
    *,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """See `asyncllm.kernels.latent.latent_decode_attention`. `out` has any stride between tokens."""
    if out is None:
        out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
    if isinstance(plan.config, HopperDecodeConfig):
        from asyncllm.kernels.triton.latent.hopper import latent_decode_hopper

        latent_decode_hopper(q_latent, q_rope, cache, plan, plan.config, scale=scale, out=out)
        return out
    strides = (*q_latent.stride()[:2], *q_rope.stride()[:2], out.stride(0))
    tensors = (q_latent, q_rope, cache.pages, plan.block_tables, out, plan.work, plan.partials)
    _configured(plan.shape, strides, plan.config)((plan.grid, 1, 1), tensors, (scale * LOG2_E.value, plan.table_stride))
    return out


@functools.cache
def _configured(shape: LatentShape, strides: tuple[int, ...], config: LatentDecodeConfig) -> Configured:
    return Configured(
        latent_decode_kernel,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **constexprs(shape, strides),
        HEADS=config.heads,
        TILE=key_tile(shape.block_size, config.tile),
        CHUNK=min(64, max(16, triton.next_power_of_2(shape.rank))),
    )
