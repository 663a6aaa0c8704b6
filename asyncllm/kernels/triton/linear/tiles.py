"""Tiles of products with quantized weights, and how their sums are stored.

The weight is the first operand of the tensor cores, as in `linear.small`. Few tokens split the sum over several
programs, of which the last to arrive adds up the parts in the order of the splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.counters import NUM_COUNTERS, zero_counters
from asyncllm.kernels.triton.language import round_to

__all__ = ["Tile", "choose_tile", "finish", "split"]

_MAX_SPLITS = 8


class Tile(NamedTuple):
    """A program: `rows` of the weight by `tokens`. `programs`: about how many splits of the sum shall make."""

    rows: int
    tokens: int
    warps: int
    stages: int
    programs: int = 1


def choose_tile(tiles: Sequence[Tile], tokens: int) -> Tile:
    """Return the first that holds all tokens, else the last."""
    return next((tile for tile in tiles if tokens <= tile.tokens), tiles[-1])


def split(tile: Tile, out: Tensor, steps: int) -> tuple[tuple[int, int, int], Tensor, Tensor]:
    """Return the grid (splits, tiles of rows, tiles of tokens) of a product into out [T, N], the sum of so many steps,
    with the memory for partial sums and the counters; any tensor where there is one split."""
    tokens, n = out.shape
    rows, token_tiles = triton.cdiv(n, tile.rows), triton.cdiv(tokens, tile.tokens)
    splits = 1
    while splits < _MAX_SPLITS and splits * 2 <= steps and splits * rows * 3 < tile.programs * 2:
        splits *= 2
    if splits == 1 or token_tiles > 1 or rows > NUM_COUNTERS:
        return (1, rows, token_tiles), out, out
    partial = torch.empty(splits * rows * tile.rows * tile.tokens, dtype=torch.float32, device=out.device)
    return (splits, rows, 1), partial, zero_counters(out.device)


@triton.jit
def finish(
    acc, bias_ptr, out_ptr, partial_ptr, counter_ptr, tokens,
    N: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Store acc [rows, tokens] of program (split, tile of rows, tile of tokens), plus the bias, to out [tokens, N].

    partial: float32 [tiles, SPLITS, rows, tokens]. counter: int32 [tiles], zero before and after.
    """
    BLOCK_N: tl.constexpr = acc.shape[0]
    BLOCK_M: tl.constexpr = acc.shape[1]
    tile = tl.program_id(1)
    if SPLITS == 1:
        _store(acc, bias_ptr, out_ptr, tile, tokens, N, HAS_BIAS)
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
            _store(summed, bias_ptr, out_ptr, tile, tokens, N, HAS_BIAS)
            tl.store(counter_ptr + tile, 0)


@triton.jit
def _store(acc, bias_ptr, out_ptr, tile, tokens, N: tl.constexpr, HAS_BIAS: tl.constexpr):
    rows = tile * acc.shape[0] + tl.arange(0, acc.shape[0])
    token_ids = tl.program_id(2) * acc.shape[1] + tl.arange(0, acc.shape[1])
    if HAS_BIAS:
        acc += tl.load(bias_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
    mask = (rows < N)[:, None] & (token_ids < tokens)[None, :]
    out_ptrs = out_ptr + token_ids[None, :].to(tl.int64) * N + rows[:, None]
    tl.store(out_ptrs, round_to(acc, out_ptr.dtype.element_ty), mask=mask)
