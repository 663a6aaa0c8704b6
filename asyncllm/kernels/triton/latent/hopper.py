"""Latent decode attention for Hopper, in Gluon: `latent.decode` with lines copied by TMA.

`latent_decode_kernel` is bound by the time of a tile's products. Here a tile has 64 lines, so that both products are
wgmma with lines in shared memory as their first operand: the scores of 64 keys and, transposed, the sums of weighted
latents. One warp (the producer) iterates over the block's tiles, looks up their positions in the cache, and keeps a
ring of STAGES tiles full; the other four (the consumer) multiply. Neither waits for the other at the end of a row.

Barriers, one pair per stage, each with a phase bit that flips when it completes: `full` when the copies have brought a
tile, `empty` when the consumer has read it.

A row's last tile may have fewer keys. The lines after them in the cache may be NaN, and 0 times NaN is NaN. The copy
therefore starts early enough that the last key is the tile's last line. Before the beginning of a cache block TMA pads
with zeros, and otherwise the earlier lines belong to the previous tile. A tile's keys are thus always its last lines.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from asyncllm.kernels.latent import LatentKV
from asyncllm.kernels.triton.attention.plan import ENTRY, ENTRY_PAGE, HEADER
from asyncllm.kernels.triton.attention.tile import FLOOR, LOG2_E
from asyncllm.kernels.triton.language import release_consumers, wait_for_producers
from asyncllm.kernels.triton.latent.plan import HopperDecodeConfig, LatentDecodeWork, LatentShape
from asyncllm.kernels.triton.launch import Configured, TensorMap
from asyncllm.kernels.triton.linear.hopper import next_stage, synchronize

__all__ = ["HOPPER_LINES", "compile_options", "hopper_decode_kernel", "latent_decode_hopper"]

HOPPER_LINES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
"""Layout of a tile in shared memory, as one of a batch."""

STAGES = 2
"""Number of tiles in the ring, as many as fit shared memory at rank 512."""


@gluon.jit
def _first_segment(work):
    """Return the block's entry of the plan: row, head tile, tile and number of remaining tiles, and the row's start,
    tiles per head and length."""
    entry = work + HEADER + gl.program_id(0) * ENTRY
    return (
        gl.load(entry),
        gl.load(entry + 1),
        gl.load(entry + 2),
        gl.load(entry + 3),
        gl.load(entry + 4),
        gl.load(entry + 5),
        gl.load(entry + 7),
    )


@gluon.jit
def _next_segment(work, row, head_tile, start, per_head, length, HEAD_TILES: gl.constexpr, more):
    """Return the next row and head tile, and the row's start in the list of all tiles, tiles per head and length."""
    head_tile += 1
    wrapped = head_tile == HEAD_TILES
    row = gl.where(wrapped, row + 1, row)
    head_tile = gl.where(wrapped, 0, head_tile)
    info = work + HEADER + (ENTRY + 1) * gl.num_programs(0) + row * 4
    if more & wrapped:
        start = gl.load(info)
        per_head = gl.load(info + 1)
        length = gl.load(info + 3)
    return row, head_tile, start, per_head, length


@gluon.jit
def _produce(
    work_ptr, pages, turned, block_tables, lines, ropes, full, empty, table_stride,
    RANK: gl.constexpr, PAGE: gl.constexpr, HEAD_TILES: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = full.shape[0]
    TILE: gl.constexpr = lines.shape[2]
    BYTES: gl.constexpr = TILE * (lines.shape[3] + ropes.shape[3]) * 2
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    row, head_tile, tile, left, start, per_head, length = _first_segment(work_ptr)
    page = gl.load(work_ptr + HEADER + gl.program_id(0) * ENTRY + ENTRY_PAGE)
    stage = 0
    phase = 0
    while left > 0:
        taken = min(per_head - tile, left)
        end = min(tile + taken, (length + TILE - 1) // TILE)
        table = block_tables + row.to(gl.int64) * table_stride
        for index in range(tile, end):
            first = index * TILE
            # A tile's keys are its last lines.
            line = first % PAGE + min(length - first, TILE) - TILE
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), BYTES)
            tma.async_copy_global_to_shared(pages, [page, line, 0], full.index(stage), lines.index(stage))
            tma.async_copy_global_to_shared(turned, [page, line, RANK], full.index(stage), ropes.index(stage))
            page = gl.load(table + min(index + 1, end - 1) * TILE // PAGE)
            stage, phase = next_stage(stage, phase, STAGES)
        left -= taken
        tile = 0
        row, head_tile, start, per_head, length = _next_segment(
            work_ptr, row, head_tile, start, per_head, length, HEAD_TILES, left > 0
        )
        if (left > 0) & (length > 0):
            page = gl.load(block_tables + row.to(gl.int64) * table_stride)


@gluon.jit
def _consume(
    work_ptr, q_latent, q_rope, out, partials, lines, ropes, latent, rope, weights_memory, full, empty, steepness,
    LATENT_STRIDE: gl.constexpr, LATENT_HEAD: gl.constexpr, ROPE_STRIDE: gl.constexpr, ROPE_HEAD: gl.constexpr,
    OUT_STRIDE: gl.constexpr, NUM_HEADS: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = lines.dtype
    STAGES: gl.constexpr = full.shape[0]
    TILE: gl.constexpr = lines.shape[1]
    RANK: gl.constexpr = lines.shape[2]
    ROPE: gl.constexpr = ropes.shape[2]
    HEADS: gl.constexpr = latent.shape[0]
    HEAD_TILES: gl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    KEYS: gl.constexpr = gl.SliceLayout(1, ACC)
    BY_HEAD: gl.constexpr = gl.SliceLayout(0, ACC)
    # A thread has eight features of one head.
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    STORED: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [4, 1], [0, 1])
    wait_for_producers(USE_PDL)
    block = gl.program_id(0)
    row, head_tile, tile, left, start, per_head, length = _first_segment(work_ptr)
    share = gl.load(work_ptr)
    line = gl.arange(0, TILE, layout=KEYS)
    loaded_heads = gl.arange(0, HEADS, layout=gl.SliceLayout(1, LOADED))
    loaded_ranks = gl.arange(0, RANK, layout=gl.SliceLayout(0, LOADED))
    loaded_ropes = gl.arange(0, ROPE, layout=gl.SliceLayout(0, LOADED))
    part_place = gl.arange(0, RANK, layout=KEYS)[:, None] * HEADS + gl.arange(0, HEADS, layout=BY_HEAD)[None, :]
    heads = gl.arange(0, HEADS, layout=BY_HEAD)
    states = partials + 2 * gl.num_programs(0) * HEADS * RANK
    stage = 0
    phase = 0
    while left > 0:
        taken = min(per_head - tile, left)
        end = min(tile + taken, (length + TILE - 1) // TILE)
        query_heads = head_tile * HEADS + loaded_heads
        owned = (query_heads < NUM_HEADS)[:, None]
        latent_lines = q_latent + row.to(gl.int64) * LATENT_STRIDE
        rope_lines = q_rope + row.to(gl.int64) * ROPE_STRIDE
        own_latent = gl.load(
            latent_lines + query_heads[:, None] * LATENT_HEAD + loaded_ranks[None, :], mask=owned, other=0.0
        )
        own_rope = gl.load(rope_lines + query_heads[:, None] * ROPE_HEAD + loaded_ropes[None, :], mask=owned, other=0.0)
        latent.store(own_latent)
        rope.store(own_rope)
        fence_async_shared()
        synchronize()

        acc = gl.zeros([RANK, HEADS], gl.float32, ACC)
        sums = gl.zeros([TILE, HEADS], gl.float32, ACC)
        maximum = gl.full([HEADS], FLOOR, gl.float32, BY_HEAD)
        for index in range(tile, end):
            mbarrier.wait(full.index(stage), phase)
            raw = gl.zeros([TILE, HEADS], gl.float32, ACC)
            raw = warpgroup_mma(lines.index(stage), latent.permute((1, 0)), raw, use_acc=False, is_async=True)
            raw = warpgroup_mma(ropes.index(stage), rope.permute((1, 0)), raw, is_async=True)
            raw = warpgroup_mma_wait(0, deps=(raw,))
            there = line >= TILE - (length - index * TILE)
            raw = gl.where(there[:, None], raw, -float("inf"))
            new_maximum = gl.maximum(maximum, gl.max(raw, 0))
            weights = gl.exp2((raw - new_maximum[None, :]) * steepness)
            fade = gl.exp2((maximum - new_maximum) * steepness)
            maximum = new_maximum
            sums = sums * fade[None, :] + weights
            weights_memory.store(weights.to(dtype))
            fence_async_shared()
            synchronize()
            acc = acc * fade[None, :]
            acc = warpgroup_mma(lines.index(stage).permute((1, 0)), weights_memory, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            # All warps must have read the stage and the weights.
            synchronize()
            mbarrier.arrive(empty.index(stage), count=1)
            stage, phase = next_stage(stage, phase, STAGES)
        exponent = maximum * steepness
        weight_sum = gl.sum(sums, 0)

        place = start + head_tile * per_head
        first_block = place // share
        num_tiles = max((length + TILE - 1) // TILE, 1)
        num_parts = (place + num_tiles - 1) // share - first_block + 1
        finished = num_parts == 1
        if num_parts > 1:
            # A block has at most one part that starts its row and head tile, and at most one that does not.
            part = (2 * block + 1 - min(tile, 1)) * HEADS
            gl.store(partials + part * RANK + part_place, acc)
            gl.store(states + (part + heads) * 2, exponent)
            gl.store(states + (part + heads) * 2 + 1, weight_sum)
            # All threads of the block must have stored their share before one of them draws the ticket.
            synchronize()
            counter = work_ptr + HEADER + ENTRY * gl.num_programs(0) + first_block
            ticket = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            synchronize()
            if ticket == num_parts - 1:
                finished = ticket == num_parts - 1
                # Other blocks wrote the parts during this kernel, so they are read from L2 (.cg).
                acc = gl.zeros([RANK, HEADS], gl.float32, ACC)
                weight_sum = gl.zeros([HEADS], gl.float32, BY_HEAD)
                exponent = gl.full([HEADS], FLOOR, gl.float32, BY_HEAD)
                for each in range(num_parts):
                    part = (2 * (first_block + each) + 1 - min(each, 1)) * HEADS
                    theirs = gl.load(partials + part * RANK + part_place, cache_modifier=".cg")
                    their_exponent = gl.load(states + (part + heads) * 2, cache_modifier=".cg")
                    their_sum = gl.load(states + (part + heads) * 2 + 1, cache_modifier=".cg")
                    above = gl.maximum(exponent, their_exponent)
                    fade = gl.exp2(exponent - above)
                    grow = gl.exp2(their_exponent - above)
                    acc = acc * fade[None, :] + theirs * grow[None, :]
                    weight_sum = weight_sum * fade + their_sum * grow
                    exponent = above
                # Reset the counter for the next layer.
                gl.store(counter, 0)
        if finished:
            factor = 1.0 / gl.where(weight_sum == 0.0, 1.0, weight_sum)
            result = gl.convert_layout((acc * factor[None, :]).to(dtype), STORED)
            head = head_tile * HEADS + gl.arange(0, HEADS, layout=gl.SliceLayout(0, STORED))
            rank = gl.arange(0, RANK, layout=gl.SliceLayout(1, STORED))
            target = out + row.to(gl.int64) * OUT_STRIDE
            gl.store(target + head[None, :] * RANK + rank[:, None], result, mask=(head < NUM_HEADS)[None, :])

        left -= taken
        tile = 0
        row, head_tile, start, per_head, length = _next_segment(
            work_ptr, row, head_tile, start, per_head, length, HEAD_TILES, left > 0
        )


@gluon.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["block_tables"])
def hopper_decode_kernel(
    pages, turned, q_latent, q_rope, block_tables, out, work_ptr, partials, steepness, table_stride,
    LATENT_STRIDE: gl.constexpr, LATENT_HEAD: gl.constexpr, ROPE_STRIDE: gl.constexpr, ROPE_HEAD: gl.constexpr,
    OUT_STRIDE: gl.constexpr, NUM_HEADS: gl.constexpr, HEADS: gl.constexpr, PAGE: gl.constexpr,
    STAGES: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """pages and turned are tensor descriptors of the cache [blocks, PAGE, RANK + ROPE], in tiles of [1, 64, RANK] and
    [1, 64, ROPE]. STRIDE and HEAD: strides of a token and of a head. partials: float32, two parts [RANK, HEADS] for
    each block, then their states [2]."""
    dtype: gl.constexpr = pages.dtype
    TILE: gl.constexpr = pages.block_type.shape[1]
    RANK: gl.constexpr = pages.block_type.shape[2]
    ROPE: gl.constexpr = turned.block_type.shape[2]
    HEAD_TILES: gl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    LINES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    copied_lines = gl.allocate_shared_memory(dtype, [STAGES, 1, TILE, RANK], pages.layout)
    copied_ropes = gl.allocate_shared_memory(dtype, [STAGES, 1, TILE, ROPE], turned.layout)
    lines = copied_lines._reinterpret(dtype, [STAGES, TILE, RANK], LINES)
    ropes = copied_ropes._reinterpret(dtype, [STAGES, TILE, ROPE], LINES)
    latent = gl.allocate_shared_memory(dtype, [HEADS, RANK], LINES)
    rope = gl.allocate_shared_memory(dtype, [HEADS, ROPE], LINES)
    weights_memory = gl.allocate_shared_memory(dtype, [TILE, HEADS], gl.NVMMASharedLayout(2 * HEADS, 16, 2))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    synchronize()
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    work_ptr, q_latent, q_rope, out, partials, lines, ropes, latent, rope, weights_memory, full, empty,
                    steepness, LATENT_STRIDE, LATENT_HEAD, ROPE_STRIDE, ROPE_HEAD, OUT_STRIDE, NUM_HEADS, USE_PDL,
                ),
            ),
            (
                _produce,
                (
                    work_ptr, pages, turned, block_tables, copied_lines, copied_ropes, full, empty, table_stride, RANK,
                    PAGE, HEAD_TILES, USE_PDL,
                ),
            ),
        ],
        [1],
        [56],
    )  # fmt: skip


def compile_options(shape: LatentShape, strides: tuple[int, ...], heads: int) -> dict[str, Any]:
    """Return the constexprs (except USE_PDL) and launch options."""
    names = ("LATENT_STRIDE", "LATENT_HEAD", "ROPE_STRIDE", "ROPE_HEAD", "OUT_STRIDE")
    return {
        **dict(zip(names, strides, strict=True)),
        "NUM_HEADS": shape.num_heads,
        "HEADS": heads,
        "PAGE": shape.block_size,
        "STAGES": STAGES,
        "num_warps": 4,
        "maxnreg": 232,
    }


def latent_decode_hopper(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: LatentKV,
    plan: LatentDecodeWork,
    config: HopperDecodeConfig,
    *,
    scale: float,
    out: Tensor,
) -> None:
    """See `asyncllm.kernels.latent.latent_decode_attention`, of a plan with this config. `out` has any stride between
    tokens."""
    shape = plan.shape
    strides = (*q_latent.stride()[:2], *q_rope.stride()[:2], out.stride(0))
    maps = (
        TensorMap(cache.pages, (1, config.tile, shape.rank), HOPPER_LINES),
        TensorMap(cache.pages, (1, config.tile, shape.rope), HOPPER_LINES),
    )
    tensors = (q_latent, q_rope, plan.block_tables, out, plan.work, plan.partials)
    kernel = _configured(shape, strides, config.heads)
    kernel((plan.grid, 1, 1), tensors, (scale * LOG2_E.value, plan.table_stride), maps)


@functools.cache
def _configured(shape: LatentShape, strides: tuple[int, ...], heads: int) -> Configured:
    return Configured(hopper_decode_kernel, **compile_options(shape, strides, heads))
