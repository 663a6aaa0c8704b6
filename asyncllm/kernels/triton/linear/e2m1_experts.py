"""Experts of e2m1 numbers with exponents (`kernels.e2m1_experts`), decoded in the products of `triton.moe`'s blocks.

Decoding is most of what such a product of few tokens has to do: shifts and masks have half the speed of floating-point
operations. So the four codes of a word are where few of them bring sign and magnitude to their places in a bfloat16
(`kernels.e2m1`), and the four exponents of a row's words are one number, which is copied ahead with the words. A block
of 128 tokens is decoded for in the time that its products leave, so that prompts need no expanded weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.e2m1 import CHUNK, MAGNITUDES, MAX_E8M0, SIGNS, E2M1Weight
from asyncllm.kernels.moe import GATE_SLOPE
from asyncllm.kernels.triton.expert_blocks import Blocks
from asyncllm.kernels.triton.language import INTERPRET, dot, release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.launch import launch
from asyncllm.kernels.triton.linear.packed_experts import blocks_of
from asyncllm.kernels.triton.linear.tiles import Tile
from asyncllm.kernels.triton.moe import (
    BLOCKS_PER_GROUP,
    add_up,
    assignments_of,
    fused_experts,
    rows_of,
    store_block,
    tile_of,
)

__all__ = [
    "LEAST_WIDE",
    "TILES",
    "UNGROUPED_TILE",
    "e2m1_experts",
    "e2m1_experts_kernel",
    "expand_e2m1",
    "expand_kernel",
    "multiply",
]

TILES = {
    16: (Tile(128, 16, 4, 4), Tile(64, 16, 4, 4)),
    32: (Tile(128, 32, 4, 3), Tile(128, 32, 4, 3)),
    64: (Tile(128, 64, 4, 3), Tile(128, 64, 4, 3)),
    128: (Tile(128, 128, 8, 3), Tile(128, 128, 8, 3)),
}
"""By tokens per block: the tiles of the first and of the second product. On an H100, in us for both products of a layer
of gpt-oss in blocks of 16, 32, 64 and 128: 64 tokens 165, 176, -, -; 128 tokens -, 175, 214, -; 256 tokens -, 268, 221,
-; 512 tokens -, -, 330, 348; 1,024 tokens -, -, 574, 573; 8,192 tokens -, -, 3,712, 3,201. Expanding the weights takes
815 us and the products then 3,060. The second product of 8, 16 and 64 tokens takes 47, 51 and 61 us with 64 rows, and
51, 55 and 60 with 128. Otherwise tiles of 64 rows are up to 20 % slower, and those of 256 rows 3 to 30 %. In blocks of
128, four warps take 3,264 us for 8,192 tokens, and blocks of 256 tokens 3,786."""

UNGROUPED_TILE = Tile(64, 16, 4, 4)
"""For blocks with one token each. There are few of them, and twice as many rows would halve the number of programs."""

LEAST_WIDE = 128
"""Average number of assignments per expert from which blocks of 128 are faster than those of 64."""

EXPANDED_ROWS = 64
"""Rows of a program of `expand_kernel`."""

_MOST_EXPONENT = tl.constexpr(MAX_E8M0)

_CHUNK = tl.constexpr(CHUNK)
_SIGNS = tl.constexpr(SIGNS)
_MAGNITUDES = tl.constexpr(MAGNITUDES)

_PLACED = (
    "mov.b32 m, $1;",
    "shl.b32 m, $1, 3; shl.b32 s, $1, 4; lop3.b32 m, s, m, 0x80008000, 0xe4;",
    "shl.b32 m, $1, 6;",
    "shr.b32 m, $1, 6; shl.b32 s, $1, 5; lop3.b32 m, s, m, 0x80008000, 0xe4;",
)
"""Brings each code of two words to the place of code 0; other bits are left around it. 0xe4 selects by the mask."""

_TO_BFLOAT16 = "{{.reg .b32 s, m; {} and.b32 m, m, 0x81c081c0; mul.rn.bf16x2 $0, m, $2;}}"
"""The numbers of a code of two words, times two factors."""

_TO_FLOAT16 = (
    "{{.reg .b32 s, m; {} and.b32 s, m, 0x80008000; and.b32 m, m, 0x01c001c0; shl.b32 m, m, 3; or.b32 m, m, s; "
    "mov.b32 s, 0x74007400; mul.rn.f16x2 $0, m, s;}}"
)
"""The numbers of a code of two words."""

_BFLOAT16_0, _BFLOAT16_1, _BFLOAT16_2, _BFLOAT16_3 = (tl.constexpr(_TO_BFLOAT16.format(each)) for each in _PLACED)
_FLOAT16_0, _FLOAT16_1, _FLOAT16_2, _FLOAT16_3 = (tl.constexpr(_TO_FLOAT16.format(each)) for each in _PLACED)


@triton.jit
def _value(words, INDEX: tl.constexpr):
    """Return the numbers INDEX of words int16 in float32."""
    code = words >> _MAGNITUDES[INDEX]
    exponent, fraction = (code >> 1) & 3, (code & 1).to(tl.float32) * 0.5
    power = tl.where(exponent == 3, 4.0, tl.where(exponent == 2, 2.0, 1.0))
    magnitude = tl.where(exponent == 0, fraction, (fraction + 1.0) * power)
    return tl.where(((words >> _SIGNS[INDEX]) & 1) != 0, -magnitude, magnitude)


@triton.jit
def _factors(exponents):
    """Return 2 to the exponents (e8m0), int32, as float32."""
    # The smallest exponent gives a subnormal number.
    return tl.where(exponents == 0, 0x400000, exponents << 23).to(tl.float32, bitcast=True)


@triton.jit
def _applied(
    words, factors, INDEX: tl.constexpr, AT_0: tl.constexpr, AT_1: tl.constexpr, AT_2: tl.constexpr, AT_3: tl.constexpr
):
    """Apply the instructions for INDEX to pairs of words and factors, int16."""
    ASM: tl.constexpr = AT_0 if INDEX == 0 else (AT_1 if INDEX == 1 else (AT_2 if INDEX == 2 else AT_3))
    return tl.inline_asm_elementwise(ASM, "=r,r,r", [words, factors], dtype=tl.int16, is_pure=True, pack=2)


@triton.jit
def _scaled(words, exponents, INDEX: tl.constexpr, SHIFT: tl.constexpr):
    """Return the numbers INDEX of words int16 [R, 32] times their scales, exponents int32 [R] of at most 128 + SHIFT,
    and 2 ** -SHIFT, exact in bfloat16.

    The bits of the magnitude become the last exponent bits and the first fraction bit, which gives the smallest
    numbers. The scale and the power of two that they lack are one factor.
    """
    if INTERPRET:
        values = _value(words, INDEX)
        return round_to(values * (_factors(exponents) * 2.0**-SHIFT)[:, None], tl.bfloat16)
    else:
        factors = ((exponents + (126 - SHIFT)) << 7).to(tl.int16)[:, None]
        bits = _applied(words, factors, INDEX, _BFLOAT16_0, _BFLOAT16_1, _BFLOAT16_2, _BFLOAT16_3)
        return bits.to(tl.bfloat16, bitcast=True)


@triton.jit
def _unscaled(words, INDEX: tl.constexpr):
    """Return the numbers INDEX of words int16 [R, 32] in float16."""
    if INTERPRET:
        return round_to(_value(words, INDEX), tl.float16)
    else:
        bits = _applied(words, words, INDEX, _FLOAT16_0, _FLOAT16_1, _FLOAT16_2, _FLOAT16_3)
        return bits.to(tl.float16, bitcast=True)


@triton.jit(do_not_specialize=["num_assignments", "max_blocks"])
def e2m1_experts_kernel(
    x_ptr, words_ptr, exponents_ptr, y_ptr, assignments_ptr, block_experts_ptr, bias_ptr, num_assignments, max_blocks,
    N: tl.constexpr, K: tl.constexpr, ASSIGNMENTS_PER_X: tl.constexpr, SWIGLU: tl.constexpr, BIAS: tl.constexpr,
    LIMIT: tl.constexpr, SLOPE: tl.constexpr, UNGROUPED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCKS_PER_GROUP: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """See `moe.grouped_matmul_kernel`. Weights are words [E, C, N, 32] with exponents [E, C, N]."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    CHUNKS: tl.constexpr = (K + _CHUNK - 1) // _CHUNK
    # A bfloat16 can represent an e2m1 number times any exponent, so sums need no scaling afterwards.
    SCALED_FIRST: tl.constexpr = dtype == tl.bfloat16
    SHIFT: tl.constexpr = _MOST_EXPONENT - 128
    OUTPUTS: tl.constexpr = N // 2 if SWIGLU else N
    block, first_output = tile_of(max_blocks, OUTPUTS, BLOCK_N // 2 if SWIGLU else BLOCK_N, BLOCKS_PER_GROUP)
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    expert = tl.load(block_experts_ptr + block).to(tl.int64)
    if expert < 0:
        return
    assignments = assignments_of(block, assignments_ptr, num_assignments, BLOCK_M, UNGROUPED)
    filled = assignments < num_assignments
    # As in `moe.grouped_matmul_kernel`, padding loads nothing.
    x_row = tl.where(filled, assignments // ASSIGNMENTS_PER_X, 0).to(tl.int64)
    read = rows_of(first_output, OUTPUTS, BLOCK_N, SWIGLU)
    lane = tl.arange(0, 32)
    word_ptrs = words_ptr + expert * (CHUNKS * N * 32) + read[:, None] * 32 + lane[None, :]
    exponent_ptrs = exponents_ptr + expert * (CHUNKS * N) + read

    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for chunk in range(0, CHUNKS):
        words = tl.load(word_ptrs)
        exponents = tl.load(exponent_ptrs)
        word_ptrs += N * 32
        exponent_ptrs += N
        for index in tl.static_range(4):
            columns = chunk * _CHUNK + index * 32 + lane
            x_ptrs = x_ptr + x_row[None, :] * K + columns[:, None]
            x = tl.load(x_ptrs, mask=filled[None, :] & (columns < K)[:, None], other=0.0)
            own = (exponents >> (8 * index)) & 255
            if SCALED_FIRST:
                acc = dot(_scaled(words, own, index, SHIFT), x, acc)
            else:
                acc += dot(_unscaled(words, index), x, tl.zeros_like(acc)) * _factors(own)[:, None]
    if SCALED_FIRST:
        acc *= 2.0**SHIFT
    if BIAS:
        acc += tl.load(bias_ptr + expert * N + read).to(tl.float32)[:, None]
    store_block(acc, y_ptr, assignments, filled, first_output, OUTPUTS, SWIGLU, LIMIT, SLOPE)


@triton.jit
def expand_kernel(
    words_ptr, exponents_ptr, out_ptr,
    N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Expand words [E, C, N, 32] with exponents [E, C, N] to out [E, N, K]. A program has BLOCK_N rows of one chunk of
    an expert."""
    chunk = tl.program_id(0)
    expert = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, 32)
    exists = row < N
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    place = (expert * tl.num_programs(0) + chunk) * N + row
    exponents = tl.load(exponents_ptr + place, mask=exists, other=0)
    words = tl.load(words_ptr + place[:, None] * 32 + lane[None, :], mask=exists[:, None], other=0)
    for index in tl.static_range(4):
        column = chunk * _CHUNK + index * 32 + lane
        factors = _factors((exponents >> (8 * index)) & 255)
        numbers = _value(words, index) * factors[:, None]
        out_ptrs = out_ptr + (expert * N + row)[:, None] * K + column[None, :]
        tl.store(out_ptrs, round_to(numbers, out_ptr.dtype.element_ty), mask=exists[:, None] & (column < K)[None, :])


def expand_e2m1(words: Tensor, exponents: Tensor, *, in_features: int, dtype: torch.dtype) -> Tensor:
    experts, chunks, n, _ = words.shape
    out = torch.empty(experts, n, in_features, dtype=dtype, device=words.device)
    if experts:
        grid = (chunks, triton.cdiv(n, EXPANDED_ROWS), experts)
        launch(expand_kernel, grid, (words, exponents, out), N=n, K=in_features, BLOCK_N=EXPANDED_ROWS)
    return out


def e2m1_experts(
    x: Tensor,
    gate_up: E2M1Weight,
    down: E2M1Weight,
    weights: Tensor,
    expert_ids: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    limit: float | None = None,
) -> Tensor:
    num_tokens, top_k = expert_ids.shape
    num_experts, num_assignments = len(gate_up.words), expert_ids.numel()
    few = num_assignments < LEAST_WIDE * num_experts
    # In float16 sums are scaled after the product, which leaves no registers for large tiles.
    if x.dtype == torch.float32 or (x.dtype == torch.float16 and not few):
        first, second = gate_up.expanded(x.dtype), down.expanded(x.dtype)
        return fused_experts(
            x, first, second, weights, expert_ids, gate_up_bias=gate_up_bias, down_bias=down_bias, limit=limit
        )
    out = torch.empty_like(x)
    if not num_tokens:
        return out
    most = 32 if x.dtype == torch.float16 else 64 if few else 128
    blocks = blocks_of(expert_ids, num_experts, UNGROUPED_TILE.tokens, most)
    hidden = torch.empty(num_assignments, gate_up.out_features // 2, dtype=x.dtype, device=x.device)
    outputs = torch.empty(num_assignments, down.out_features, dtype=x.dtype, device=x.device)
    multiply(x, gate_up, hidden, blocks, top_k=top_k, swiglu=True, bias=gate_up_bias, limit=limit)
    multiply(hidden, down, outputs, blocks, top_k=1, swiglu=False, bias=down_bias)
    add_up(outputs, weights, out)
    return out


def multiply(
    x: Tensor,
    weight: E2M1Weight,
    y: Tensor,
    blocks: Blocks,
    *,
    top_k: int,
    swiglu: bool,
    bias: Tensor | None = None,
    limit: float | None = None,
) -> None:
    """See `moe.multiply`. x [*, K] is 16-bit, bias [E, N]."""
    tile = UNGROUPED_TILE if blocks.ungrouped else TILES[blocks.size][not swiglu]
    num_blocks = blocks.experts.shape[0]
    launch(
        e2m1_experts_kernel,
        (num_blocks * triton.cdiv(y.shape[1], tile.rows // 2 if swiglu else tile.rows), 1, 1),
        (
            *(x, weight.words, weight.exponents, y, blocks.assignments, blocks.experts),
            x if bias is None else bias,
        ),
        (y.shape[0], num_blocks),
        num_warps=tile.warps,
        num_stages=tile.stages,
        N=weight.out_features,
        K=weight.in_features,
        ASSIGNMENTS_PER_X=top_k,
        SWIGLU=swiglu,
        BIAS=bias is not None,
        LIMIT=limit or 0.0,
        SLOPE=GATE_SLOPE,
        UNGROUPED=blocks.ungrouped,
        BLOCK_M=tile.tokens,
        BLOCK_N=tile.rows,
        BLOCKS_PER_GROUP=BLOCKS_PER_GROUP,
    )
