"""Products of 2 to 64 tokens for Hopper, in Gluon: weights are loaded before the tokens are written.

With few tokens all time is spent reading weights, and a layer loses time whenever nothing is read: while a kernel
starts or drains, or while a norm runs between two products. A block therefore keeps a ring of STAGES in nearly all of a
multiprocessor's shared memory, and loads the weights of all stages before it waits for the preceding kernel, which it
may because no kernel writes weights. It loads its tokens after the wait.

The weight is the first operand ("swap AB"): 64 of its rows are one wgmma, whose narrow side is the tokens. A stage has
PARTS x 64 input features of ROWS rows of weight and of all tokens, copied by TMA, which pads the matrices with zeros.
No warp is reserved for loading: all warps multiply, and when the products of one stage start, those of the previous
stage are done and it is refilled. `full`, a barrier per stage, completes when the copies have brought the announced
bytes; its phase bit flips each time.

With SPLITS several blocks share a tile, each with a range of input features. They store their sums to `partial`, and
the last to arrive adds all of them in the order of the ranges, so that results are reproducible to the bit.
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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from asyncllm.kernels.triton.counters import zero_counters
from asyncllm.kernels.triton.language import release_consumers, wait_for_producers
from asyncllm.kernels.triton.launch import Configured, TensorMap
from asyncllm.kernels.triton.linear.hopper import LINES, STEP, next_stage, synchronize
from asyncllm.kernels.triton.linear.small import NarrowConfig, token_tile

__all__ = ["compile_options", "fetch", "finish", "narrow", "narrow_kernel"]


@gluon.jit
def fetch(source, row, memory, full, stage, step, PARTS: gl.constexpr):
    """Copy a stage's part of the weights or of the tokens."""
    LINE: gl.constexpr = memory.shape[2]
    for part in gl.static_range(PARTS):
        tma.async_copy_global_to_shared(
            source, [row, (step * PARTS + part) * LINE], full.index(stage), memory.index(stage * PARTS + part)
        )


@gluon.jit
def finish(acc, out_ptr, bias_ptr, row, num_tokens, out_size, dtype: gl.constexpr, HAS_BIAS: gl.constexpr):
    """Store acc [ROWS, TOKENS] float32 plus the bias to out [num_tokens, out_size]."""
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    if HAS_BIAS:
        own = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, acc.type.layout))
        acc += gl.load(bias_ptr + own, mask=own < out_size, other=0.0).to(gl.float32)[:, None]
    # A thread stores eight results of one token at once.
    STORED: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, gl.num_warps()], [0, 1])
    results = gl.convert_layout(acc.to(dtype), STORED)
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORED))[:, None]
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, STORED))[None, :]
    gl.store(out_ptr + token * out_size + rows, results, mask=(token < num_tokens) & (rows < out_size))


@gluon.jit(do_not_specialize=["num_tokens", "out_size", "steps"])
def narrow_kernel(
    x, weight, out_ptr, bias_ptr, partial_ptr, counter_ptr, num_tokens, out_size, steps,
    PARTS: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr, HAS_BIAS: gl.constexpr,
    RELEASE_FIRST: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """x [num_tokens, K] and weight [out_size, K] are tensor descriptors of 16-bit numbers in blocks of [TOKENS, 64] and
    [ROWS, 64]; out [num_tokens, out_size].

    partial: float32 [tiles, SPLITS, ROWS, TOKENS]. counter: int32 [tiles], zero before and after.
    """
    dtype: gl.constexpr = x.dtype
    TOKENS: gl.constexpr = x.block_type.shape[0]
    LINE: gl.constexpr = x.block_type.shape[1]
    ROWS: gl.constexpr = weight.block_type.shape[0]
    BYTES: gl.constexpr = PARTS * (ROWS + TOKENS) * LINE * 2
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, TOKENS, 16])

    if RELEASE_FIRST:
        release_consumers(USE_PDL)
    weights = gl.allocate_shared_memory(dtype, [PARTS * STAGES, ROWS, LINE], weight.layout)
    tokens = gl.allocate_shared_memory(dtype, [PARTS * STAGES, TOKENS, LINE], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()
    synchronize()

    tile = gl.program_id(1)
    split = gl.program_id(0)
    row = tile * ROWS
    begin = steps * split // SPLITS
    end = steps * (split + 1) // SPLITS
    first = min(end - begin, STAGES)
    for stage in range(first):
        mbarrier.expect(full.index(stage), BYTES)
        fetch(weight, row, weights, full, stage, begin + stage, PARTS)
    wait_for_producers(USE_PDL)
    if not RELEASE_FIRST:
        release_consumers(USE_PDL)
    for stage in range(first):
        fetch(x, 0, tokens, full, stage, begin + stage, PARTS)

    acc = gl.zeros([ROWS, TOKENS], gl.float32, ACC)
    stage = 0
    before = 0
    phase = 0
    for step in range(begin, end):
        mbarrier.wait(full.index(stage), phase)
        for part in gl.static_range(PARTS):
            t = tokens.index(stage * PARTS + part).permute((1, 0))
            acc = warpgroup_mma(weights.index(stage * PARTS + part), t, acc, is_async=True)
        # Wait for the products of the previous step.
        acc = warpgroup_mma_wait(PARTS, deps=(acc,))
        coming = step - 1 + STAGES
        if (step > begin) & (coming < end):
            # All warps must have read the stage.
            synchronize()
            mbarrier.expect(full.index(before), BYTES)
            fetch(weight, row, weights, full, before, coming, PARTS)
            fetch(x, 0, tokens, full, before, coming, PARTS)
        before = stage
        stage, phase = next_stage(stage, phase, STAGES)
    acc = warpgroup_mma_wait(0, deps=(acc,))

    if SPLITS == 1:
        finish(acc, out_ptr, bias_ptr, row, num_tokens, out_size, dtype, HAS_BIAS)
    else:
        TILE: gl.constexpr = ROWS * TOKENS
        r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, ACC))[:, None]
        c = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, ACC))[None, :]
        sums = partial_ptr + tile * (SPLITS * TILE) + r * TOKENS + c
        gl.store(sums + split * TILE, acc)
        # All threads must have stored before one of them counts.
        synchronize()
        arrived = gl.atomic_add(counter_ptr + tile, 1, sem="acq_rel", scope="gpu")
        synchronize()
        if arrived == SPLITS - 1:
            total = gl.load(sums, cache_modifier=".cg")
            for other in gl.static_range(1, SPLITS):
                total += gl.load(sums + other * TILE, cache_modifier=".cg")
            finish(total, out_ptr, bias_ptr, row, num_tokens, out_size, dtype, HAS_BIAS)
            gl.store(counter_ptr + tile, 0)


def compile_options(config: NarrowConfig, *, with_bias: bool, release_first: bool = True) -> dict[str, Any]:
    """Return the constexprs (except USE_PDL) and launch options."""
    return {
        "PARTS": config.parts,
        "STAGES": config.stages,
        "SPLITS": config.splits,
        "HAS_BIAS": with_bias,
        "RELEASE_FIRST": release_first,
        "num_warps": 8 if config.rows == 256 else 4,
    }


def narrow(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    config: NarrowConfig,
    release_first: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Return x [T, K], T from 1 to 64, times weight [N, K] transposed, plus bias [N], in `out` [T, N] if given.

    All are bfloat16 or float16, contiguous and aligned to 16 bytes; K and N are multiples of 8. `release_first`: see
    `language.release_consumers`.
    """
    tokens, in_size = x.shape
    out_size = weight.shape[0]
    block = token_tile(tokens)
    if out is None:
        out = torch.empty((tokens, out_size), dtype=x.dtype, device=x.device)
    tiles = -(-out_size // config.rows)
    partial = counters = out
    if config.splits > 1:
        partial = torch.empty(tiles * config.splits * config.rows * block, dtype=torch.float32, device=x.device)
        counters = zero_counters(x.device)
    maps = (TensorMap(x, (block, STEP), LINES), TensorMap(weight, (config.rows, STEP), LINES))
    tensors = (out, out if bias is None else bias, partial, counters)
    numbers = (tokens, out_size, -(-in_size // (config.parts * STEP)))
    _configured(config, bias is not None, release_first)((config.splits, tiles, 1), tensors, numbers, maps)
    return out


@functools.cache
def _configured(config: NarrowConfig, with_bias: bool, release_first: bool) -> Configured:
    return Configured(narrow_kernel, **compile_options(config, with_bias=with_bias, release_first=release_first))
