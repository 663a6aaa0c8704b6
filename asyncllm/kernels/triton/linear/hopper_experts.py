"""Experts of many tokens for Hopper, in Gluon: both products of the gated MLPs at the speed of a dense layer's.

`arrange_kernel` copies the tokens of each expert next to each other, in blocks of BLOCK places, once for each of a
token's experts. Everything that a tile of the products reads and stores is then contiguous, as TMA requires. The sum
over a token's experts finds its rows by their places.

`experts_kernel` is `hopper.product_kernel` without shares, with rows of the weight that depend on the block's expert.
It has the same producer, two consumers, ring and barriers. A tile is 128 places by 256 rows of a weight: 128 of the
gate and the corresponding 128 of up, or 256 adjacent ones, whose results are stored in two halves, since there is room
for one. All warps skip a block of places without an expert.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from asyncllm.kernels.moe import GATE_SLOPE
from asyncllm.kernels.triton.language import release_consumers, wait_for_producers
from asyncllm.kernels.triton.launch import Configured, TensorMap, launch
from asyncllm.kernels.triton.linear.hopper import (
    CONSUMER_TOKENS,
    LINES,
    STEP,
    WIDTH,
    biased,
    gated_results,
    multiply_steps,
    next_stage,
    processors,
    store_tile,
    synchronize,
    tile_place,
)

__all__ = [
    "BLOCK",
    "BLOCKS_TOGETHER",
    "COPY_TILE",
    "CopyTile",
    "arrange",
    "arrange_kernel",
    "compile_options",
    "experts_kernel",
    "products",
]

BLOCK = 128
"""Number of places of a tile, all of one expert."""

BLOCKS_TOGETHER = 4
"""Number of blocks whose tiles are consecutive for the same rows of weights, so that these come from the L2 cache. With
4, 8 and 16, both products of 8,192 tokens take 1,046, 1,069 and 1,037 us for Qwen3-30B-A3B, 1,455, 1,465 and 1,475 for
DeepSeek-V2-Lite, and 8.7, 9.2 and 9.3 ms for Mixtral-8x7B."""


class CopyTile(NamedTuple):
    """A program of `arrange_kernel`: its number of places, and how many numbers of each it copies at a time."""

    places: int
    numbers: int
    warps: int


COPY_TILE = CopyTile(8, 2048, 8)
"""8,192 tokens of 2,048 numbers take 135 us with 8 experts each and 105 with 6. No other of seven tiles is faster."""


@triton.jit(do_not_specialize=["num_assignments"])
def arrange_kernel(
    x_ptr, assignments_ptr, block_experts_ptr, y_ptr, places_ptr, num_assignments,
    TOP_K: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PLACES: tl.constexpr, TILE: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Copy the row of x [*, COLUMNS] of each place's token to y [blocks * BLOCK, COLUMNS], and its place to places
    [num_assignments]. A program has PLACES of a block. Places without an assignment are not written."""
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    column = tl.arange(0, TILE)[None, :]
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    if tl.load(block_experts_ptr + tl.program_id(0) * PLACES // BLOCK) < 0:
        return
    assignment = tl.load(assignments_ptr + place)
    is_filled = assignment < num_assignments
    tl.store(places_ptr + assignment, place, mask=is_filled)
    x_rows = x_ptr + (assignment // TOP_K).to(tl.int64)[:, None] * COLUMNS
    y_rows = y_ptr + place.to(tl.int64)[:, None] * COLUMNS
    for start in range(0, COLUMNS, TILE):
        exists = is_filled[:, None] & (column < COLUMNS - start)
        tl.store(y_rows + start + column, tl.load(x_rows + start + column, mask=exists), mask=exists)


@gluon.jit
def _produce(work, BYTES: gl.constexpr, GROUP: gl.constexpr, GATED: gl.constexpr, USE_PDL: gl.constexpr):
    x, weight, experts_ptr, tokens, halves, full, empty, blocks, column_tiles, steps, out_size = work
    STAGES: gl.constexpr = full.shape[0]
    TOKENS: gl.constexpr = tokens.shape[1]
    K: gl.constexpr = tokens.shape[2]
    WIDTH: gl.constexpr = halves.shape[1]
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), blocks * column_tiles, gl.num_programs(0)):
        block, column_tile = tile_place(tile, blocks, column_tiles, GROUP)
        expert = gl.load(experts_ptr + block)
        if GATED:
            first = expert * 2 * out_size + column_tile * WIDTH
            second = first + out_size
        else:
            first = expert * out_size + column_tile * 2 * WIDTH
            second = first + WIDTH
        for step in range(0, gl.where(expert >= 0, steps, 0)):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), BYTES)
            tma.async_copy_global_to_shared(weight, [first, step * K], full.index(stage), halves.index(2 * stage))
            tma.async_copy_global_to_shared(weight, [second, step * K], full.index(stage), halves.index(2 * stage + 1))
            tma.async_copy_global_to_shared(x, [block * TOKENS, step * K], full.index(stage), tokens.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _limited_results(gate, up, dtype: gl.constexpr, LIMIT: gl.constexpr, SLOPE: gl.constexpr):
    """Return what `activation.apply_limited_gate` returns for a limit above 0, rounded to `dtype`."""
    gate = gl.minimum(gate.to(dtype).to(gl.float32), LIMIT)
    up = gl.minimum(gl.maximum(up.to(dtype).to(gl.float32), -LIMIT), LIMIT)
    return ((up + 1.0) * gate / (1.0 + gl.exp(-(gate * SLOPE)))).to(dtype)


@gluon.jit
def _consume(
    work, CONSUMER: gl.constexpr, GROUP: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr, LIMIT: gl.constexpr,
    SLOPE: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    out, experts_ptr, bias_ptr, tokens, weights, all_results, full, empty, blocks, column_tiles, steps, out_size = work
    CONSUMERS: gl.constexpr = tokens.shape[0] // full.shape[0]
    ROWS: gl.constexpr = tokens.shape[1]
    WIDTH: gl.constexpr = all_results.shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * WIDTH, 16])
    results = all_results.index(CONSUMER)
    wait_for_producers(USE_PDL)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), blocks * column_tiles, gl.num_programs(0)):
        block, column_tile = tile_place(tile, blocks, column_tiles, GROUP)
        expert = gl.load(experts_ptr + block)
        if expert >= 0:
            first, second, stage, phase = multiply_steps(
                tokens, weights, full, empty, CONSUMER, 0, steps, stage, phase, ACC
            )
            row = (block * CONSUMERS + CONSUMER) * ROWS
            if BIAS:
                if GATED:
                    own = bias_ptr + expert * 2 * out_size
                    first = biased(first, own, column_tile * WIDTH, out_size)
                    second = biased(second, own + out_size, column_tile * WIDTH, out_size)
                else:
                    own = bias_ptr + expert * out_size
                    first = biased(first, own, column_tile * 2 * WIDTH, out_size)
                    second = biased(second, own, column_tile * 2 * WIDTH + WIDTH, out_size)
            if GATED:
                if LIMIT > 0:
                    gated = _limited_results(first, second, out.dtype, LIMIT, SLOPE)
                else:
                    gated = gated_results(first, second, out.dtype)
                store_tile(gated, results, out, row, column_tile * WIDTH)
            else:
                store_tile(first.to(out.dtype), results, out, row, column_tile * 2 * WIDTH)
                store_tile(second.to(out.dtype), results, out, row, column_tile * 2 * WIDTH + WIDTH)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["blocks", "column_tiles", "steps", "out_size"])
def experts_kernel(
    x, weight, out, experts_ptr, bias_ptr, blocks, column_tiles, steps, out_size,
    STAGES: gl.constexpr, GROUP: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr, LIMIT: gl.constexpr,
    SLOPE: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """x [blocks * BLOCK, K], weight [E * out_size, K], or [E * 2 * out_size, K] with GATED, and out [blocks * BLOCK,
    out_size] are tensor descriptors of 16-bit numbers, in blocks of [BLOCK, STEP], [WIDTH, STEP] and [64, WIDTH].

    experts_ptr: int32 [blocks], negative for none. BIAS: bias [E, out_size], or with GATED [E, 2 * out_size], is added.
    A LIMIT above 0 turns the gate into gpt-oss's, with this SLOPE.
    """
    dtype: gl.constexpr = x.dtype
    TOKENS: gl.constexpr = x.block_type.shape[0]
    K: gl.constexpr = x.block_type.shape[1]
    WIDTH: gl.constexpr = weight.block_type.shape[0]
    ROWS: gl.constexpr = out.block_type.shape[0]
    CONSUMERS: gl.constexpr = TOKENS // ROWS
    BYTES: gl.constexpr = (TOKENS + 2 * WIDTH) * K * 2
    tokens_memory = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, K], x.layout)
    weights = gl.allocate_shared_memory(dtype, [STAGES, 2 * WIDTH, K], weight.layout)
    results = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, WIDTH], out.layout)
    tokens = tokens_memory._reinterpret(dtype, [CONSUMERS * STAGES, ROWS, K], x.layout)
    halves = weights._reinterpret(dtype, [2 * STAGES, WIDTH, K], weight.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    fence_async_shared()
    synchronize()
    produce = (x, weight, experts_ptr, tokens_memory, halves, full, empty, blocks, column_tiles, steps, out_size)
    consume = (
        out, experts_ptr, bias_ptr, tokens, weights, results, full, empty, blocks, column_tiles, steps, out_size
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consume, (consume, 0, GROUP, GATED, BIAS, LIMIT, SLOPE, USE_PDL)),
            (_consume, (consume, 1, GROUP, GATED, BIAS, LIMIT, SLOPE, USE_PDL)),
            (_produce, (produce, BYTES, GROUP, GATED, USE_PDL)),
        ],
        [4, 1],
        [240, 24],
    )


def compile_options(*, gated: bool, bias: bool = False, limit: float | None = None) -> dict[str, Any]:
    """Return the constexprs (except USE_PDL) and launch options, those of `hopper.compile_options` for two
    consumers."""
    gate = {"GATED": gated, "BIAS": bias, "LIMIT": limit or 0.0, "SLOPE": GATE_SLOPE}
    return {"STAGES": 4, "GROUP": BLOCKS_TOGETHER, **gate, "num_warps": 4, "maxnreg": 168}


def arrange(x: Tensor, assignments: Tensor, block_experts: Tensor, num_assignments: int) -> tuple[Tensor, Tensor]:
    """Return the rows of x [T, W] by place [blocks * BLOCK, W], for the assignments of blocks of BLOCK
    (`expert_blocks.Blocks`), and the place of each assignment [num_assignments] int32, which is not written for experts
    on other ranks."""
    width = x.shape[1]
    arranged = torch.empty(len(assignments), width, dtype=x.dtype, device=x.device)
    places = torch.empty(num_assignments, dtype=torch.int32, device=x.device)
    launch(
        arrange_kernel,
        (len(assignments) // COPY_TILE.places, 1, 1),
        (x, assignments, block_experts, arranged, places),
        (num_assignments,),
        num_warps=COPY_TILE.warps,
        TOP_K=num_assignments // len(x),
        COLUMNS=width,
        BLOCK=BLOCK,
        PLACES=COPY_TILE.places,
        TILE=min(COPY_TILE.numbers, triton.next_power_of_2(width)),
    )
    return arranged, places


def products(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    block_experts: Tensor,
    *,
    gated: bool,
    bias: Tensor | None = None,
    limit: float | None = None,
) -> None:
    """Multiply x [blocks * BLOCK, K] by the weights [E, N, K] of the blocks' experts, add their bias [E, N], and write
    out [blocks * BLOCK, N]. With `gated` the result is the gate of weights [E, 2 * N, K] (`kernels.fused_experts`).

    All are 16-bit, contiguous and aligned to 16 bytes; K and N are multiples of 8. Rows of blocks without an expert are
    not written.
    """
    blocks, out_size = len(block_experts), out.shape[1]
    rows = weight.view(-1, weight.shape[2])
    column_tiles = triton.cdiv(out_size, WIDTH if gated else 2 * WIDTH)
    maps = (
        TensorMap(x, (BLOCK, STEP), LINES),
        TensorMap(rows, (WIDTH, STEP), LINES),
        TensorMap(out, (CONSUMER_TOKENS, WIDTH), LINES),
    )
    grid = (min(processors(x.device), blocks * column_tiles), 1, 1)
    tensors = (block_experts, x if bias is None else bias)
    configured = _configured(gated, bias is not None, limit)
    configured(grid, tensors, (blocks, column_tiles, triton.cdiv(x.shape[1], STEP), out_size), maps)


@functools.cache
def _configured(gated: bool, bias: bool, limit: float | None) -> Configured:
    return Configured(experts_kernel, **compile_options(gated=gated, bias=bias, limit=limit))
