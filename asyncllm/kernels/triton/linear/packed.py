"""Products with 4-bit or 8-bit weights (`kernels.packed`).

`packed_kernel` has the weight as the first operand of the tensor cores, as `linear.small` does: the 32 16-bit words of
a row hold two or four runs of 32 input features, each extracted by a shift and a mask. The number subtracted from the
codes is the middle of their range rather than the row's zero point, so that the operand does not depend on the row and
is built in the registers where it is multiplied. The remainder of the zero point is multiplied by the sum of a token's
features, and the scale by the result for a group. Above `MOST_FUSED` tokens, and in float32, the weight is expanded
first and multiplied by cuBLAS.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.linear import check_out
from asyncllm.kernels.packed import PackedWeight, chunk_of
from asyncllm.kernels.triton.device import table_name
from asyncllm.kernels.triton.language import INTERPRET, dot, release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.launch import launch
from asyncllm.kernels.triton.linear.gated import linear_silu_mul
from asyncllm.kernels.triton.linear.product import linear
from asyncllm.kernels.triton.linear.tiles import RingConfig, Tile, WideConfig, choose_tile, finish, rows_of, split

__all__ = [
    "LEAST_ROUNDED",
    "MOST_FUSED",
    "TILES",
    "codes_of",
    "dequantize",
    "expand_experts",
    "linear_packed",
    "linear_packed_silu_mul",
    "multiply",
    "scaled_codes",
    "shifted_codes",
    "shifted_words",
]


TILES = (
    Tile(64, 16, 4, 4, programs=768),
    Tile(64, 32, 4, 4, programs=384),
    Tile(128, 64, 8, 4, programs=192),
    Tile(128, 128, 8, 3, programs=128),
    Tile(128, 256, 8, 3, programs=128),
)
"""By tokens, for shapes that `TABLES` does not have. The first three are near the best of a small search on an H200
with tiles of the same size in another order."""

Table = dict[tuple[int, int], tuple[tuple[int, RingConfig | WideConfig | Tile | None], ...]]

TABLES: dict[str, Table] = {
    "NVIDIA H200": {
        (6144, 4096): (
            (8, RingConfig(64, 8, 8, splits=4, joined=True)),  # 9.0 us, bf16 12.2
            (16, RingConfig(64, 16, 8, splits=4, joined=True)),  # 10.0 us, 15.6
            (32, RingConfig(64, 32, 4, splits=4, joined=True)),  # 16.1 us
            (64, RingConfig(64, 64, 4, splits=2, joined=True)),  # 16.2 us, 18.1
            (128, WideConfig(128, 5, 1, splits=2)),  # 22.3 us, in a ring 28.4, expanded first 32.3, bf16 18.3
            (256, WideConfig(128, 5, 1, splits=2)),  # 33.4 us, expanded first 39.0, bf16 23.1
        ),
        (4096, 4096): (
            (8, RingConfig(64, 8, 8, splits=8)),  # 6.2 us, bf16 8.9
            (16, RingConfig(64, 16, 8, splits=4, joined=True)),  # 8.1 us, 9.8
            (32, RingConfig(64, 32, 4, splits=4, joined=True)),  # 12.8 us
            (64, WideConfig(64, 4, 1, splits=4, rounded=False)),  # 12.8 us, in a ring 13.8, bf16 12.9
            (128, WideConfig(128, 5, 1, splits=4)),  # 19.0 us, expanded first 25.7, bf16 15.5
            (256, WideConfig(128, 5, 1, splits=2)),  # 22.9 us, expanded first 26.9, bf16 18.7
        ),
        (28672, 4096): (
            (8, RingConfig(64, 8, 4, splits=4)),  # 22.7 us, bf16 53.4
            (16, RingConfig(64, 16, 6, joined=True)),  # 25.4 us, 57.0
            (32, RingConfig(64, 32, 4, joined=True)),  # 29.3 us
            (64, RingConfig(64, 64, 4, joined=True)),  # 38.1 us, 64.1
            # 61.5 and 118.4 us, expanded first 149, 176, bf16 67.3, 93.3
            (256, RingConfig(64, 128, 2, rounded=True, joined=True)),
        ),
        (4096, 14336): (
            (8, RingConfig(64, 8, 8, splits=8, joined=True)),  # 14.0 us, bf16 26.9
            (16, RingConfig(64, 16, 6, splits=8, joined=True)),  # 15.1 us, 28.2
            (32, RingConfig(64, 32, 4, splits=8, joined=True)),  # 24.9 us
            (64, RingConfig(64, 64, 4, splits=4, joined=True)),  # 26.2 us, 36.1
            (128, WideConfig(128, 5, 1, splits=4, rounded=False)),  # 40.9 us, in a ring 46.3, bf16 37.1
            (256, WideConfig(256, 3, 1, splits=4)),  # 57.9 us, in a ring 73.0, expanded first 87.4, bf16 48.6
        ),
    }
}
"""Device name -> weight shape (N, K) of 4 bits in groups of 128 or more -> (maximum number of tokens, configuration),
ascending. None means that the weight is expanded first; numbers that no entry covers use `TILES`. Figures are for 1,
16, 64, 128 and 256 tokens in bfloat16 with float16 scales, 12 weights in turn, 28672 x 4096 with its gate.

The four products of a layer take 53 us for one token, 59 for 16 and 95 for 64; those in bfloat16 take 101, 111 and 121,
and reading the words takes 27. For 128 tokens they take 143 us, for 256 226; those in bfloat16 take 143 and 184. At 512
tokens all four are faster expanded."""

MOST_FUSED = 256
"""Number of tokens above which the weight is expanded first unless a table has an entry. Expanding the four weights of
such a layer takes 170 us."""

LEAST_ROUNDED = 128
"""Tokens of a tile from which the weight's numbers are scaled and rounded to x's dtype, like an expanded weight's.
Scaling sums instead would need a second set of them in registers."""

_DEQUANTIZED_ROWS = 64
"""Rows of a program of `dequantize_kernel`."""


@triton.jit
def codes_of(words, INDEX: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    """Return value INDEX of each word of words int16 [R, 32] minus the middle of the codes, 8 or 128, exact in
    `dtype`."""
    if INTERPRET or BITS == 8:
        codes = ((words >> (BITS * INDEX)) & ((1 << BITS) - 1)).to(tl.float32)
        return round_to(codes - (1 << (BITS - 1)), dtype)
    else:
        shifted = words if INDEX == 0 else shifted_words(words, INDEX)
        if dtype == tl.bfloat16:
            bits = tl.inline_asm_elementwise(
                "{.reg .b32 t, c; mov.b32 c, 0x43084308; lop3.b32 t, $1, 0x000f000f, 0x43004300, 0xea; "
                "sub.rn.bf16x2 $0, t, c;}",
                "=r,r", [shifted], dtype=tl.int16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            bits = tl.inline_asm_elementwise(
                "{.reg .b32 t, c; mov.b32 c, 0x64086408; lop3.b32 t, $1, 0x000f000f, 0x64006400, 0xea; "
                "sub.rn.f16x2 $0, t, c;}",
                "=r,r", [shifted], dtype=tl.int16, is_pure=True, pack=2,
            )  # fmt: skip
        return bits.to(dtype, bitcast=True)


@triton.jit
def shifted_words(words, INDEX: tl.constexpr):
    """Two words at a time; what comes over from the upper one is to be masked."""
    if INDEX == 1:
        return tl.inline_asm_elementwise("shr.u32 $0, $1, 4;", "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2)
    elif INDEX == 2:
        return tl.inline_asm_elementwise("shr.u32 $0, $1, 8;", "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise("shr.u32 $0, $1, 12;", "=r,r", [words], dtype=tl.int16, is_pure=True, pack=2)


@triton.jit
def shifted_codes(words, zeros, INDEX: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr):
    """Return value INDEX of each word of words int16 [R, 32] minus the zero point, zeros float32 [R], exact in
    `dtype`."""
    if INTERPRET or BITS == 8:
        codes = ((words >> (BITS * INDEX)) & ((1 << BITS) - 1)).to(tl.float32)
        return round_to(codes - zeros[:, None], dtype)
    else:
        BIAS: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0
        MAGIC: tl.constexpr = 0x4300 if dtype == tl.bfloat16 else 0x6400
        codes = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x000f000f, $2, 0xea;",
            "=r,r,r", [words if INDEX == 0 else shifted_words(words, INDEX), tl.full(words.shape, MAGIC, tl.int16)],
            dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
        shifted = (zeros + BIAS).to(dtype).to(tl.int16, bitcast=True)[:, None]
        shifted = tl.broadcast_to(shifted, words.shape)
        if dtype == tl.bfloat16:
            bits = tl.inline_asm_elementwise(
                "sub.rn.bf16x2 $0, $1, $2;", "=r,r,r", [codes, shifted], dtype=tl.int16, is_pure=True, pack=2
            )
        else:
            bits = tl.inline_asm_elementwise(
                "sub.rn.f16x2 $0, $1, $2;", "=r,r,r", [codes, shifted], dtype=tl.int16, is_pure=True, pack=2
            )
        return bits.to(dtype, bitcast=True)


@triton.jit
def scaled_codes(values, scales, dtype: tl.constexpr):
    """Return values [R, 32] of `dtype` times scales [R], rounded once."""
    if not INTERPRET and dtype == tl.bfloat16 and scales.dtype == tl.float16:
        # As in `hopper_packed.rounding_factors`, the scale is the sum of two numbers, and only the last sum is rounded.
        whole = scales.to(tl.float32)
        high = whole.to(tl.bfloat16)
        low = (whole - high.to(tl.float32)).to(tl.bfloat16)
        bits = tl.inline_asm_elementwise(
            "{.reg .b32 t; mul.rn.bf16x2 t, $1, $3; fma.rn.bf16x2 $0, $1, $2, t;}",
            "=r,r,r,r",
            [
                values.to(tl.int16, bitcast=True),
                tl.broadcast_to(high[:, None], values.shape).to(tl.int16, bitcast=True),
                tl.broadcast_to(low[:, None], values.shape).to(tl.int16, bitcast=True),
            ],
            dtype=tl.int16, is_pure=True, pack=2,
        )  # fmt: skip
        return bits.to(tl.bfloat16, bitcast=True)
    elif INTERPRET or scales.dtype != dtype:
        return round_to(values.to(tl.float32) * scales.to(tl.float32)[:, None], dtype)
    else:
        factors = tl.broadcast_to(scales[:, None], values.shape).to(tl.int16, bitcast=True)
        bits = values.to(tl.int16, bitcast=True)
        if dtype == tl.bfloat16:
            bits = tl.inline_asm_elementwise(
                "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [bits, factors], dtype=tl.int16, is_pure=True, pack=2
            )
        else:
            bits = tl.inline_asm_elementwise(
                "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [bits, factors], dtype=tl.int16, is_pure=True, pack=2
            )
        return bits.to(dtype, bitcast=True)


@triton.jit(do_not_specialize=["tokens"])
def packed_kernel(
    x_ptr, words_ptr, scales_ptr, zeros_ptr, bias_ptr, out_ptr, partial_ptr, counter_ptr, tokens,
    N: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, ROUNDED: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """x [tokens, K] times words [C, N, 32] with scales and zeros [G, N] -> out [tokens, N], over one of SPLITS ranges
    of the chunks. ROUNDED: the weight's numbers are scaled and rounded to x's dtype; otherwise sums over a group are
    scaled. Other parameters: see `tiles.finish`."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    PLANES: tl.constexpr = 16 // BITS
    CHUNK: tl.constexpr = 32 * PLANES
    CHUNKS: tl.constexpr = (K + CHUNK - 1) // CHUNK
    GROUPS: tl.constexpr = 1 if GROUP >= K else K // GROUP
    ONE_SCALE: tl.constexpr = GROUP >= K or GROUP % CHUNK == 0
    EVEN_K: tl.constexpr = K % CHUNK == 0
    release_consumers(USE_PDL)
    part = tl.program_id(0)
    read = rows_of(tl.program_id(1), N, BLOCK_N, GATED)
    lane = tl.arange(0, 32)
    token_ids = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    begin = CHUNKS * part // SPLITS
    end = CHUNKS * (part + 1) // SPLITS
    word_ptrs = words_ptr + begin.to(tl.int64) * (N * 32) + read[:, None] * 32 + lane[None, :]
    x_ptrs = x_ptr + token_ids[None, :].to(tl.int64) * K + lane[:, None]
    in_step = (token_ids < tokens)[None, :]
    wait_for_producers(USE_PDL)

    # Triton does not pipeline loads of less than four bytes per thread, so scales are loaded one chunk ahead here.
    group = tl.minimum(begin * CHUNK // GROUP, GROUPS - 1)
    next_scales = tl.load(scales_ptr + group * N + read)
    next_zeros = tl.load(zeros_ptr + group * N + read)
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    if not ROUNDED:
        # A product on the tensor cores, which have time for it, sums each token's features for every row.
        ones = tl.full([BLOCK_N, 32], 1.0, tl.float32 if INTERPRET else dtype)
    for chunk in range(begin, end):
        words = tl.load(word_ptrs, eviction_policy="evict_first")
        word_ptrs += N * 32
        if not ROUNDED:
            total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
            x_sum = total
        for index in tl.static_range(PLANES):
            first = chunk * CHUNK + index * 32
            mask = in_step if EVEN_K else in_step & (first + lane < K)[:, None]
            x = tl.load(x_ptrs + first, mask=mask, other=0.0)
            if index == 0 or not ONE_SCALE:
                scales, zeros = next_scales, next_zeros.to(tl.float32)
                coming = tl.minimum((first + (CHUNK if ONE_SCALE else 32)) // GROUP, GROUPS - 1)
                next_scales = tl.load(scales_ptr + coming * N + read)
                next_zeros = tl.load(zeros_ptr + coming * N + read)
            if ROUNDED:
                acc = dot(scaled_codes(shifted_codes(words, zeros, index, BITS, dtype), scales, dtype), x, acc)
            else:
                total = dot(codes_of(words, index, BITS, dtype), x, total)
                x_sum = dot(ones, x, x_sum)
                if index == PLANES - 1 or not ONE_SCALE:
                    left = zeros - (1 << (BITS - 1))
                    acc += (total - left[:, None] * x_sum) * scales.to(tl.float32)[:, None]
                    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
                    x_sum = total

    finish(acc, bias_ptr, out_ptr, partial_ptr, counter_ptr, tokens, N, SPLITS, HAS_BIAS, GATED)


@triton.jit
def dequantize_kernel(
    words_ptr, scales_ptr, zeros_ptr, order_ptr, out_ptr,
    N: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
    ORDERED: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Expand words [E, C, N, 32] with scales and zeros [E, G, N], and order [E, K] if ORDERED, to out [E, N, K]. A
    program has BLOCK_N rows of one chunk of an expert."""
    PLANES: tl.constexpr = 16 // BITS
    GROUPS: tl.constexpr = 1 if GROUP >= K else K // GROUP
    chunk = tl.program_id(0)
    expert = tl.program_id(2).to(tl.int64)
    words_ptr += expert * tl.num_programs(0) * N * 32
    scales_ptr += expert * (GROUPS * N)
    zeros_ptr += expert * (GROUPS * N)
    out_ptr += expert * N * K
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, 32)
    exists = rows < N
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    words = tl.load(words_ptr + (chunk.to(tl.int64) * N + rows[:, None]) * 32 + lane[None, :], mask=exists[:, None])
    for index in tl.static_range(PLANES):
        first = (chunk * PLANES + index) * 32
        group = tl.minimum(first // GROUP, GROUPS - 1)
        scales = tl.load(scales_ptr + group * N + rows, mask=exists, other=0).to(tl.float32)
        zeros = tl.load(zeros_ptr + group * N + rows, mask=exists, other=0).to(tl.float32)
        codes = (words >> (BITS * index)) & ((1 << BITS) - 1)
        weight = (codes.to(tl.float32) - zeros[:, None]) * scales[:, None]
        filled = first + lane < K
        columns = first + lane
        if ORDERED:
            columns = tl.load(order_ptr + expert * K + columns, mask=filled, other=0)
        mask = exists[:, None] & filled[None, :]
        out_ptrs = out_ptr + rows[:, None].to(tl.int64) * K + columns[None, :]
        tl.store(out_ptrs, round_to(weight, out_ptr.dtype.element_ty), mask=mask)


def dequantize(
    words: Tensor,
    scales: Tensor,
    zeros: Tensor,
    *,
    bits: int,
    group_size: int,
    in_features: int,
    dtype: torch.dtype,
) -> Tensor:
    weight = PackedWeight(words[None], scales[None], zeros[None], None, bits, group_size, in_features)
    return expand_experts(weight, dtype)[0]


def linear_packed(x: Tensor, weight: PackedWeight, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    n = weight.out_features
    check_out(x, n, out)
    rows = _rows(x, weight)
    into = None if out is None else out.view(-1, n)
    y = _decoded(rows, weight, bias, gated=False, out=into)
    if y is None:
        y = linear(rows, _expanded(weight, x.dtype), bias, out=into)
    return y.view(*x.shape[:-1], n) if out is None else out


def linear_packed_silu_mul(x: Tensor, weight: PackedWeight) -> Tensor:
    rows = _rows(x, weight)
    y = _decoded(rows, weight, None, gated=True)
    if y is None:
        y = linear_silu_mul(rows, _expanded(weight, x.dtype))
    return y.view(*x.shape[:-1], weight.out_features // 2)


def _rows(x: Tensor, weight: PackedWeight) -> Tensor:
    """Return x as [T, K] in the weight's order of features."""
    rows = x.reshape(-1, x.shape[-1])
    return rows.contiguous() if weight.order is None else rows.index_select(1, weight.order)


def _decoded(
    rows: Tensor, weight: PackedWeight, bias: Tensor | None, *, gated: bool, out: Tensor | None = None
) -> Tensor | None:
    """Return the product, with its gate if `gated`, from a kernel that decodes the weight, or None if the weight is to
    be expanded first."""
    tokens = len(rows)
    if tokens == 0 or rows.dtype.itemsize != 2:
        return None
    table = _table(rows.device)
    if table:
        from asyncllm.kernels.triton.linear.hopper_packed import fits, ring
        from asyncllm.kernels.triton.linear.hopper_packed_wide import wide

        entries = table.get((weight.out_features, weight.in_features), ()) if fits(rows, weight) else ()
        for most, config in entries:
            if tokens <= most:
                if config is None:
                    return None
                if isinstance(config, RingConfig):
                    return ring(rows, weight, bias, config, gated=gated, out=out)
                if isinstance(config, WideConfig):
                    return wide(rows, weight, bias, config, gated=gated, out=out)
                return multiply(rows, weight, bias, config, gated=gated, out=out)
    if tokens > MOST_FUSED:
        return None
    return multiply(rows, weight, bias, choose_tile(TILES, tokens), gated=gated, out=out)


@cache
def _table(device: torch.device) -> Table:
    return TABLES.get(table_name(device), {})


def _expanded(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    return dequantize(
        weight.words,
        weight.scales,
        weight.zeros,
        bits=weight.bits,
        group_size=weight.group_size,
        in_features=weight.in_features,
        dtype=dtype,
    )


def multiply(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    tile: Tile,
    *,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return 16-bit x [T, K], T not 0, contiguous and in the weight's order of features, times the weight, in `out` [T,
    N] if given. With `gated` the result is silu(gate) * up [T, N / 2] of a weight without a bias."""
    tokens, k = x.shape
    n = weight.out_features
    if out is None:
        out = torch.empty((tokens, n // 2 if gated else n), dtype=x.dtype, device=x.device)
    grid, partial, counters = split(tile, out, -(-k // chunk_of(weight.bits)), gated=gated)
    launch(
        packed_kernel,
        grid,
        (x, weight.words, weight.scales, weight.zeros, x if bias is None else bias, out, partial, counters),
        (tokens,),
        num_warps=tile.warps,
        num_stages=tile.stages,
        N=n,
        K=k,
        BITS=weight.bits,
        GROUP=weight.group_size,
        BLOCK_M=tile.tokens,
        BLOCK_N=tile.rows,
        SPLITS=grid[0],
        ROUNDED=tile.tokens >= LEAST_ROUNDED,
        GATED=gated,
        HAS_BIAS=bias is not None,
    )
    return out


def expand_experts(stack: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Return the weights of all experts [E, N, K] in `dtype`, with input features in their natural order."""
    experts, chunks, n, _ = stack.words.shape
    out = torch.empty((experts, n, stack.in_features), dtype=dtype, device=stack.words.device)
    launch(
        dequantize_kernel,
        (chunks, triton.cdiv(n, _DEQUANTIZED_ROWS), experts),
        (
            *(stack.words, stack.scales, stack.zeros, stack.words if stack.order is None else stack.order),
            out,
        ),
        N=n,
        K=stack.in_features,
        BITS=stack.bits,
        GROUP=stack.group_size,
        BLOCK_N=_DEQUANTIZED_ROWS,
        ORDERED=stack.order is not None,
    )
    return out
