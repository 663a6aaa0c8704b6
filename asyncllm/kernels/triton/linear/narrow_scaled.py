"""8-bit products of up to a few hundred rows for Hopper, in Gluon: `narrow_kernel` with codes as operands.

A stage's products are added to float32 registers before the next stage's begin, since Hopper's tensor cores keep only
about 14 bits of fp8 sums. Integers are summed exactly in int32. From 128 tokens on there are no registers for two sums,
and fp8 sums stay in the tensor cores, as in cuBLAS.

Reading weights takes longer than multiplying them, so waiting for a stage's products costs nothing; the stage is
refilled right after them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from asyncllm.kernels.scaled import ScaledWeight
from asyncllm.kernels.triton.counters import NUM_COUNTERS, zero_counters
from asyncllm.kernels.triton.language import release_consumers, wait_for_producers
from asyncllm.kernels.triton.launch import Configured, TensorMap
from asyncllm.kernels.triton.linear.hopper import next_stage, synchronize
from asyncllm.kernels.triton.linear.narrow import fetch, finish
from asyncllm.kernels.triton.linear.small import NarrowConfig

__all__ = ["LINE", "LINES", "compile_options", "narrow_scaled", "narrow_scaled_kernel", "token_block"]

LINE = 128
"""Input features in a part of a stage: 128 bytes, one line of the swizzled layout."""

LINES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
"""Layout of every tile in shared memory."""


@gluon.jit
def _multiply(weights, tokens, stage, total, PARTS: gl.constexpr, EXACT: gl.constexpr):
    """Return total plus the products of a stage, after waiting for them."""
    acc = gl.zeros_like(total) if EXACT else total
    for part in gl.static_range(PARTS):
        t = tokens.index(stage * PARTS + part).permute((1, 0))
        acc = warpgroup_mma(weights.index(stage * PARTS + part), t, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    if EXACT:
        acc += total
    return acc


@gluon.jit
def _scaled(acc, x_scales_ptr, scales_ptr, row, num_tokens, out_size):
    """Return acc [ROWS, TOKENS] times the scales of rows of the weight and of tokens, in float32."""
    rows = row + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, acc.type.layout))
    token = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
    own = gl.load(scales_ptr + rows, mask=rows < out_size, other=0.0)
    of_token = gl.load(x_scales_ptr + token, mask=token < num_tokens, other=0.0)
    return acc.to(gl.float32) * own[:, None] * of_token[None, :]


@gluon.jit(do_not_specialize=["num_tokens", "out_size", "steps"])
def narrow_scaled_kernel(
    x, weight, out_ptr, x_scales_ptr, scales_ptr, bias_ptr, partial_ptr, counter_ptr, num_tokens, out_size, steps,
    PARTS: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr, INTEGER: gl.constexpr, HAS_BIAS: gl.constexpr,
    USE_PDL: gl.constexpr,
):  # fmt: skip
    """x [num_tokens, K] and weight [out_size, K] are tensor descriptors of codes in blocks of [TOKENS, 128] and [ROWS,
    128], with scales [num_tokens] and [out_size]; out [num_tokens, out_size].

    partial: float32 or int32 [tiles, SPLITS, ROWS, TOKENS]. counter: int32 [tiles], zero before and after.
    """
    TOKENS: gl.constexpr = x.block_type.shape[0]
    LINE: gl.constexpr = x.block_type.shape[1]
    ROWS: gl.constexpr = weight.block_type.shape[0]
    BYTES: gl.constexpr = PARTS * (ROWS + TOKENS) * LINE
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, TOKENS, 32])
    SUMS: gl.constexpr = gl.int32 if INTEGER else gl.float32
    EXACT: gl.constexpr = not INTEGER and TOKENS <= 64

    release_consumers(USE_PDL)
    weights = gl.allocate_shared_memory(weight.dtype, [PARTS * STAGES, ROWS, LINE], weight.layout)
    tokens = gl.allocate_shared_memory(x.dtype, [PARTS * STAGES, TOKENS, LINE], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()
    synchronize()

    # Adjacent blocks read the same weights, one for each tile of tokens.
    token_tiles = gl.num_programs(0) // SPLITS
    token = gl.program_id(0) % token_tiles * TOKENS
    split = gl.program_id(0) // token_tiles
    tile = gl.program_id(1)
    row = tile * ROWS
    begin = steps * split // SPLITS
    end = steps * (split + 1) // SPLITS
    first = min(end - begin, STAGES)
    for stage in range(first):
        mbarrier.expect(full.index(stage), BYTES)
        fetch(weight, row, weights, full, stage, begin + stage, PARTS)
    wait_for_producers(USE_PDL)
    for stage in range(first):
        fetch(x, token, tokens, full, stage, begin + stage, PARTS)

    total = gl.zeros([ROWS, TOKENS], SUMS, ACC)
    stage = 0
    phase = 0
    for step in range(begin, end):
        mbarrier.wait(full.index(stage), phase)
        total = _multiply(weights, tokens, stage, total, PARTS, EXACT)
        coming = step + STAGES
        if coming < end:
            # All warps must have read the stage.
            synchronize()
            mbarrier.expect(full.index(stage), BYTES)
            fetch(weight, row, weights, full, stage, coming, PARTS)
            fetch(x, token, tokens, full, stage, coming, PARTS)
        stage, phase = next_stage(stage, phase, STAGES)

    dtype: gl.constexpr = out_ptr.dtype.element_ty
    x_scales_ptr += token
    out_ptr += token.to(gl.int64) * out_size
    num_tokens -= token
    if SPLITS == 1:
        results = _scaled(total, x_scales_ptr, scales_ptr, row, num_tokens, out_size)
        finish(results, out_ptr, bias_ptr, row, num_tokens, out_size, dtype, HAS_BIAS)
    else:
        TILE: gl.constexpr = ROWS * TOKENS
        tile = tile * token_tiles + gl.program_id(0) % token_tiles
        r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, ACC))[:, None]
        c = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, ACC))[None, :]
        sums = partial_ptr + tile * (SPLITS * TILE) + r * TOKENS + c
        gl.store(sums + split * TILE, total)
        # All threads must have stored before one of them counts.
        synchronize()
        arrived = gl.atomic_add(counter_ptr + tile, 1, sem="acq_rel", scope="gpu")
        synchronize()
        if arrived == SPLITS - 1:
            added = gl.load(sums, cache_modifier=".cg")
            for other in gl.static_range(1, SPLITS):
                added += gl.load(sums + other * TILE, cache_modifier=".cg")
            results = _scaled(added, x_scales_ptr, scales_ptr, row, num_tokens, out_size)
            finish(results, out_ptr, bias_ptr, row, num_tokens, out_size, dtype, HAS_BIAS)
            gl.store(counter_ptr + tile, 0)


def compile_options(config: NarrowConfig, *, integer: bool, with_bias: bool) -> dict[str, Any]:
    """Return the constexprs (except USE_PDL) and launch options."""
    return {
        "PARTS": config.parts,
        "STAGES": config.stages,
        "SPLITS": config.splits,
        "INTEGER": integer,
        "HAS_BIAS": with_bias,
        "num_warps": 4 if config.rows == 64 else 8,
    }


def token_block(tokens: int, *, integer: bool) -> int:
    """Return the number of tokens of a tile: the smallest that holds all of them, up to 256 in fp8, or up to 128 for
    integers, which have no wider product."""
    most = 128 if integer else 256
    return next((block for block in (16, 32, 64, 128) if tokens <= block), most)


def narrow_scaled(
    codes: Tensor, scales: Tensor, weight: ScaledWeight, bias: Tensor | None, config: NarrowConfig, out: Tensor
) -> None:
    """Multiply codes [T, K], T at least 1, with scales [T, 1] by a weight without groups, add bias [N], and write out
    [T, N].

    Codes are aligned to 16 bytes; K is a multiple of 16, N of 8. Raises ValueError for more split tiles than counters.
    """
    tokens, in_size = codes.shape
    out_size = weight.codes.shape[0]
    integer = codes.dtype == torch.int8
    block = token_block(tokens, integer=integer)
    tiles, token_tiles = -(-out_size // config.rows), -(-tokens // block)
    partial = counters = scales
    if config.splits > 1:
        kind = torch.int32 if integer else torch.float32
        partial = torch.empty(tiles * token_tiles * config.splits * config.rows * block, dtype=kind, device=out.device)
        counters = zero_counters(out.device)
    maps = (TensorMap(codes, (block, LINE), LINES), TensorMap(weight.codes, (config.rows, LINE), LINES))
    if tiles * token_tiles > NUM_COUNTERS and config.splits > 1:
        raise ValueError(f"{tiles * token_tiles} tiles have no counters, of which there are {NUM_COUNTERS}")
    tensors = (out, scales, weight.scales, out if bias is None else bias, partial, counters)
    numbers = (tokens, out_size, -(-in_size // (config.parts * LINE)))
    _configured(config, integer, bias is not None)((config.splits * token_tiles, tiles, 1), tensors, numbers, maps)


@functools.cache
def _configured(config: NarrowConfig, integer: bool, with_bias: bool) -> Configured:
    return Configured(narrow_scaled_kernel, **compile_options(config, integer=integer, with_bias=with_bias))
