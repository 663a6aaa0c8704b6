"""Products with 4-bit weights for Hopper, in Gluon: words are decoded in registers, between the ring and the tensor
cores.

As in `linear.narrow` a block has a ring of STAGES in shared memory, which TMA fills, and loads words before it waits
for the preceding kernel. A stage has one chunk, 128 input features, of ROWS rows of words and of all its tokens. The
words are read in the layout of the tensor cores' first operand, so that a shift and a mask turn them into that operand
without another pass through shared memory. The products of one run of 32 features execute while the next is decoded.

The scales and zero points of a block's chunks are copied to a table in shared memory before the wait, since no kernel
writes weights. Scales apply to the sums over a chunk; with ROUNDED, for many tokens, they apply to the weight's
numbers, which are rounded to the tokens' dtype, so that one set of sums suffices.

With GATED a block has ROWS gate rows and the corresponding ROWS up rows, and stores silu(gate) * up. Splits are added
up as in `linear.narrow`.
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
from asyncllm.kernels.triton.activation import apply_gate
from asyncllm.kernels.triton.counters import NUM_COUNTERS, zero_counters
from asyncllm.kernels.triton.language import release_consumers, wait_for_producers
from asyncllm.kernels.triton.launch import Configured, TensorMap, fits_tensor_map
from asyncllm.kernels.triton.linear.hopper import next_stage, synchronize
from asyncllm.kernels.triton.linear.tiles import RingConfig

__all__ = [
    "CHUNK",
    "JOINED_LINES",
    "LINES",
    "compile_options",
    "decode",
    "finish",
    "fits",
    "ring",
    "ring_kernel",
    "rounding_factors",
]

CHUNK = 128
"""Input features of a stage: four runs of 32."""

LINES = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
"""Layout in shared memory of runs of 32 words or input features."""

JOINED_LINES = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=3)
"""The same layout for the four runs of a chunk together, or for the words of gate and up."""


@gluon.jit
def _fetch_words(words, row, up, memory, full, stage, chunk, out_size, GATED: gl.constexpr):
    """Copy a chunk's words, those of gate and up in one copy if `memory` joins them."""
    if len(memory.shape) == 4:
        tma.async_copy_global_to_shared(words, [chunk * 2, row, 0], full.index(stage), memory.index(stage))
    else:
        HALVES: gl.constexpr = 2 if GATED else 1
        of_gate = memory.index(stage * HALVES)
        tma.async_copy_global_to_shared(words, [chunk * out_size + row, 0], full.index(stage), of_gate)
        if GATED:
            of_up = memory.index(stage * HALVES + 1)
            tma.async_copy_global_to_shared(words, [chunk * out_size + up, 0], full.index(stage), of_up)


@gluon.jit
def _fetch_tokens(x, token, memory, full, stage, chunk):
    """Copy the four runs of a chunk's tokens, in one copy if `memory` joins them."""
    if len(memory.shape) == 4:
        tma.async_copy_global_to_shared(x, [chunk * 4, token, 0], full.index(stage), memory.index(stage))
    else:
        for run in gl.static_range(4):
            tma.async_copy_global_to_shared(
                x, [token, chunk * 128 + run * 32], full.index(stage), memory.index(stage * 4 + run)
            )


@gluon.jit
def nibbles(words, magic, INDEX: gl.constexpr):
    """Return the codes INDEX of words int16 [R, 32] in the last bits of 128 (bfloat16) or 1024 (float16). `magic`: the
    bits of that number."""
    if INDEX == 0:
        return gl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x000f000f, $2, 0xea;", "=r,r,r", [words, magic], gl.int16, True, 2
        )
    elif INDEX == 1:
        return gl.inline_asm_elementwise(
            "{.reg .b32 t; shr.u32 t, $1, 4; lop3.b32 $0, t, 0x000f000f, $2, 0xea;}",
            "=r,r,r", [words, magic], gl.int16, True, 2,
        )  # fmt: skip
    elif INDEX == 2:
        return gl.inline_asm_elementwise(
            "{.reg .b32 t; shr.u32 t, $1, 8; lop3.b32 $0, t, 0x000f000f, $2, 0xea;}",
            "=r,r,r", [words, magic], gl.int16, True, 2,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            "{.reg .b32 t; shr.u32 t, $1, 12; lop3.b32 $0, t, 0x000f000f, $2, 0xea;}",
            "=r,r,r", [words, magic], gl.int16, True, 2,
        )  # fmt: skip


@gluon.jit
def rounding_factors(scales, nothing, dtype: gl.constexpr, ROUNDED: gl.constexpr):
    """Return scales [R] as two factors [R, 32] for `decode`. `nothing` [R, 32], int16 zeros, stands for an unused
    factor.

    A float16 scale is the sum of two bfloat16 numbers, of 8 and of 3 bits.
    """
    if not ROUNDED:
        return nothing, nothing
    elif scales.dtype == dtype:
        return scales.to(gl.int16, bitcast=True)[:, None] + nothing, nothing
    elif dtype == gl.bfloat16 and scales.dtype == gl.float16:
        whole = scales.to(gl.float32)
        high = whole.to(gl.bfloat16)
        low = (whole - high.to(gl.float32)).to(gl.bfloat16)
        return high.to(gl.int16, bitcast=True)[:, None] + nothing, low.to(gl.int16, bitcast=True)[:, None] + nothing
    else:
        return scales.to(gl.float32)[:, None], nothing


@gluon.jit
def decode(
    words, magic, shifted, high, low, INDEX: gl.constexpr, dtype: gl.constexpr, stored: gl.constexpr,
    ROUNDED: gl.constexpr,
):  # fmt: skip
    """Return the weight's numbers of run INDEX in `dtype`, rounded once, from words and `shifted` zero points, int16
    [R, 32]. `high`, `low`: the results of `rounding_factors` for scales of dtype `stored`."""
    codes = nibbles(words, magic, INDEX)
    if ROUNDED and dtype == gl.bfloat16 and stored == gl.float16:
        # The code minus the zero point has 4 bits, so its product with the 3 bits of `low` is exact.
        bits = gl.inline_asm_elementwise(
            "{.reg .b32 t, u; sub.rn.bf16x2 t, $1, $2; mul.rn.bf16x2 u, t, $4; fma.rn.bf16x2 $0, t, $3, u;}",
            "=r,r,r,r,r", [codes, shifted, high, low], gl.int16, True, 2,
        )  # fmt: skip
    elif ROUNDED and dtype == gl.bfloat16 and stored == gl.bfloat16:
        bits = gl.inline_asm_elementwise(
            "{.reg .b32 t; sub.rn.bf16x2 t, $1, $2; mul.rn.bf16x2 $0, t, $3;}",
            "=r,r,r,r", [codes, shifted, high], gl.int16, True, 2,
        )  # fmt: skip
    elif ROUNDED and dtype == gl.float16 and stored == gl.float16:
        bits = gl.inline_asm_elementwise(
            "{.reg .b32 t; sub.rn.f16x2 t, $1, $2; mul.rn.f16x2 $0, t, $3;}",
            "=r,r,r,r", [codes, shifted, high], gl.int16, True, 2,
        )  # fmt: skip
    elif dtype == gl.bfloat16:
        bits = gl.inline_asm_elementwise("sub.rn.bf16x2 $0, $1, $2;", "=r,r,r", [codes, shifted], gl.int16, True, 2)
    else:
        bits = gl.inline_asm_elementwise("sub.rn.f16x2 $0, $1, $2;", "=r,r,r", [codes, shifted], gl.int16, True, 2)
    values = bits.to(dtype, bitcast=True)
    if ROUNDED and stored != dtype and not (dtype == gl.bfloat16 and stored == gl.float16):
        values = (values.to(gl.float32) * high).to(dtype)
    return values


@gluon.jit
def _add_chunk(
    acc, weights, tokens, scales, shifted, magic, nothing, stage, place, own, dtype: gl.constexpr, ROUNDED: gl.constexpr
):  # fmt: skip
    """Return acc plus the products of the words at `place` of the ring and a stage's tokens. `own`: the words' line in
    the table."""
    ACC: gl.constexpr = acc.type.layout
    DOT: gl.constexpr = magic.type.layout
    stored: gl.constexpr = scales.dtype
    found = weights.index(place).load(DOT)
    less = shifted.index(own).load(gl.SliceLayout(1, DOT))[:, None] + nothing
    high = nothing
    low = nothing
    if ROUNDED:
        high, low = rounding_factors(scales.index(own).load(gl.SliceLayout(1, DOT)), nothing, dtype, ROUNDED)
    a = decode(found, magic, less, high, low, 0, dtype, stored, ROUNDED)
    total = warpgroup_mma(a, tokens.index(stage * 4).permute((1, 0)), acc, use_acc=ROUNDED, is_async=True)
    b = decode(found, magic, less, high, low, 1, dtype, stored, ROUNDED)
    total = warpgroup_mma(b, tokens.index(stage * 4 + 1).permute((1, 0)), total, is_async=True)
    if ROUNDED:
        # Wait early: beside the sums there are no registers for four operands.
        total, a = warpgroup_mma_wait(1, deps=(total, a))
    c = decode(found, magic, less, high, low, 2, dtype, stored, ROUNDED)
    total = warpgroup_mma(c, tokens.index(stage * 4 + 2).permute((1, 0)), total, is_async=True)
    if ROUNDED:
        total, b = warpgroup_mma_wait(1, deps=(total, b))
    d = decode(found, magic, less, high, low, 3, dtype, stored, ROUNDED)
    total = warpgroup_mma(d, tokens.index(stage * 4 + 3).permute((1, 0)), total, is_async=True)
    if ROUNDED:
        total, c, d = warpgroup_mma_wait(0, deps=(total, c, d))
    else:
        total, a, b, c, d = warpgroup_mma_wait(0, deps=(total, a, b, c, d))
    if not ROUNDED:
        total = acc + total * scales.index(own).load(gl.SliceLayout(1, ACC)).to(gl.float32)[:, None]
    return total


@gluon.jit
def _fill_table(
    scales_ptr, zeros_ptr, scales, shifted, row, begin, end, out_size,
    K: gl.constexpr, GROUP: gl.constexpr, CHUNKS: gl.constexpr, ROWS: gl.constexpr, dtype: gl.constexpr,
    HALVES: gl.constexpr,
):  # fmt: skip
    """Copy the scales of chunks begin to end - 1, and the numbers to subtract from their codes, to shared memory."""
    GROUPS: gl.constexpr = 1 if GROUP >= K else K // GROUP
    BIAS: gl.constexpr = 128.0 if dtype == gl.bfloat16 else 1024.0
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    place = gl.arange(0, CHUNKS * HALVES * ROWS, layout=FLAT)
    chunk = begin + place // (HALVES * ROWS)
    own = row + place % ROWS
    group = gl.minimum(chunk * 128 // GROUP, GROUPS - 1)
    mask = (chunk < end) & (own < out_size // HALVES)
    if HALVES == 2:
        own += place // ROWS % 2 * (out_size // 2)
    found = gl.load(scales_ptr + group * out_size + own, mask=mask, other=0.0)
    zeros = gl.load(zeros_ptr + group * out_size + own, mask=mask, other=0)
    scales._reinterpret(scales.dtype, [CHUNKS * HALVES * ROWS], PLAIN).store(found)
    bits = (zeros.to(gl.float32) + BIAS).to(dtype).to(gl.int16, bitcast=True)
    shifted._reinterpret(gl.int16, [CHUNKS * HALVES * ROWS], PLAIN).store(bits)


@gluon.jit
def finish(acc, up, out_ptr, bias_ptr, row, token, num_tokens, out_size, dtype: gl.constexpr,
           HAS_BIAS: gl.constexpr, GATED: gl.constexpr):  # fmt: skip
    """Store acc [ROWS, TOKENS] float32 plus the bias, or with GATED silu(acc) * up, to out [num_tokens, out_size]."""
    ROWS: gl.constexpr = acc.shape[0]
    TOKENS: gl.constexpr = acc.shape[1]
    if HAS_BIAS:
        own = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, acc.type.layout))
        acc += gl.load(bias_ptr + own, mask=own < out_size, other=0.0).to(gl.float32)[:, None]
    if GATED:
        rounded = apply_gate(acc.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32), dtype, False)
    else:
        rounded = acc.to(dtype)
    # A thread stores eight results of one token at once.
    STORED: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, gl.num_warps()], [0, 1])
    results = gl.convert_layout(rounded, STORED)
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORED))[:, None]
    tokens = token + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, STORED))[None, :]
    gl.store(out_ptr + tokens * out_size + rows, results, mask=(tokens < num_tokens) & (rows < out_size))


@gluon.jit(do_not_specialize=["num_tokens", "out_size"])
def ring_kernel(
    x, words, out_ptr, bias_ptr, scales_ptr, zeros_ptr, partial_ptr, counter_ptr, num_tokens, out_size,
    K: gl.constexpr, GROUP: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr,
    ROUNDED: gl.constexpr, GATED: gl.constexpr, HAS_BIAS: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """x [num_tokens, K] and words [C * N, 32] are tensor descriptors of 16-bit numbers in blocks of [TOKENS, 32] and
    [ROWS, 32]. Joined, x is [K / 32, num_tokens, 32] in blocks of [4, TOKENS, 32], and with GATED words are [2 * C,
    N / 2, 32] in blocks of [2, ROWS, 32]. scales and zeros [G, N], where GROUP is a multiple of 128 or at least K, and
    N is out_size, or twice that with GATED. out [num_tokens, out_size].

    A block has up to CHUNKS chunks, a power of two. partial: float32 [tiles, SPLITS, 1 or 2, ROWS, TOKENS]. counter:
    int32 [tiles], zero before and after.
    """
    dtype: gl.constexpr = x.dtype
    JOINED: gl.constexpr = len(x.block_type.shape) == 3
    TOKENS: gl.constexpr = x.block_type.shape[1] if JOINED else x.block_type.shape[0]
    ROWS: gl.constexpr = words.block_type.shape[1] if JOINED and GATED else words.block_type.shape[0]
    HALVES: gl.constexpr = 2 if GATED else 1
    STEPS: gl.constexpr = (K + 127) // 128
    BYTES: gl.constexpr = (HALVES * ROWS + 4 * TOKENS) * 32 * 2
    MAGIC: gl.constexpr = 0x4300 if dtype == gl.bfloat16 else 0x6400
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, TOKENS, 16])
    DOT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    release_consumers(USE_PDL)
    LINES: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    if JOINED and GATED:
        runs = gl.allocate_shared_memory(gl.int16, [STAGES, 2, ROWS, 32], words.layout)
        weights = runs._reinterpret(gl.int16, [2 * STAGES, ROWS, 32], LINES)
    else:
        runs = gl.allocate_shared_memory(gl.int16, [HALVES * STAGES, ROWS, 32], words.layout)
        weights = runs
    if JOINED:
        copied = gl.allocate_shared_memory(dtype, [STAGES, 4, TOKENS, 32], x.layout)
        tokens = copied._reinterpret(dtype, [4 * STAGES, TOKENS, 32], LINES)
    else:
        copied = gl.allocate_shared_memory(dtype, [4 * STAGES, TOKENS, 32], x.layout)
        tokens = copied
    scales = gl.allocate_shared_memory(scales_ptr.dtype.element_ty, [HALVES * CHUNKS, ROWS], PLAIN)
    shifted = gl.allocate_shared_memory(gl.int16, [HALVES * CHUNKS, ROWS], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()
    synchronize()

    split = gl.program_id(0)
    row = gl.program_id(1) * ROWS
    token = gl.program_id(2) * TOKENS
    tile = gl.program_id(2) * gl.num_programs(1) + gl.program_id(1)
    begin = STEPS * split // SPLITS
    end = STEPS * (split + 1) // SPLITS
    first = min(end - begin, STAGES)
    whole = out_size * HALVES
    for stage in range(first):
        mbarrier.expect(full.index(stage), BYTES)
        _fetch_words(words, row, row + out_size, runs, full, stage, begin + stage, whole, GATED)
    _fill_table(scales_ptr, zeros_ptr, scales, shifted, row, begin, end, whole, K, GROUP, CHUNKS, ROWS, dtype, HALVES)
    wait_for_producers(USE_PDL)
    for stage in range(first):
        _fetch_tokens(x, token, copied, full, stage, begin + stage)
    synchronize()

    magic = gl.full([ROWS, 32], MAGIC, gl.int16, DOT)
    nothing = gl.zeros([ROWS, 32], gl.int16, DOT)
    acc = gl.zeros([ROWS, TOKENS], gl.float32, ACC)
    up = acc
    stage = 0
    phase = 0
    for step in range(begin, end):
        own = (step - begin) * HALVES
        mbarrier.wait(full.index(stage), phase)
        acc = _add_chunk(
            acc, weights, tokens, scales, shifted, magic, nothing, stage, stage * HALVES, own, dtype, ROUNDED
        )
        if GATED:
            up = _add_chunk(
                up, weights, tokens, scales, shifted, magic, nothing, stage, stage * 2 + 1, own + 1, dtype, ROUNDED
            )
        coming = step + STAGES
        if coming < end:
            # All warps must have read the stage.
            synchronize()
            mbarrier.expect(full.index(stage), BYTES)
            _fetch_words(words, row, row + out_size, runs, full, stage, coming, whole, GATED)
            _fetch_tokens(x, token, copied, full, stage, coming)
        stage, phase = next_stage(stage, phase, STAGES)

    if SPLITS == 1:
        finish(acc, up, out_ptr, bias_ptr, row, token, num_tokens, out_size, dtype, HAS_BIAS, GATED)
    else:
        TILE: gl.constexpr = ROWS * TOKENS
        r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, ACC))[:, None]
        c = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, ACC))[None, :]
        sums = partial_ptr + tile * (SPLITS * HALVES * TILE) + r * TOKENS + c
        gl.store(sums + split * (HALVES * TILE), acc)
        if GATED:
            gl.store(sums + split * (HALVES * TILE) + TILE, up)
        # All threads must have stored before one of them counts.
        synchronize()
        arrived = gl.atomic_add(counter_ptr + tile, 1, sem="acq_rel", scope="gpu")
        synchronize()
        if arrived == SPLITS - 1:
            total = gl.load(sums, cache_modifier=".cg")
            total_up = total
            if GATED:
                total_up = gl.load(sums + TILE, cache_modifier=".cg")
            for other in gl.static_range(1, SPLITS):
                total += gl.load(sums + other * (HALVES * TILE), cache_modifier=".cg")
                if GATED:
                    total_up += gl.load(sums + other * (HALVES * TILE) + TILE, cache_modifier=".cg")
            finish(total, total_up, out_ptr, bias_ptr, row, token, num_tokens, out_size, dtype, HAS_BIAS, GATED)
            gl.store(counter_ptr + tile, 0)


def fits(x: Tensor, weight: PackedWeight) -> bool:
    """Return whether the kernel can multiply x [T, K] by the weight, which must have 4 bits and groups of whole
    chunks."""
    whole_chunks = weight.group_size % CHUNK == 0 or weight.group_size >= weight.in_features
    return weight.bits == 4 and whole_chunks and weight.out_features % 16 == 0 and fits_tensor_map(x)


def compile_options(config: RingConfig, in_size: int, group_size: int, *, gated: bool, bias: bool) -> dict[str, Any]:
    """Return the constexprs (except USE_PDL) and launch options."""
    chunks = -(-in_size // CHUNK)
    return {
        "K": in_size,
        "GROUP": group_size,
        "CHUNKS": 1 << (-(-chunks // config.splits) - 1).bit_length(),
        "STAGES": config.stages,
        "SPLITS": config.splits,
        "ROUNDED": config.rounded,
        "GATED": gated,
        "HAS_BIAS": bias,
        "num_warps": config.rows // 16,
    }


def ring(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    config: RingConfig,
    *,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return x [T, K], contiguous and in the weight's order of features, times the weight, in `out` [T, N] if given.
    With `gated` the result is silu(gate) * up [T, N / 2] of a weight without a bias."""
    tokens, k = x.shape
    n = weight.out_features // 2 if gated else weight.out_features
    if out is None:
        out = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    rows, token_tiles = -(-n // config.rows), -(-tokens // config.tokens)
    partial = counters = out
    if config.splits > 1:
        assert rows * token_tiles <= NUM_COUNTERS, "more tiles than there are counters"
        numbers = config.splits * rows * token_tiles * config.rows * config.tokens * (2 if gated else 1)
        partial = torch.empty(numbers, dtype=torch.float32, device=x.device)
        counters = zero_counters(x.device)
    lines, of_words = TensorMap(x, (config.tokens, 32), LINES), weight.words.view(-1, 32)
    words = TensorMap(of_words, (config.rows, 32), LINES)
    if config.joined:
        assert k % 32 == 0, "runs are whole"
        lines = TensorMap(x.view(tokens, -1, 32).transpose(0, 1), (4, config.tokens, 32), JOINED_LINES)
        if gated:
            words = TensorMap(of_words.view(-1, n, 32), (2, config.rows, 32), JOINED_LINES)
    maps = (lines, words)
    tensors = (out, out if bias is None else bias, weight.scales, weight.zeros, partial, counters)
    configured = _configured(config, k, weight.group_size, gated, bias is not None)
    configured((config.splits, rows, token_tiles), tensors, (tokens, n), maps)
    return out


@functools.cache
def _configured(config: RingConfig, in_size: int, group_size: int, gated: bool, bias: bool) -> Configured:
    return Configured(ring_kernel, **compile_options(config, in_size, group_size, gated=gated, bias=bias))
