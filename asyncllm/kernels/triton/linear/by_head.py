"""Products in which each head has its own matrix, as in latent attention."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.language import dot, release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.launch import Configured
from asyncllm.kernels.triton.linear.invariant import Tile

__all__ = ["FLOAT32_TILE", "TILE", "by_head_kernel", "linear_by_head", "linear_by_head_invariant"]

TILE = Tile(rows=64, tokens=64, columns=64, warps=4, stages=3)
FLOAT32_TILE = Tile(rows=64, tokens=32, columns=32, warps=4, stages=3)
"""The tiles of `linear_by_head_invariant`, for any number of tokens. Not timed."""


def linear_by_head(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """See `asyncllm.kernels.linear.linear_by_head`."""
    if out is None:
        out = x.new_empty((*x.shape[:2], weight.shape[1]))
    torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
    return out


@triton.jit(do_not_specialize=["tokens"])
def by_head_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    tokens,
    X_TOKEN: tl.constexpr,
    X_HEAD: tl.constexpr,
    W_HEAD: tl.constexpr,
    W_ROW: tl.constexpr,
    W_COLUMN: tl.constexpr,
    OUT_TOKEN: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """x [tokens, heads, K] times weight [heads, N, K], in one order of K whatever the tile (`linear.invariant`) -> out
    [tokens, heads, N]. X_TOKEN to OUT_TOKEN are strides."""
    head = tl.program_id(2)
    token_ids = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    x_lines = x_ptr + head * X_HEAD + token_ids[None, :].to(tl.int64) * X_TOKEN
    w_lines = weight_ptr + head.to(tl.int64) * W_HEAD + rows[:, None] * W_ROW
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    for first in range(0, K, COLUMNS):
        k = first + columns
        w = tl.load(w_lines + k[None, :] * W_COLUMN, mask=(rows < N)[:, None] & (k < K)[None, :], other=0.0)
        x = tl.load(x_lines + k[:, None], mask=(token_ids < tokens)[None, :] & (k < K)[:, None], other=0.0)
        acc = dot(w, x, acc)
    target = out_ptr + token_ids[:, None].to(tl.int64) * OUT_TOKEN + head * N + rows[None, :]
    inside = (token_ids < tokens)[:, None] & (rows < N)[None, :]
    tl.store(target, tl.trans(round_to(acc, out_ptr.dtype.element_ty)), mask=inside)


def linear_by_head_invariant(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """See `asyncllm.kernels.linear.linear_by_head_invariant`."""
    tokens, heads, _ = x.shape
    if out is None:
        out = x.new_empty((tokens, heads, weight.shape[1]))
    if tokens:
        tile = TILE if x.dtype.itemsize == 2 else FLOAT32_TILE
        strides = (*x.stride()[:2], *weight.stride(), out.stride(0))
        grid = (-(-tokens // tile.tokens), -(-weight.shape[1] // tile.rows), heads)
        _configured(strides, weight.shape[1], weight.shape[2], tile)(grid, (x, weight, out), (tokens,))
    return out


@functools.cache
def _configured(strides: tuple[int, ...], n: int, k: int, tile: Tile) -> Configured:
    names = ("X_TOKEN", "X_HEAD", "W_HEAD", "W_ROW", "W_COLUMN", "OUT_TOKEN")
    constexprs: dict[str, Any] = dict(zip(names, strides, strict=True))
    return Configured(
        by_head_kernel,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **constexprs,
        N=n,
        K=k,
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        COLUMNS=tile.columns,
    )
