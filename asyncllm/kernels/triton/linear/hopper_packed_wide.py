"""Products with 4-bit weights for Hopper and many tokens, in Gluon: one producer and two warpgroups that decode and
multiply.

`hopper_packed` serves steps whose time is spent reading words. From about 64 tokens on, its blocks read more bytes of
tokens than of words, and their warps decode, multiply and wait in turn. Here, as in `linear.hopper`, one warp loads and
two warpgroups multiply: while one decodes, the tensor cores compute the other's products. A tile is 128 * HALVES rows
of the weight by 64 to 256 tokens, so that tokens are read once for 256 rows.

A consumer has HALVES sums of 64 rows, from row 64 * CONSUMER of each run of 128 rows in the tile. With GATED the first
run is gate rows and the second the corresponding up rows. The words of a run are read in the layout of the tensor
cores' first operand, as in `hopper_packed`, one chunk of 128 input features per stage. A chunk's scales and zero points
are loaded into registers two chunks ahead. Scales apply to the sums over a chunk, or with ROUNDED to the weight's
numbers, which are rounded to the tokens' dtype.

Tiles are divided as in `linear.hopper` with SHARES: each block has an equal share of all chunks of its tile of tokens,
and the owner of a tile adds the others' sums in order. Barriers and flags are those described there; a stage is
released at the end of its chunk.
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

from asyncllm.kernels.packed import PackedWeight
from asyncllm.kernels.triton.counters import zero_counters
from asyncllm.kernels.triton.language import release_consumers, wait_for_producers
from asyncllm.kernels.triton.launch import Configured, TensorMap
from asyncllm.kernels.triton.linear.hopper import (
    next_stage,
    places,
    processors,
    share_of,
    synchronize,
    wait_for_flag,
)
from asyncllm.kernels.triton.linear.hopper_packed import CHUNK, LINES, decode, finish, rounding_factors
from asyncllm.kernels.triton.linear.tiles import WideConfig

__all__ = ["RUN", "compile_options", "share_count", "wide", "wide_kernel"]

RUN = 128
"""Rows of the weight that are loaded together, 64 for each consumer."""

CONSUMERS = 2


@gluon.jit
def _fetch_words(words, memory, full, stage, row, second, chunk, whole):
    HALVES: gl.constexpr = memory.shape[0] // full.shape[0]
    tma.async_copy_global_to_shared(words, [chunk * whole + row, 0], full.index(stage), memory.index(stage * HALVES))
    if HALVES == 2:
        tma.async_copy_global_to_shared(
            words, [chunk * whole + second, 0], full.index(stage), memory.index(stage * 2 + 1)
        )


@gluon.jit
def _fetch_tokens(x, memory, full, stage, token, chunk):
    for run in gl.static_range(4):
        tma.async_copy_global_to_shared(
            x, [token, chunk * 128 + run * 32], full.index(stage), memory.index(stage * 4 + run)
        )


@gluon.jit
def _rows_of(column_tile, out_size, HALVES: gl.constexpr, GATED: gl.constexpr):
    """Return the first row of each of a tile's two runs."""
    if GATED:
        row = column_tile * 128
        second = out_size + row
    else:
        row = column_tile * (128 * HALVES)
        second = row + 128
    return row, second


@gluon.jit
def _produce(work, BYTES: gl.constexpr, HALVES: gl.constexpr, GATED: gl.constexpr, USE_PDL: gl.constexpr):
    x, words, weights, tokens, full, empty, token_tiles, column_tiles, shares, steps, out_size = work
    STAGES: gl.constexpr = full.shape[0]
    # Release early, so that the next product can load its words as well.
    EARLY: gl.constexpr = USE_PDL and tokens.shape[1] <= 32
    release_consumers(EARLY)
    whole = out_size * 2 if GATED else out_size
    token_tile, _, at, stop = share_of(gl.program_id(0), token_tiles, column_tiles, shares, steps)
    token = token_tile * tokens.shape[1]
    row, second = _rows_of(at // steps, out_size, HALVES, GATED)
    first = min(stop - at, STAGES, steps - at % steps)
    for stage in range(first):
        mbarrier.expect(full.index(stage), BYTES)
        _fetch_words(words, weights, full, stage, row, second, at % steps + stage, whole)
    wait_for_producers(USE_PDL)
    for stage in range(first):
        _fetch_tokens(x, tokens, full, stage, token, at % steps + stage)
    release_consumers(USE_PDL and not EARLY)
    stage = first % STAGES
    phase = first // STAGES
    for step in range(at + first, stop):
        row, second = _rows_of(step // steps, out_size, HALVES, GATED)
        mbarrier.wait(empty.index(stage), phase ^ 1)
        mbarrier.expect(full.index(stage), BYTES)
        _fetch_words(words, weights, full, stage, row, second, step % steps, whole)
        _fetch_tokens(x, tokens, full, stage, token, step % steps)
        stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _factors(scales_ptr, zeros_ptr, rows, chunk, last, whole, K: gl.constexpr, GROUP: gl.constexpr):
    """Return the stored scales and zero points of the rows in a chunk, or in chunk `last` for later ones."""
    GROUPS: gl.constexpr = 1 if GROUP >= K else K // GROUP
    group = min(min(chunk, last) * 128 // GROUP, GROUPS - 1)
    places = group * whole + rows
    return gl.load(scales_ptr + places), gl.load(zeros_ptr + places)


@gluon.jit
def _operand(
    found, scales, zeros, magic, nothing, INDEX: gl.constexpr, dtype: gl.constexpr, ROUNDED: gl.constexpr
):  # fmt: skip
    """Return the weight's numbers of run INDEX in `dtype`, from words int16 [64, 32] and scales and zeros [64]."""
    MAGIC: gl.constexpr = 0x4300 if dtype == gl.bfloat16 else 0x6400
    # The last bits of this number can hold a code or a zero point below 16.
    less = (zeros.to(gl.int16) | MAGIC)[:, None] + nothing
    high, low = rounding_factors(scales, nothing, dtype, ROUNDED)
    return decode(found, magic, less, high, low, INDEX, dtype, scales.dtype, ROUNDED)


@gluon.jit
def _scaled(total, scales):
    ROWS: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    return total * gl.convert_layout(scales, ROWS).to(gl.float32)[:, None]


@gluon.jit
def _add_run(acc, found, tokens, stage, scales, zeros, magic, nothing, dtype: gl.constexpr, ROUNDED: gl.constexpr):
    """Return acc plus the products of the words [64, 32] of one run and a stage's tokens."""
    a = _operand(found, scales, zeros, magic, nothing, 0, dtype, ROUNDED)
    total = warpgroup_mma(a, tokens.index(stage * 4).permute((1, 0)), acc, use_acc=ROUNDED, is_async=True)
    b = _operand(found, scales, zeros, magic, nothing, 1, dtype, ROUNDED)
    total = warpgroup_mma(b, tokens.index(stage * 4 + 1).permute((1, 0)), total, is_async=True)
    total, a = warpgroup_mma_wait(1, deps=(total, a))
    c = _operand(found, scales, zeros, magic, nothing, 2, dtype, ROUNDED)
    total = warpgroup_mma(c, tokens.index(stage * 4 + 2).permute((1, 0)), total, is_async=True)
    total, b = warpgroup_mma_wait(1, deps=(total, b))
    d = _operand(found, scales, zeros, magic, nothing, 3, dtype, ROUNDED)
    total = warpgroup_mma(d, tokens.index(stage * 4 + 3).permute((1, 0)), total, is_async=True)
    total, c, d = warpgroup_mma_wait(0, deps=(total, c, d))
    return total if ROUNDED else acc + _scaled(total, scales)


@gluon.jit
def _add_runs(
    acc, acc2, found, found2, tokens, stage, scales, scales2, zeros, zeros2, magic, nothing, dtype: gl.constexpr,
    ROUNDED: gl.constexpr,
):  # fmt: skip
    """Return acc and acc2 plus the products of two runs in turn. One product always executes while the operand of the
    next is decoded, and two operands fit into registers beside the sums."""
    b0 = tokens.index(stage * 4).permute((1, 0))
    b1 = tokens.index(stage * 4 + 1).permute((1, 0))
    b2 = tokens.index(stage * 4 + 2).permute((1, 0))
    b3 = tokens.index(stage * 4 + 3).permute((1, 0))
    a = _operand(found, scales, zeros, magic, nothing, 0, dtype, ROUNDED)
    one = warpgroup_mma(a, b0, acc, use_acc=ROUNDED, is_async=True)
    b = _operand(found2, scales2, zeros2, magic, nothing, 0, dtype, ROUNDED)
    two = warpgroup_mma(b, b0, acc2, use_acc=ROUNDED, is_async=True)
    one, a = warpgroup_mma_wait(1, deps=(one, a))
    c = _operand(found, scales, zeros, magic, nothing, 1, dtype, ROUNDED)
    one = warpgroup_mma(c, b1, one, is_async=True)
    two, b = warpgroup_mma_wait(1, deps=(two, b))
    d = _operand(found2, scales2, zeros2, magic, nothing, 1, dtype, ROUNDED)
    two = warpgroup_mma(d, b1, two, is_async=True)
    one, c = warpgroup_mma_wait(1, deps=(one, c))
    e = _operand(found, scales, zeros, magic, nothing, 2, dtype, ROUNDED)
    one = warpgroup_mma(e, b2, one, is_async=True)
    two, d = warpgroup_mma_wait(1, deps=(two, d))
    f = _operand(found2, scales2, zeros2, magic, nothing, 2, dtype, ROUNDED)
    two = warpgroup_mma(f, b2, two, is_async=True)
    one, e = warpgroup_mma_wait(1, deps=(one, e))
    g = _operand(found, scales, zeros, magic, nothing, 3, dtype, ROUNDED)
    one = warpgroup_mma(g, b3, one, is_async=True)
    two, f = warpgroup_mma_wait(1, deps=(two, f))
    h = _operand(found2, scales2, zeros2, magic, nothing, 3, dtype, ROUNDED)
    two = warpgroup_mma(h, b3, two, is_async=True)
    one, two, g, h = warpgroup_mma_wait(0, deps=(one, two, g, h))
    if ROUNDED:
        return one, two
    else:
        return acc + _scaled(one, scales), acc2 + _scaled(two, scales2)


@gluon.jit
def _consume(
    work, CONSUMER: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, HALVES: gl.constexpr, ROUNDED: gl.constexpr,
    GATED: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    (
        out_ptr, bias_ptr, scales_ptr, zeros_ptr, partial, flags, weights, tokens, full, empty, num_tokens, token_tiles,
        column_tiles, shares, steps, out_size,
    ) = work  # fmt: skip
    dtype: gl.constexpr = tokens.dtype
    STAGES: gl.constexpr = full.shape[0]
    TOKENS: gl.constexpr = tokens.shape[1]
    SIZE: gl.constexpr = 64 * TOKENS
    MAGIC: gl.constexpr = 0x4300 if dtype == gl.bfloat16 else 0x6400
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    DOT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    magic = gl.full([64, 32], MAGIC, gl.int16, DOT)
    nothing = gl.zeros([64, 32], gl.int16, DOT)
    own = CONSUMER * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, DOT))
    whole = out_size * 2 if GATED else out_size
    block = gl.program_id(0)
    token_tile, share, at, stop = share_of(block, token_tiles, column_tiles, shares, steps)
    total = column_tiles * steps
    token = token_tile * TOKENS
    stage = 0
    phase = 0
    while at < stop:
        column_tile = at // steps
        begin = at % steps
        end = min(steps, begin + stop - at)
        row, second = _rows_of(column_tile, out_size, HALVES, GATED)
        rows = gl.minimum(row + own, whole - 1)
        rows2 = gl.minimum(second + own, whole - 1)
        scales, zeros = _factors(scales_ptr, zeros_ptr, rows, begin, end - 1, whole, K, GROUP)
        coming, coming_zeros = _factors(scales_ptr, zeros_ptr, rows, begin + 1, end - 1, whole, K, GROUP)
        scales2 = scales
        zeros2 = zeros
        coming2 = coming
        coming_zeros2 = coming_zeros
        if HALVES == 2:
            scales2, zeros2 = _factors(scales_ptr, zeros_ptr, rows2, begin, end - 1, whole, K, GROUP)
            coming2, coming_zeros2 = _factors(scales_ptr, zeros_ptr, rows2, begin + 1, end - 1, whole, K, GROUP)
        acc = gl.zeros([64, TOKENS], gl.float32, ACC)
        acc2 = acc
        for chunk in range(begin, end):
            later, later_zeros = _factors(scales_ptr, zeros_ptr, rows, chunk + 2, end - 1, whole, K, GROUP)
            later2 = later
            later_zeros2 = later_zeros
            if HALVES == 2:
                later2, later_zeros2 = _factors(scales_ptr, zeros_ptr, rows2, chunk + 2, end - 1, whole, K, GROUP)
            mbarrier.wait(full.index(stage), phase)
            found = weights.index(stage * (2 * HALVES) + CONSUMER).load(DOT)
            if HALVES == 2:
                found2 = weights.index(stage * 4 + 2 + CONSUMER).load(DOT)
                acc, acc2 = _add_runs(
                    acc, acc2, found, found2, tokens, stage, scales, scales2, zeros, zeros2, magic, nothing, dtype,
                    ROUNDED,
                )  # fmt: skip
            else:
                acc = _add_run(acc, found, tokens, stage, scales, zeros, magic, nothing, dtype, ROUNDED)
            # All warps must have read the stage.
            synchronize()
            mbarrier.arrive(empty.index(stage), count=1)
            stage, phase = next_stage(stage, phase, STAGES)
            scales = coming
            zeros = coming_zeros
            coming = later
            coming_zeros = later_zeros
            scales2 = coming2
            zeros2 = coming_zeros2
            coming2 = later2
            coming_zeros2 = later_zeros2
        inside = places(acc)
        if begin > 0:
            mine = block * 2 + CONSUMER
            gl.store(partial + mine * (HALVES * SIZE) + inside, acc)
            if HALVES == 2:
                gl.store(partial + (mine * 2 + 1) * SIZE + inside, acc2)
            # All threads must have stored before one of them sets the flag.
            synchronize()
            gl.atomic_xchg(flags + mine, 1, sem="release", scope="gpu")
        else:
            other = share
            while (other + 1) * total // shares < (column_tile + 1) * steps:
                other += 1
                theirs = ((shares - 1 - other) * token_tiles + token_tile) * 2 + CONSUMER
                wait_for_flag(flags + theirs)
                acc += gl.load(partial + theirs * (HALVES * SIZE) + inside, cache_modifier=".cg")
                if HALVES == 2:
                    acc2 += gl.load(partial + (theirs * 2 + 1) * SIZE + inside, cache_modifier=".cg")
                synchronize()
                gl.store(flags + theirs, 0)
            first = row + CONSUMER * 64
            if GATED:
                finish(acc, acc2, out_ptr, bias_ptr, first, token, num_tokens, out_size, dtype, HAS_BIAS, True)
            else:
                finish(acc, acc, out_ptr, bias_ptr, first, token, num_tokens, out_size, dtype, HAS_BIAS, False)
                if HALVES == 2:
                    below = first + 128
                    finish(acc2, acc2, out_ptr, bias_ptr, below, token, num_tokens, out_size, dtype, HAS_BIAS, False)
        at += end - begin


@gluon.jit(do_not_specialize=["num_tokens", "token_tiles", "column_tiles", "shares", "out_size"])
def wide_kernel(
    x, words, out_ptr, bias_ptr, scales_ptr, zeros_ptr, partial, flags, num_tokens, token_tiles, column_tiles, shares,
    out_size,
    K: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr, REGISTERS: gl.constexpr,
    ROUNDED: gl.constexpr, GATED: gl.constexpr, HAS_BIAS: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """x [num_tokens, K] and words [C * N, 32] are tensor descriptors of 16-bit numbers in blocks of [TOKENS, 32] and
    [RUN, 32]. scales and zeros [G, N], where GROUP is a multiple of 128 or at least K, and N is out_size, or twice that
    with GATED, which requires two HALVES. out [num_tokens, out_size].

    partial: float32 [blocks, CONSUMERS, HALVES, 64, TOKENS]. flags: int32 [blocks, CONSUMERS], zero before and after.
    """
    dtype: gl.constexpr = x.dtype
    TOKENS: gl.constexpr = x.block_type.shape[0]
    BYTES: gl.constexpr = (HALVES * 128 + 4 * TOKENS) * 32 * 2
    steps = (K + 127) // 128
    runs = gl.allocate_shared_memory(gl.int16, [HALVES * STAGES, 128, 32], words.layout)
    tokens = gl.allocate_shared_memory(dtype, [4 * STAGES, TOKENS, 32], x.layout)
    weights = runs._reinterpret(gl.int16, [2 * HALVES * STAGES, 64, 32], words.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    synchronize()
    produce = (x, words, runs, tokens, full, empty, token_tiles, column_tiles, shares, steps, out_size)
    consume = (
        out_ptr, bias_ptr, scales_ptr, zeros_ptr, partial, flags, weights, tokens, full, empty, num_tokens, token_tiles,
        column_tiles, shares, steps, out_size,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consume, (consume, 0, K, GROUP, HALVES, ROUNDED, GATED, HAS_BIAS)),
            (_consume, (consume, 1, K, GROUP, HALVES, ROUNDED, GATED, HAS_BIAS)),
            (_produce, (produce, BYTES, HALVES, GATED, USE_PDL)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


def share_count(config: WideConfig, token_tiles: int, column_tiles: int, steps: int, processors: int) -> int:
    """Return the number of blocks that share the chunks of one tile of tokens: at most `splits` for each tile of rows,
    and in all no more than run at once, since blocks wait for each other."""
    return max(min(processors // token_tiles, column_tiles * min(config.splits, steps)), 1)


def compile_options(config: WideConfig, in_size: int, group_size: int, *, gated: bool, bias: bool) -> dict[str, Any]:
    """Return the constexprs (except USE_PDL) and launch options.

    12 warps (the producer's count as 4) have `maxnreg` registers per thread before their reallocation. With few sums
    that is less than half of the 65,536, so that the next kernel's block can start and load its words meanwhile.
    """
    few = config.tokens * config.halves <= 32
    return {
        "K": in_size,
        "GROUP": group_size,
        "STAGES": config.stages,
        "HALVES": config.halves,
        "ROUNDED": config.rounded,
        "GATED": gated,
        "HAS_BIAS": bias,
        "REGISTERS": 104 if few else 240,
        "num_warps": 4,
        "maxnreg": 80 if few else 168,
    }


def wide(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    config: WideConfig,
    *,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return x [T, K], contiguous and in the weight's order of features, times the weight, in `out` [T, N] if given.
    With `gated`, which requires a config with two halves, the result is silu(gate) * up [T, N / 2] of a weight without
    a bias. The inputs satisfy `hopper_packed.fits`, with at most as many tiles of tokens as multiprocessors."""
    tokens, k = x.shape
    n = weight.out_features // 2 if gated else weight.out_features
    assert config.halves == 2 or not gated, "gate and up are two halves"
    if out is None:
        out = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    rows = RUN if gated else RUN * config.halves
    token_tiles, column_tiles, steps = -(-tokens // config.tokens), -(-n // rows), -(-k // CHUNK)
    shares = share_count(config, token_tiles, column_tiles, steps, processors(x.device))
    blocks = shares * token_tiles
    flags = zero_counters(x.device)
    partial = flags.view(torch.float32)
    if column_tiles % shares:
        numbers = blocks * CONSUMERS * config.halves * 64 * config.tokens
        partial = torch.empty(numbers, dtype=torch.float32, device=x.device)
    maps = (TensorMap(x, (config.tokens, 32), LINES), TensorMap(weight.words.view(-1, 32), (RUN, 32), LINES))
    tensors = (out, out if bias is None else bias, weight.scales, weight.zeros, partial, flags)
    configured = _configured(config, k, weight.group_size, gated, bias is not None)
    configured((blocks, 1, 1), tensors, (tokens, token_tiles, column_tiles, shares, n), maps)
    return out


@functools.cache
def _configured(config: WideConfig, in_size: int, group_size: int, gated: bool, bias: bool) -> Configured:
    return Configured(wide_kernel, **compile_options(config, in_size, group_size, gated=gated, bias=bias))
