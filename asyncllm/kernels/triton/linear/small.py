"""Linear layers for up to 64 tokens, whose time is spent reading the weight.

Two kernels, and the configuration of a third, that of `linear/narrow.py` for Hopper. `gemv_kernel` multiplies up to
four tokens in float32 without tensor cores; a program owns whole rows of the weight. `skinny_kernel` has the weight as
the first operand of the tensor cores ("swap AB": 64 of its rows are one wgmma, whose narrow side is the tokens). It can
split the sum over several programs, of which the last to arrive adds up all partial sums in the order of the splits, so
that results are reproducible to the bit. With GATED a tile of either kernel has gate rows and the corresponding up
rows, and stores silu(gate) * up.

No kernel writes weights, so `gemv_kernel` loads the first of them before it waits for the kernel that produces the
input, which hides its launch. `skinny_kernel` does not: loading its first tiles into the L2 cache before the wait made
a layer up to 15 us slower and never faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.activation import apply_gate
from asyncllm.kernels.triton.counters import zero_counters
from asyncllm.kernels.triton.language import PDL, dot, release_consumers, round_to, wait_for_producers

__all__ = ["GemvConfig", "NarrowConfig", "SkinnyConfig", "gemv", "gemv_rows", "skinny", "store_gemv", "token_tile"]


@dataclass(frozen=True)
class GemvConfig:
    """Tile of `gemv_kernel`: `rows` of the weight by `columns` at a time."""

    rows: int
    columns: int
    warps: int = 4


@dataclass(frozen=True)
class SkinnyConfig:
    """Tile of `skinny_kernel`: `rows` of the weight by `columns` at a time, with the sum split over `splits`
    programs."""

    rows: int = 64
    columns: int = 64
    splits: int = 1
    stages: int = 4
    warps: int = 4


@dataclass(frozen=True)
class NarrowConfig:
    """Tile of `narrow.narrow_kernel`: `rows` (64, 128 or 256) of the weight, `stages` of `parts` x 64 input features,
    with the sum split over `splits` blocks."""

    rows: int
    parts: int
    stages: int
    splits: int = 1


def token_tile(tokens: int) -> int:
    """Return the number of tokens of the smallest tile, the narrow side of a wgmma, that holds up to 64 `tokens`."""
    return 16 if tokens <= 16 else 32 if tokens <= 32 else 64


@triton.jit
def _gemv_token(x_ptr, columns, w, acc, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return acc [BLOCK_N, BLOCK_K // 8] plus the products of one token with w [BLOCK_N, BLOCK_K], summed by eight."""
    if K % BLOCK_K == 0:
        x = tl.load(x_ptr + columns).to(tl.float32)
    else:
        x = tl.load(x_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)
    products = w * x[None, :]
    return acc + tl.sum(tl.reshape(products, [BLOCK_N, BLOCK_K // 8, 8]), 2)


@triton.jit
def gemv_rows(tile, N: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """Return the rows of the weight in a tile [BLOCK_N]. GATED: gate rows, then the corresponding up rows, N further
    down."""
    own = tl.arange(0, BLOCK_N)
    if GATED:
        HALF: tl.constexpr = BLOCK_N // 2
        return tile * HALF + own % HALF + own // HALF * N
    else:
        return tile * BLOCK_N + own


@triton.jit
def store_gemv(y, bias_ptr, out_ptr, rows, tile, GATED: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Store the sums y [BLOCK_N] of `gemv_rows` plus the bias, or with GATED half as many silu(gate) * up, to out."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if GATED:
        HALF: tl.constexpr = y.shape[0] // 2
        gate, up = tl.split(tl.trans(tl.reshape(y, [2, HALF])))
        gate, up = round_to(gate, dtype).to(tl.float32), round_to(up, dtype).to(tl.float32)
        tl.store(out_ptr + tile * HALF + tl.arange(0, HALF), apply_gate(gate, up, dtype, False))
    else:
        if HAS_BIAS:
            y += tl.load(bias_ptr + rows).to(tl.float32)
        tl.store(out_ptr + rows, round_to(y, dtype))


@triton.jit
def gemv_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr,
    N: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """TOKENS (1 to 4) rows of x [TOKENS, K] times BLOCK_N rows of weight [N, K] -> out [TOKENS, N]. GATED: one token
    and a weight [2 * N, K]."""
    release_consumers(USE_PDL)
    tile = tl.program_id(0)
    rows = gemv_rows(tile, N, BLOCK_N, GATED)
    columns = tl.arange(0, BLOCK_K)
    w_ptrs = weight_ptr + rows[:, None].to(tl.int64) * K + columns[None, :]
    if K % BLOCK_K == 0:
        w_next = tl.load(w_ptrs, eviction_policy="evict_first")
    else:
        w_next = tl.load(w_ptrs, mask=(columns < K)[None, :], other=0.0, eviction_policy="evict_first")
    wait_for_producers(USE_PDL)

    acc_0 = tl.zeros([BLOCK_N, BLOCK_K // 8], dtype=tl.float32)
    acc_1 = acc_0
    acc_2 = acc_0
    acc_3 = acc_0
    for start in range(0, K, BLOCK_K):
        # The next tile of the weight is loaded while this one is multiplied.
        w = w_next.to(tl.float32)
        own = start + columns
        more = start + BLOCK_K < K if K % BLOCK_K == 0 else (own + BLOCK_K < K)[None, :]
        w_next = tl.load(w_ptrs + start + BLOCK_K, mask=more, other=0.0, eviction_policy="evict_first")
        acc_0 = _gemv_token(x_ptr, own, w, acc_0, K, BLOCK_N, BLOCK_K)
        if TOKENS > 1:
            acc_1 = _gemv_token(x_ptr + K, own, w, acc_1, K, BLOCK_N, BLOCK_K)
        if TOKENS > 2:
            acc_2 = _gemv_token(x_ptr + 2 * K, own, w, acc_2, K, BLOCK_N, BLOCK_K)
        if TOKENS > 3:
            acc_3 = _gemv_token(x_ptr + 3 * K, own, w, acc_3, K, BLOCK_N, BLOCK_K)

    store_gemv(tl.sum(acc_0, 1), bias_ptr, out_ptr, rows, tile, GATED, HAS_BIAS)
    if TOKENS > 1:
        store_gemv(tl.sum(acc_1, 1), bias_ptr, out_ptr + N, rows, tile, False, HAS_BIAS)
    if TOKENS > 2:
        store_gemv(tl.sum(acc_2, 1), bias_ptr, out_ptr + 2 * N, rows, tile, False, HAS_BIAS)
    if TOKENS > 3:
        store_gemv(tl.sum(acc_3, 1), bias_ptr, out_ptr + 3 * N, rows, tile, False, HAS_BIAS)


@triton.jit
def _skinny_store(
    acc, tokens, bias_ptr, out_ptr, tile, token_ids, N: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr
):  # fmt: skip
    """Store acc [BLOCK_N, BLOCK_M] float32 plus the bias, or with GATED the gate of half as many rows, to out [tokens,
    N]."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    RESULTS: tl.constexpr = acc.shape[0] // 2 if GATED else acc.shape[0]
    rows = tile * RESULTS + tl.arange(0, RESULTS)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, [2, RESULTS, acc.shape[1]]), [1, 2, 0]))
        gate, up = round_to(gate, dtype).to(tl.float32), round_to(up, dtype).to(tl.float32)
        results = apply_gate(gate, up, dtype, False)
    else:
        if HAS_BIAS:
            acc += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
        results = round_to(acc, dtype)
    tl.store(out_ptr + token_ids[None, :] * N + rows[:, None], results, mask=(token_ids < tokens)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def skinny_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, partial_ptr, counter_ptr, tokens,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, RELEASE_FIRST: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_M rows of x [tokens, K] times BLOCK_N rows of weight [N, K], over one of SPLITS ranges of K.

    With GATED the weight is [2 * N, K], and a tile has gate rows and the corresponding up rows. partial: float32
    [tiles, SPLITS, BLOCK_N, BLOCK_M]. counter: int32 [tiles], zero before and after.
    """
    STEPS: tl.constexpr = K // BLOCK_K
    if RELEASE_FIRST:
        release_consumers(USE_PDL)
    split = tl.program_id(0)
    tile = tl.program_id(1)
    own = tl.arange(0, BLOCK_N)
    if GATED:
        HALF: tl.constexpr = BLOCK_N // 2
        rows = tile * HALF + own % HALF + own // HALF * N
    else:
        rows = tile * BLOCK_N + own
    columns = tl.arange(0, BLOCK_K)[None, :]
    w_rows = weight_ptr + rows[:, None].to(tl.int64) * K
    wait_for_producers(USE_PDL)
    if not RELEASE_FIRST:
        release_consumers(USE_PDL)

    token_ids = tl.arange(0, BLOCK_M)
    x_rows = x_ptr + token_ids[:, None] * K
    x_mask = (token_ids < tokens)[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for step in range(STEPS * split // SPLITS, STEPS * (split + 1) // SPLITS):
        k = step * BLOCK_K + columns
        w = tl.load(w_rows + k, eviction_policy="evict_first")
        x = tl.load(x_rows + k, mask=x_mask, other=0.0)
        acc = dot(w, tl.trans(x), acc)

    if SPLITS == 1:
        _skinny_store(acc, tokens, bias_ptr, out_ptr, tile, token_ids, N, GATED, HAS_BIAS)
    else:
        TILE: tl.constexpr = BLOCK_N * BLOCK_M
        inside = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + token_ids[None, :]
        partial_ptrs = partial_ptr + tile * (SPLITS * TILE) + inside
        tl.store(partial_ptrs + split * TILE, acc)
        tl.debug_barrier()
        if tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.load(partial_ptrs, cache_modifier=".cg")
            for other in tl.static_range(1, SPLITS):
                total += tl.load(partial_ptrs + other * TILE, cache_modifier=".cg")
            _skinny_store(total, tokens, bias_ptr, out_ptr, tile, token_ids, N, GATED, HAS_BIAS)
            tl.store(counter_ptr + tile, 0)


def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    config: GemvConfig,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return x [T, K], T at most 4, times weight [N, K] transposed, plus bias [N], in `out` [T, N] if given, without
    tensor cores. With `gated` the result is silu(gate) * up of one token and a weight [2 * N, K] without a bias.

    All tensors are contiguous. `config.rows` divides the weight's rows.
    """
    tokens, k = x.shape
    rows = weight.shape[0]
    n = rows // 2 if gated else rows
    if out is None:
        out = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    gemv_kernel[(rows // config.rows,)](
        x, weight, weight if bias is None else bias, out, n, k, tokens, config.rows, config.columns, gated,
        bias is not None, num_warps=config.warps, **PDL,
    )  # fmt: skip
    return out


def skinny(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    config: SkinnyConfig,
    gated: bool = False,
    release_first: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Return x [T, K], T at most 64, times weight [N, K] transposed, plus bias [N], in `out` [T, N] if given, on tensor
    cores. With `gated` the result is silu(gate) * up of a weight [2 * N, K] without a bias.

    All tensors are contiguous. `config.rows` divides the weight's rows, `config.columns` divides K. `release_first`:
    see `language.release_consumers`.
    """
    tokens, k = x.shape
    rows = weight.shape[0]
    n = rows // 2 if gated else rows
    block_m = token_tile(tokens)
    if out is None:
        out = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    partial = counters = out
    if config.splits > 1:
        partial = torch.empty(config.splits * rows * block_m, dtype=torch.float32, device=x.device)
        counters = zero_counters(x.device)
    skinny_kernel[(config.splits, rows // config.rows)](
        x, weight, weight if bias is None else bias, out, partial, counters, tokens, n, k, block_m, config.rows,
        config.columns, config.splits, gated, bias is not None, release_first,
        num_warps=config.warps, num_stages=config.stages, **PDL,
    )  # fmt: skip
    return out
