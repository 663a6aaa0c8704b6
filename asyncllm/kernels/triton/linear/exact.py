"""Products with a float32 weight, as exact as float32 has them, on tensor cores: routers.

Each number of the weight is the sum of three of bfloat16, 8 bits each, whose products with the tokens, which are
bfloat16 as they come, are exact in float32. So three products on tensor cores give what one in float32 gives, without a
copy of the tokens in float32.

The sum is split over many programs, so that a small weight is read by many multiprocessors. A program's first part of
it is on its way before the tokens are there.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.counters import zero_counters
from asyncllm.kernels.triton.language import dot, release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.launch import Configured
from asyncllm.kernels.triton.linear.tiles import finish

__all__ = ["ExactConfig", "exact_kernel", "linear_exact"]


class ExactConfig(NamedTuple):
    """A program: `tokens` by `rows` of the weight, `columns` at a time, the sum split over up to `splits` programs."""

    tokens: int
    rows: int
    columns: int
    splits: int
    warps: int


FEW = ExactConfig(16, 64, 128, 16, 4)
"""On an H200 (Triton 3.6), 64 experts of DeepSeek-V2-Lite behind their norm and ahead of the choice: 7.2 us for one
token and 7.5 for 16, where the cast and cuBLAS's product in float32 make it 8.4 and 12.9. More tokens of a program
would make the sums long that the last one adds up: with 64 in 32 splits 12.1 us for 64 tokens, with cuBLAS 13.5."""

FEW_TOKENS = 64

MANY = ExactConfig(64, 64, 64, 16, 4)
"""For more tokens. The cast and cuBLAS's product take 125 us for 8,192 tokens and 52 for 1,024; this, in one long sum,
60 and 38."""

_PROCESSORS = 132
"""Multiprocessors of an H200, to which a sum is split up."""


@triton.jit
def _exact_product(w, x):
    """w [N, K] float32 times x [M, K] bfloat16 -> [N, M]."""
    high = round_to(w, tl.bfloat16)
    w -= high.to(tl.float32)
    middle = round_to(w, tl.bfloat16)
    low = round_to(w - middle.to(tl.float32), tl.bfloat16)
    turned = tl.trans(x)
    none = tl.zeros([w.shape[0], x.shape[0]], tl.float32)
    return dot(high, turned, dot(middle, turned, dot(low, turned, none)))


@triton.jit(do_not_specialize=["tokens"])
def exact_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, partial_ptr, counter_ptr, tokens,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """x [tokens, K] bfloat16, weight [N, K] and bias [N] float32 -> out [tokens, N] float32.

    A program is (split, tile of rows, tile of tokens). partial, counter: as in `tiles.finish`."""
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    release_consumers(USE_PDL)
    split = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    token_ids = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_K)
    begin = STEPS * split // SPLITS
    end = STEPS * (split + 1) // SPLITS
    w_lines = weight_ptr + rows[:, None] * K
    there = (rows < N)[:, None]
    k = begin * BLOCK_K + columns[None, :]
    w_next = tl.load(w_lines + k, mask=there & (k < K), other=0.0)
    wait_for_producers(USE_PDL)
    x_lines = x_ptr + token_ids[:, None].to(tl.int64) * K
    asked = (token_ids < tokens)[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(begin, end):
        w = w_next
        k = step * BLOCK_K + columns[None, :]
        following = k + BLOCK_K
        w_next = tl.load(w_lines + following, mask=there & (following < tl.minimum(K, end * BLOCK_K)), other=0.0)
        x = tl.load(x_lines + k, mask=asked & (k < K), other=0.0)
        # Tensor cores cut off what they add to a sum where they do not round it: in one sum over 5,120 columns errors
        # come to 6e-3, in sums of one step 1e-4.
        acc += _exact_product(w, x)
    finish(acc, bias_ptr, out_ptr, partial_ptr, counter_ptr, tokens, N, SPLITS, HAS_BIAS)


def linear_exact(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `asyncllm.kernels.linear.linear_exact`."""
    rows = x.reshape(-1, x.shape[-1])
    tokens, (n, k) = len(rows), weight.shape
    if x.dtype != torch.bfloat16 or not tokens:
        return F.linear(x.float(), weight, bias)
    out = torch.empty((tokens, n), dtype=torch.float32, device=x.device)
    config = FEW if tokens <= FEW_TOKENS else MANY
    tiles = -(-n // config.rows) * -(-tokens // config.tokens)
    splits = min(config.splits, -(-k // config.columns), _splits(tiles))
    grid = (splits, -(-n // config.rows), -(-tokens // config.tokens))
    partial = torch.empty(splits * tiles * config.rows * config.tokens, dtype=torch.float32, device=x.device)
    tensors = (rows.contiguous(), weight, out if bias is None else bias, out, partial, zero_counters(x.device))
    _configured(config, n, k, splits, bias is not None)(grid, tensors, (tokens,))
    return out.view(*x.shape[:-1], n)


def _splits(tiles: int) -> int:
    """Return a power of two that leaves every multiprocessor a program or more, if it has one."""
    return 1 << max(0, (2 * _PROCESSORS // tiles).bit_length() - 1)


@functools.cache
def _configured(config: ExactConfig, n: int, k: int, splits: int, has_bias: bool) -> Configured:
    return Configured(
        exact_kernel,
        num_warps=config.warps,
        N=n,
        K=k,
        BLOCK_M=config.tokens,
        BLOCK_N=config.rows,
        BLOCK_K=config.columns,
        SPLITS=splits,
        HAS_BIAS=has_bias,
    )
