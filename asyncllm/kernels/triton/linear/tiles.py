"""Tiles of products with quantized weights, and the storing of their sums.

The weight is the first operand of the tensor cores, as in `linear.small`. For few tokens the sum is split over several
programs, of which the last to arrive adds up the parts in the order of the splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.activation import apply_gate
from asyncllm.kernels.triton.counters import NUM_COUNTERS, zero_counters
from asyncllm.kernels.triton.language import round_to

__all__ = ["RingConfig", "Tile", "WideConfig", "choose_tile", "finish", "rows_of", "split"]

_MAX_SPLITS = 8


class Tile(NamedTuple):
    """The tile of a program: `rows` of the weight by `tokens`. `programs`: approximate number of programs to reach by
    splitting the sum."""

    rows: int
    tokens: int
    warps: int
    stages: int
    programs: int = 1


class RingConfig(NamedTuple):
    """Tile of `hopper_packed.ring_kernel`: `rows` (64 or 128) of the weight, or of gate and of up, by `tokens`.
    `joined`: one copy loads a stage's tokens instead of four, and one its gate and up words instead of two; requires
    input features in whole runs of 32."""

    rows: int
    tokens: int
    stages: int
    splits: int = 1
    rounded: bool = False
    joined: bool = False


class WideConfig(NamedTuple):
    """Tile of `hopper_packed_wide.wide_kernel`: 128 or 256 (two `halves`) rows of the weight, or 128 gate and 128 up
    rows, by `tokens`, with the sum divided into about `splits` ranges at most."""

    tokens: int
    stages: int
    halves: int = 2
    splits: int = 4
    rounded: bool = True


def choose_tile(tiles: Sequence[Tile], tokens: int) -> Tile:
    """Return the first tile that holds all tokens, or the last."""
    return next((tile for tile in tiles if tokens <= tile.tokens), tiles[-1])


def split(tile: Tile, out: Tensor, steps: int, *, gated: bool = False) -> tuple[tuple[int, int, int], Tensor, Tensor]:
    """Return the grid (splits, tiles of rows, tiles of tokens) of a product into out [T, N] whose sum has `steps`, the
    memory for partial sums, and the counters. With one split both are unused and may be any tensor. `gated`: see
    `finish`."""
    tokens, n = out.shape
    rows, token_tiles = triton.cdiv(n * (2 if gated else 1), tile.rows), triton.cdiv(tokens, tile.tokens)
    tiles, splits = rows * token_tiles, 1
    while splits < _MAX_SPLITS and splits * 2 <= steps and splits * tiles * 3 < tile.programs * 2:
        splits *= 2
    if splits == 1 or tiles > NUM_COUNTERS:
        return (1, rows, token_tiles), out, out
    partial = torch.empty(splits * tiles * tile.rows * tile.tokens, dtype=torch.float32, device=out.device)
    return (splits, rows, token_tiles), partial, zero_counters(out.device)


@triton.jit
def finish(
    acc, bias_ptr, out_ptr, partial_ptr, counter_ptr, tokens,
    N: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr = False,
):  # fmt: skip
    """Store acc [rows, tokens] of program (split, tile of rows, tile of tokens), plus the bias, to out [tokens, N].

    partial: float32 [tiles, SPLITS, rows, tokens]. counter: int32 [tiles], zero before and after. With GATED rows are
    those of `rows_of`, and silu(gate) * up is stored, without a bias, to out [tokens, N / 2].
    """
    BLOCK_N: tl.constexpr = acc.shape[0]
    BLOCK_M: tl.constexpr = acc.shape[1]
    tile = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    if SPLITS == 1:
        _store(acc, bias_ptr, out_ptr, tokens, N, HAS_BIAS, GATED)
    else:
        TILE: tl.constexpr = BLOCK_N * BLOCK_M
        inside = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        partial_ptrs = partial_ptr + tile * (SPLITS * TILE) + inside
        tl.store(partial_ptrs + tl.program_id(0) * TILE, acc)
        tl.debug_barrier()
        if tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == SPLITS - 1:
            summed = tl.load(partial_ptrs, cache_modifier=".cg")
            for other in tl.static_range(1, SPLITS):
                summed += tl.load(partial_ptrs + other * TILE, cache_modifier=".cg")
            _store(summed, bias_ptr, out_ptr, tokens, N, HAS_BIAS, GATED)
            tl.store(counter_ptr + tile, 0)


@triton.jit
def rows_of(tile, N: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """Return the rows of weight [N, K] in a tile. With GATED eight gate rows alternate with the corresponding up rows,
    so that one thread has the products of both. Rows beyond the end repeat the last one."""
    own = tl.arange(0, BLOCK_N)
    if GATED:
        rows = tile * (BLOCK_N // 2) + own // 16 * 8 + own % 8
        if N % BLOCK_N:
            rows = tl.minimum(rows, N // 2 - 1)
        return rows + own // 8 % 2 * (N // 2)
    else:
        rows = tile * BLOCK_N + own
        return rows if N % BLOCK_N == 0 else tl.minimum(rows, N - 1)


@triton.jit
def _store(acc, bias_ptr, out_ptr, tokens, N: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr):
    BLOCK_M: tl.constexpr = acc.shape[1]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    SIZE: tl.constexpr = N // 2 if GATED else N
    RESULTS: tl.constexpr = acc.shape[0] // 2 if GATED else acc.shape[0]
    rows = tl.program_id(1) * RESULTS + tl.arange(0, RESULTS)
    token_ids = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    if GATED:
        pairs = tl.permute(tl.reshape(acc, [RESULTS // 8, 2, 8, BLOCK_M]), [0, 2, 3, 1])
        gate, up = tl.split(tl.reshape(pairs, [RESULTS, BLOCK_M, 2]))
        results = apply_gate(round_to(gate, dtype).to(tl.float32), round_to(up, dtype).to(tl.float32), dtype, False)
    else:
        if HAS_BIAS:
            acc += tl.load(bias_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
        results = round_to(acc, dtype)
    mask = (rows < SIZE)[:, None] & (token_ids < tokens)[None, :]
    tl.store(out_ptr + token_ids[None, :].to(tl.int64) * SIZE + rows[:, None], results, mask=mask)
