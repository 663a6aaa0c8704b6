"""Products with a float32 weight on tensor cores, as exact as in float32, for routers.

Each number of the weight is the sum of three bfloat16 numbers of 8 bits each, whose products with the tokens, which are
bfloat16, are exact in float32. Three products on tensor cores therefore give the result of one in float32, without a
float32 copy of the tokens.

The sum is split over many programs, so that many multiprocessors read a small weight. A program loads the first part of
its weight before the tokens are written.
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
    """The tile of a program: `tokens` by `rows` of the weight, `columns` at a time, with the sum split over up to
    `splits` programs."""

    tokens: int
    rows: int
    columns: int
    splits: int
    warps: int


FEW = ExactConfig(16, 64, 128, 16, 4)
"""For up to FEW_TOKENS. On an H200 (Triton 3.6), for the 64 experts of DeepSeek-V2-Lite between the norm and the choice
of experts: 7.2 us for one token and 7.5 for 16; the cast and cuBLAS's float32 product take 8.4 and 12.9. With more
tokens per program the last one would add up longer sums: 64 in 32 splits take 12.1 us for 64 tokens, cuBLAS 13.5."""

FEW_TOKENS = 64

MANY = ExactConfig(64, 64, 64, 16, 4)
"""For more tokens. It takes 60 us for 8,192 tokens and 38 for 1,024, without splits; the cast and cuBLAS's product take
125 and 52."""

_PROCESSORS = 132
"""Multiprocessors of an H200, among which a sum is split."""


@triton.jit
def _exact_product(w, x):
    """Return w [N, K] float32 times x [M, K] bfloat16, [N, M] float32."""
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

    A program is (split, tile of rows, tile of tokens). partial, counter: see `tiles.finish`."""
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
        # Tensor cores truncate what they add to a sum: errors are 6e-3 in one sum over 5,120 columns, but 1e-4 in sums
        # of one step.
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
    """Return the number of splits, a power of two, that gives every multiprocessor at least one program."""
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
