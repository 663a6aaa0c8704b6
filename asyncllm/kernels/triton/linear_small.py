"""Linear layers for up to 64 tokens, where reading the weights is all that takes time.

Two kernels. `_gemv` multiplies in float32 without tensor cores, for up to four tokens: a program owns whole rows of the
weight. `_skinny` gives the weight to the tensor cores as their first operand ("swap AB": 64 rows of it are one wgmma,
the tokens are its narrow side), optionally splitting the sum over several programs of which the last to arrive adds up
all partial sums in the order of the splits, so that runs repeat bit by bit.

No kernel ever writes weights, so the first of them are requested before the wait for the kernel that produces the
input: launch and ramp overlap with what runs before.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.language import INTERPRET, PDL, dot, release_consumers, round_to, wait_for_producers

__all__ = ["GemvConfig", "RmsNorm", "SkinnyConfig", "gemv", "skinny"]


EARLY = True
BULK = True


@dataclass(frozen=True)
class GemvConfig:
    """Tile of `_gemv`: `rows` of the weight by `columns` at a time; `columns` divides the input size."""

    rows: int
    columns: int
    warps: int = 4


@dataclass(frozen=True)
class SkinnyConfig:
    """Tile of `_skinny`: `rows` of the weight by `columns` at a time, the sum split over `splits` programs.

    `prefetch` tiles of the weight are brought to the L2 cache before the wait for the input.
    """

    rows: int = 64
    columns: int = 128
    splits: int = 1
    stages: int = 4
    prefetch: int = 4
    warps: int = 4


@dataclass(frozen=True)
class RmsNorm:
    """What to do to the input before the product: RMSNorm with this weight [in_features] and epsilon."""

    weight: Tensor
    eps: float


@triton.jit
def _prefetch(pointers, size: tl.constexpr):
    """Ask for `size` bytes (a multiple of 16) at each of `pointers` to be brought to the L2 cache."""
    if not INTERPRET:
        address = pointers.to(tl.int64)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
            "=r,l,r",
            [address, tl.full(address.shape, size, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _prefetch_lines(pointers):
    """Ask for the 128 bytes at each of `pointers` to be brought to the L2 cache."""
    if not INTERPRET:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _silu_product(gate, up, dtype: tl.constexpr):
    """silu(gate) * up in float32, rounded to `dtype` wherever the separate ops round."""
    gate = round_to(gate, dtype).to(tl.float32)
    silu = round_to(gate / (1.0 + tl.exp(-gate)), dtype).to(tl.float32)
    return silu * round_to(up, dtype).to(tl.float32)


@triton.jit
def _normalised(x, scale, weight, dtype: tl.constexpr, ROUND_FIRST: tl.constexpr):
    """x * scale * weight in `dtype`, rounding before the weight where it has the input's type, as `rms_norm` does."""
    x = x * scale
    if ROUND_FIRST:
        x = round_to(x, dtype).to(tl.float32)
    return round_to(x * weight.to(tl.float32), dtype)


@triton.jit
def _row_scale(x_ptr, EPS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """1 / root mean square of one row of K values."""
    columns = tl.arange(0, BLOCK_K)
    squares = tl.zeros([BLOCK_K], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        x = tl.load(x_ptr + start + columns).to(tl.float32)
        squares += x * x
    return tl.rsqrt(tl.sum(squares, 0) / K + EPS)


@triton.jit
def _gemv_token(
    x_ptr, norm_ptr, scale, start, w, acc,
    dtype: tl.constexpr, NORM: tl.constexpr, ROUND_FIRST: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_N, BLOCK_K // 8] + the products of one token with w [BLOCK_N, BLOCK_K], eight of them summed."""
    columns = start + tl.arange(0, BLOCK_K)
    x = tl.load(x_ptr + columns).to(tl.float32)
    if NORM:
        x = _normalised(x, scale, tl.load(norm_ptr + columns), dtype, ROUND_FIRST).to(tl.float32)
    products = w * x[None, :]
    return acc + tl.sum(tl.reshape(products, [BLOCK_N, BLOCK_K // 8, 8]), 2)


@triton.jit
def _gemv_store(
    acc, acc_up, token: tl.constexpr, bias_ptr, residual_ptr, out_ptr, rows,
    N: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    y = tl.sum(acc, 1)
    if GATED:
        y = _silu_product(y, tl.sum(acc_up, 1), dtype)
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows).to(tl.float32)
    if HAS_RESIDUAL:
        y = round_to(y, dtype).to(tl.float32) + tl.load(residual_ptr + token * N + rows).to(tl.float32)
    tl.store(out_ptr + token * N + rows, round_to(y, dtype))


@triton.jit
def _gemv(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, norm_ptr, out_ptr,
    N: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EPS: tl.constexpr, NORM: tl.constexpr, ROUND_FIRST: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """TOKENS (1 to 4) rows of x [TOKENS, K] times BLOCK_N rows of the weight; a GATED weight has 2 * N rows."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if EARLY:
        release_consumers(USE_PDL)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_ptrs = weight_ptr + rows[:, None].to(tl.int64) * K + tl.arange(0, BLOCK_K)[None, :]
    w_next = tl.load(w_ptrs, eviction_policy="evict_first")
    if GATED:
        up_next = tl.load(w_ptrs + N * K, eviction_policy="evict_first")
    wait_for_producers(USE_PDL)
    if not EARLY:
        release_consumers(USE_PDL)

    scale_0 = 1.0
    scale_1 = 1.0
    scale_2 = 1.0
    scale_3 = 1.0
    if NORM:
        scale_0 = _row_scale(x_ptr, EPS, K, BLOCK_K)
        if TOKENS > 1:
            scale_1 = _row_scale(x_ptr + K, EPS, K, BLOCK_K)
        if TOKENS > 2:
            scale_2 = _row_scale(x_ptr + 2 * K, EPS, K, BLOCK_K)
        if TOKENS > 3:
            scale_3 = _row_scale(x_ptr + 3 * K, EPS, K, BLOCK_K)

    acc_0 = tl.zeros([BLOCK_N, BLOCK_K // 8], dtype=tl.float32)
    acc_1 = acc_0
    acc_2 = acc_0
    acc_3 = acc_0
    up_0 = acc_0
    up_1 = acc_0
    up_2 = acc_0
    up_3 = acc_0
    for start in range(0, K, BLOCK_K):
        # The next tile of the weight is on its way while this one is multiplied.
        w = w_next.to(tl.float32)
        more = start + BLOCK_K < K
        w_next = tl.load(w_ptrs + start + BLOCK_K, mask=more, other=0.0, eviction_policy="evict_first")
        acc_0 = _gemv_token(x_ptr, norm_ptr, scale_0, start, w, acc_0, dtype, NORM, ROUND_FIRST, BLOCK_N, BLOCK_K)
        if TOKENS > 1:
            acc_1 = _gemv_token(
                x_ptr + K, norm_ptr, scale_1, start, w, acc_1, dtype, NORM, ROUND_FIRST, BLOCK_N, BLOCK_K
            )
        if TOKENS > 2:
            acc_2 = _gemv_token(
                x_ptr + 2 * K, norm_ptr, scale_2, start, w, acc_2, dtype, NORM, ROUND_FIRST, BLOCK_N, BLOCK_K
            )
        if TOKENS > 3:
            acc_3 = _gemv_token(
                x_ptr + 3 * K, norm_ptr, scale_3, start, w, acc_3, dtype, NORM, ROUND_FIRST, BLOCK_N, BLOCK_K
            )
        if GATED:
            up = up_next.to(tl.float32)
            up_next = tl.load(w_ptrs + N * K + start + BLOCK_K, mask=more, other=0.0, eviction_policy="evict_first")
            up_0 = _gemv_token(x_ptr, norm_ptr, scale_0, start, up, up_0, dtype, NORM, ROUND_FIRST, BLOCK_N, BLOCK_K)
            if TOKENS > 1:
                up_1 = _gemv_token(
                    x_ptr + K, norm_ptr, scale_1, start, up, up_1, dtype, NORM, ROUND_FIRST, BLOCK_N, BLOCK_K
                )
            if TOKENS > 2:
                up_2 = _gemv_token(
                    x_ptr + 2 * K, norm_ptr, scale_2, start, up, up_2, dtype, NORM, ROUND_FIRST, BLOCK_N, BLOCK_K
                )
            if TOKENS > 3:
                up_3 = _gemv_token(
                    x_ptr + 3 * K, norm_ptr, scale_3, start, up, up_3, dtype, NORM, ROUND_FIRST, BLOCK_N, BLOCK_K
                )

    _gemv_store(acc_0, up_0, 0, bias_ptr, residual_ptr, out_ptr, rows, N, HAS_BIAS, HAS_RESIDUAL, GATED)
    if TOKENS > 1:
        _gemv_store(acc_1, up_1, 1, bias_ptr, residual_ptr, out_ptr, rows, N, HAS_BIAS, HAS_RESIDUAL, GATED)
    if TOKENS > 2:
        _gemv_store(acc_2, up_2, 2, bias_ptr, residual_ptr, out_ptr, rows, N, HAS_BIAS, HAS_RESIDUAL, GATED)
    if TOKENS > 3:
        _gemv_store(acc_3, up_3, 3, bias_ptr, residual_ptr, out_ptr, rows, N, HAS_BIAS, HAS_RESIDUAL, GATED)


@triton.jit
def _skinny_finish(
    acc, acc_up, tokens, bias_ptr, residual_ptr, out_ptr, rows, token_ids,
    N: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Epilogue: acc [BLOCK_N, BLOCK_M], in float32, to out [tokens, N]."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    y = acc
    if GATED:
        y = _silu_product(acc, acc_up, dtype)
    if HAS_BIAS:
        y += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
    offsets = token_ids[None, :] * N + rows[:, None]
    mask = (token_ids < tokens)[None, :]
    if HAS_RESIDUAL:
        y = round_to(y, dtype).to(tl.float32) + tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, round_to(y, dtype), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _skinny(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, norm_ptr, out_ptr, partial_ptr, counter_ptr, tokens,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, PREFETCH: tl.constexpr, BULK: tl.constexpr, EPS: tl.constexpr, NORM: tl.constexpr,
    ROUND_FIRST: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    EARLY: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_M rows of x [tokens, K] times BLOCK_N rows of the weight, over one of SPLITS ranges of K.

    partial: float32 [N // BLOCK_N, SPLITS, parts, BLOCK_N, BLOCK_M] with parts 2 where GATED (whose weight has 2 * N
    rows), else 1. counter: int32 [N // BLOCK_N], zero before and after.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    STEPS: tl.constexpr = K // BLOCK_K
    if EARLY:
        release_consumers(USE_PDL)
    split = tl.program_id(0)
    tile = tl.program_id(1)
    first = STEPS * split // SPLITS
    last = STEPS * (split + 1) // SPLITS
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    w_rows = weight_ptr + rows[:, None].to(tl.int64) * K
    if PREFETCH > 0:
        if BULK:
            chunk = w_rows + first * BLOCK_K + tl.arange(0, 2)[None, :] * (PREFETCH * BLOCK_K // 2)
            _prefetch(chunk, PREFETCH * BLOCK_K)
            if GATED:
                _prefetch(chunk + N * K, PREFETCH * BLOCK_K)
        else:
            LINES: tl.constexpr = PREFETCH * BLOCK_K // 64
            chunk = w_rows + first * BLOCK_K + tl.arange(0, LINES)[None, :] * 64
            _prefetch_lines(chunk)
            if GATED:
                _prefetch_lines(chunk + N * K)
    wait_for_producers(USE_PDL)
    if not EARLY:
        release_consumers(USE_PDL)

    token_ids = tl.arange(0, BLOCK_M)
    x_rows = x_ptr + token_ids[:, None] * K
    x_mask = (token_ids < tokens)[:, None]
    if NORM:
        squares = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.float32)
        for step in range(0, STEPS):
            x = tl.load(x_rows + step * BLOCK_K + columns[None, :], mask=x_mask, other=0.0).to(tl.float32)
            squares += x * x
        scale = tl.rsqrt(tl.sum(squares, 1) / K + EPS)[:, None]

    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    acc_up = acc
    for step in range(first, last):
        k = step * BLOCK_K + columns[None, :]
        w = tl.load(w_rows + k, eviction_policy="evict_first")
        x = tl.load(x_rows + k, mask=x_mask, other=0.0)
        if NORM:
            x = _normalised(x.to(tl.float32), scale, tl.load(norm_ptr + k), dtype, ROUND_FIRST)
        acc = dot(w, tl.trans(x), acc)
        if GATED:
            up = tl.load(w_rows + N * K + k, eviction_policy="evict_first")
            acc_up = dot(up, tl.trans(x), acc_up)

    if SPLITS == 1:
        _skinny_finish(
            acc, acc_up, tokens, bias_ptr, residual_ptr, out_ptr, rows, token_ids, N, HAS_BIAS, HAS_RESIDUAL, GATED
        )
    else:
        TILE: tl.constexpr = BLOCK_N * BLOCK_M
        PARTS: tl.constexpr = 2 if GATED else 1
        inside = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + token_ids[None, :]
        tile_ptr = partial_ptr + tile * (SPLITS * PARTS * TILE) + inside
        tl.store(tile_ptr + split * (PARTS * TILE), acc)
        if GATED:
            tl.store(tile_ptr + split * (PARTS * TILE) + TILE, acc_up)
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel")
        if arrived == SPLITS - 1:
            total = tl.load(tile_ptr, cache_modifier=".cg")
            total_up = total
            if GATED:
                total_up = tl.load(tile_ptr + TILE, cache_modifier=".cg")
            for other in tl.static_range(1, SPLITS):
                total += tl.load(tile_ptr + other * (PARTS * TILE), cache_modifier=".cg")
                if GATED:
                    total_up += tl.load(tile_ptr + other * (PARTS * TILE) + TILE, cache_modifier=".cg")
            _skinny_finish(
                total, total_up, tokens, bias_ptr, residual_ptr, out_ptr, rows, token_ids,
                N, HAS_BIAS, HAS_RESIDUAL, GATED,
            )  # fmt: skip
            tl.store(counter_ptr + tile, 0)


@cache
def _counters(device: torch.device) -> Tensor:
    """One counter per tile of outputs, for kernels that follow one another on one stream."""
    return torch.zeros(8192, dtype=torch.int32, device=device)


def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    config: GemvConfig,
    residual: Tensor | None = None,
    norm: RmsNorm | None = None,
    gated: bool = False,
) -> Tensor:
    """residual + f(norm(x) weight^T + bias) without tensor cores; f is the identity, or silu_mul where `gated`.

    x [T, K] contiguous with T at most 4, weight [N or 2 N, K], bias [N] (not with gated), residual and result [T, N].
    N is a multiple of `config.rows`, K of `config.columns`.
    """
    tokens, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    _gemv[(n // config.rows,)](
        x, weight, weight if bias is None else bias, x if residual is None else residual,
        weight if norm is None else norm.weight, out, n, k, tokens, config.rows, config.columns,
        0.0 if norm is None else norm.eps, norm is not None, norm is not None and norm.weight.dtype == x.dtype,
        bias is not None, residual is not None, gated, EARLY, num_warps=config.warps, **PDL,
    )  # fmt: skip
    return out


def skinny(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    config: SkinnyConfig,
    residual: Tensor | None = None,
    norm: RmsNorm | None = None,
    gated: bool = False,
) -> Tensor:
    """As `gemv`, on tensor cores: T at most 64. N is a multiple of `config.rows`, K of `config.columns`."""
    tokens, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    block_m = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    out = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    if config.splits == 1:
        partial = counters = out
    else:
        size = config.splits * n * block_m * (2 if gated else 1)
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        counters = _counters(x.device)
    _skinny[(config.splits, n // config.rows)](
        x, weight, weight if bias is None else bias, x if residual is None else residual,
        weight if norm is None else norm.weight, out, partial, counters, tokens, n, k, block_m, config.rows,
        config.columns, config.splits, config.prefetch, BULK, 0.0 if norm is None else norm.eps, norm is not None,
        norm is not None and norm.weight.dtype == x.dtype, bias is not None, residual is not None, gated,
        EARLY, num_warps=config.warps, num_stages=config.stages, **PDL,
    )  # fmt: skip
    return out
