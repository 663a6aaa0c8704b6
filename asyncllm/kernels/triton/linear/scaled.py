"""Products of numbers of 8 bits (`kernels.scaled`): activations are rounded by one kernel and multiplied by another.

Sums of products of fp8 go over to float32 registers after each 128 input features, as Hopper's tensor cores keep some
14 bits of theirs; sums of integers are exact. Under the interpreter, which knows no fp8, codes are bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.linear import check_out
from asyncllm.kernels.scaled import GROUP, LARGEST, ScaledWeight
from asyncllm.kernels.triton.language import (
    INTERPRET,
    e4m3_bits,
    e4m3_value,
    nearest_integer,
    release_consumers,
    wait_for_producers,
)
from asyncllm.kernels.triton.launch import launch
from asyncllm.kernels.triton.linear.tiles import Tile, choose_tile, finish, split

__all__ = ["TILES", "linear_scaled", "multiply", "round_rows"]

TILES = (
    Tile(64, 16, 4, 4, programs=256),
    Tile(64, 32, 4, 4, programs=256),
    Tile(64, 64, 4, 4, programs=128),
    Tile(128, 128, 8, 4),
)
"""By tokens. The first three are near the best of a small search on an H200 with the same tiles, without the rounding
of activations and with sums left to the tensor cores: 66 us for the four products of a Llama-3-8B layer with one token,
68 with 16, 76 with 64, where cuBLAS in bfloat16 takes 122, 121 and 128. As they are here, nothing is measured."""


@triton.jit
def round_rows_kernel(
    x_ptr, codes_ptr, scales_ptr, input_scale_ptr,
    K: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, LARGEST_CODE: tl.constexpr, INTEGER: tl.constexpr,
    STATIC: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """x [T, K] -> codes [T, K], bytes, and scales [T, groups]: program (row, group) has SIZE input features."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    x_row = x_ptr + row * K
    end = tl.minimum((group + 1) * SIZE, K)
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    if STATIC:
        scale = tl.load(input_scale_ptr)
    else:
        largest = tl.zeros([BLOCK], tl.float32)
        for start in range(group * SIZE, end, BLOCK):
            inside = start + columns < end
            x = tl.abs(tl.load(x_row + start + columns, mask=inside, other=0.0).to(tl.float32))
            # A maximum may pass over NaN, a sum does not: one in the row is one in its scale.
            largest = tl.where(x == x, tl.maximum(largest, x), x + largest)
        found = tl.max(largest, 0)
        found = tl.where(tl.sum((largest != largest).to(tl.int32), 0) > 0, float("nan"), found)
        scale = tl.div_rn(tl.where(found < 1e-12, 1e-12, found), LARGEST_CODE)
    for start in range(group * SIZE, end, BLOCK):
        inside = start + columns < end
        x = tl.div_rn(tl.load(x_row + start + columns, mask=inside, other=0.0).to(tl.float32), scale)
        clipped = tl.where(x > LARGEST_CODE, LARGEST_CODE, tl.where(x < -LARGEST_CODE, -LARGEST_CODE, x))
        if INTEGER:
            # What is not a number is in the scale.
            codes = nearest_integer(tl.where(clipped == clipped, clipped, 0.0)).to(tl.int8)
        else:
            codes = e4m3_bits(clipped)
        tl.store(codes_ptr + row * K + start + columns, codes, mask=inside)
    tl.store(scales_ptr + row * tl.num_programs(1) + group, scale)


@triton.jit
def _products(w, x, acc, INTEGER: tl.constexpr):
    """acc + w @ x in float32, or in int32 for integers."""
    if INTEGER:
        if INTERPRET:
            return acc + tl.dot(w.to(tl.float32), x.to(tl.float32), input_precision="ieee").to(tl.int32)
        else:
            return tl.dot(w, x, acc, out_dtype=tl.int32)
    else:
        if INTERPRET:
            return acc + tl.dot(e4m3_value(w), e4m3_value(x), input_precision="ieee")
        else:
            return acc + tl.dot(w, x)


@triton.jit(do_not_specialize=["tokens"])
def scaled_kernel(
    x_ptr, x_scales_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr, partial_ptr, counter_ptr, tokens,
    N: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, INTEGER: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Codes x [tokens, K] with scales [tokens, GROUPS] times codes weight [N, K] with scales [GROUPS, N] -> out
    [tokens, N], over one of SPLITS ranges of K; BLOCK_K of a group. partial, counter: as `tiles.finish`."""
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    release_consumers(USE_PDL)
    part = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows beyond the end repeat the last one, which costs no mask; their products are not stored.
    read = rows if N % BLOCK_N == 0 else tl.minimum(rows, N - 1)
    token_ids = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    # So do tokens.
    token = tl.minimum(token_ids, tokens - 1)
    lane = tl.arange(0, BLOCK_K)
    w_ptrs = weight_ptr + read[:, None].to(tl.int64) * K + lane[None, :]
    x_ptrs = x_ptr + token[:, None].to(tl.int64) * K + lane[None, :]
    wait_for_producers(USE_PDL)

    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.int32 if INTEGER and GROUPS == 1 else tl.float32)
    for step in range(STEPS * part // SPLITS, STEPS * (part + 1) // SPLITS):
        first = step * BLOCK_K
        if EVEN_K:
            w = tl.load(w_ptrs + first, eviction_policy="evict_first")
            x = tl.load(x_ptrs + first)
        else:
            w = tl.load(w_ptrs + first, mask=(first + lane < K)[None, :], other=0.0)
            x = tl.load(x_ptrs + first, mask=(first + lane < K)[None, :], other=0.0)
        if GROUPS > 1:
            none = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.int32 if INTEGER else tl.float32)
            scales = tl.load(scales_ptr + step * N + read)
            acc += _products(w, tl.trans(x), none, INTEGER).to(tl.float32) * (
                scales[:, None] * tl.load(x_scales_ptr + token * GROUPS + step)[None, :]
            )
        else:
            acc = _products(w, tl.trans(x), acc, INTEGER)
    total = acc.to(tl.float32)
    if GROUPS == 1:
        total *= tl.load(scales_ptr + read)[:, None] * tl.load(x_scales_ptr + token)[None, :]
    finish(total, bias_ptr, out_ptr, partial_ptr, counter_ptr, tokens, N, SPLITS, HAS_BIAS)


def linear_scaled(x: Tensor, weight: ScaledWeight, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    n = weight.codes.shape[0]
    check_out(x, n, out)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    into = torch.empty((len(rows), n), dtype=x.dtype, device=x.device) if out is None else out.view(-1, n)
    if len(rows):
        codes, scales = round_rows(rows, weight)
        multiply(codes, scales, weight, bias, choose_tile(TILES, len(rows)), into)
    return into.view(*x.shape[:-1], n) if out is None else out


def round_rows(rows: Tensor, weight: ScaledWeight) -> tuple[Tensor, Tensor]:
    """rows [T, K], contiguous and not empty -> codes [T, K] of the weight's type and scales [T, G]."""
    tokens, k = rows.shape
    dtype, groups = weight.codes.dtype, weight.scales.shape[0]
    size = GROUP if weight.grouped else k
    integer = dtype == torch.int8
    codes = torch.empty((tokens, k), dtype=torch.int8 if integer else torch.uint8, device=rows.device)
    scales = torch.empty((tokens, groups), dtype=torch.float32, device=rows.device)
    launch(
        round_rows_kernel,
        (tokens, groups, 1),
        (rows, codes, scales, scales if weight.input_scale is None else weight.input_scale),
        num_warps=1 if weight.grouped else 4,
        K=k,
        SIZE=size,
        BLOCK=min(triton.next_power_of_2(size), 2048),
        LARGEST_CODE=LARGEST[dtype],
        INTEGER=integer,
        STATIC=weight.input_scale is not None,
    )
    return codes.view(dtype), scales


def multiply(codes: Tensor, scales: Tensor, weight: ScaledWeight, bias: Tensor | None, tile: Tile, out: Tensor) -> None:
    """codes [T, K] and scales [T, G] of rows, times the weight, plus bias [N], into out [T, N]."""
    n, k = weight.codes.shape
    grid, partial, counters = split(tile, out, triton.cdiv(k, GROUP))
    x, w = _operand(codes), _operand(weight.codes)
    launch(
        scaled_kernel,
        grid,
        (x, scales, w, weight.scales, scales if bias is None else bias, out, partial, counters),
        (len(codes),),
        num_warps=tile.warps,
        num_stages=tile.stages,
        N=n,
        K=k,
        GROUPS=weight.scales.shape[0],
        INTEGER=weight.codes.dtype == torch.int8,
        BLOCK_M=tile.tokens,
        BLOCK_N=tile.rows,
        BLOCK_K=GROUP,
        SPLITS=grid[0],
        HAS_BIAS=bias is not None,
    )


def _operand(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8) if INTERPRET.value and codes.dtype != torch.int8 else codes
