"""8-bit products (`kernels.scaled`): one kernel rounds the rows and another multiplies them.

Sums of fp8 products are added to float32 registers after each 128 input features, since Hopper's tensor cores keep only
about 14 bits of their own sums; sums of integers are exact. Triton's interpreter does not support fp8, so codes are
bytes there.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.linear import check_out
from asyncllm.kernels.scaled import GROUP, ScaledWeight
from asyncllm.kernels.triton.activation import silu_mul
from asyncllm.kernels.triton.device import is_hopper, table_name
from asyncllm.kernels.triton.language import INTERPRET, e4m3_value, release_consumers, wait_for_producers
from asyncllm.kernels.triton.launch import fits_tensor_map, launch
from asyncllm.kernels.triton.linear.small import GemvConfig, NarrowConfig, gemv_rows, store_gemv
from asyncllm.kernels.triton.linear.tiles import Tile, choose_tile, finish, split
from asyncllm.kernels.triton.rounded import round_rows

__all__ = [
    "LIBRARY",
    "MORE_OF_INT8",
    "ONE_TOKEN",
    "TABLES",
    "TILES",
    "Config",
    "HopperConfig",
    "added_products",
    "choose",
    "linear_rounded",
    "linear_rounded_silu_mul",
    "linear_scaled",
    "multiply",
    "multiply_one",
    "operand",
    "products",
]

TILES = (
    Tile(64, 16, 4, 4, programs=256),
    Tile(64, 32, 4, 4, programs=256),
    Tile(64, 64, 4, 4, programs=128),
    Tile(128, 128, 8, 4),
)
"""By tokens. The first three are near the best of a small search on an H200 with the same tiles, without the rounding
of activations and with sums in the tensor cores: 66 us for the four products of a Llama-3-8B layer with one token, 68
with 16, 76 with 64; cuBLAS in bfloat16 takes 122, 121 and 128. In their present form they are not timed."""

ONE_TOKEN = GemvConfig(4, 4096, warps=8)
"""For one token and shapes without an entry, with more than half of `columns` input features and at most as many. Tiles
for 16 tokens take a sixth longer."""

LIBRARY: Literal["library"] = "library"

LIBRARY_TOKENS = 65
"""Number of tokens from which cuBLAS multiplies fp8 with a scale for each row and token, unless a table has an
entry."""

HOPPER_TOKENS = 129
"""Number of tokens from which, and of a wide weight earlier, `hopper_scaled.py` computes the products that cuBLAS does
not support: 653 us for the four products of a Llama-3-8B layer with 2,048 tokens in int8 on an H200; tiles of 128 by
256 without a producer warp take 830."""

_PROCESSORS = 132
"""Multiprocessors of an H200."""

_FULL = 0.9
"""Share of multiprocessors busy in the last round of tiles, below which tiles are divided into shares: that takes 8 %
less time at 512 tokens for 28672 x 4096, and half of it at 256 for 4096 x 14336."""


class HopperConfig(NamedTuple):
    """The division of work in `hopper_scaled.py`: whole tiles, or equal `shares`."""

    shares: bool = False


Config = Tile | GemvConfig | NarrowConfig | HopperConfig | Literal["library"]

Table = Mapping[tuple[int, int], tuple[tuple[int, Config], ...]]

TABLES: dict[str, Table] = {
    "NVIDIA H200": {
        (6144, 4096): (
            (1, GemvConfig(4, 4096, warps=8)),  # 9.3 us behind rounding, the ring 10.2
            (16, NarrowConfig(64, 2, 5)),  # 7.8 us at 1 row, 8.1 at 16; tiles 10.3, 10.1
            (32, NarrowConfig(64, 2, 9)),  # 10.0 us; tiles 10.0
            (64, NarrowConfig(64, 2, 6)),  # 10.9 us; tiles 11.4; from 65 on cuBLAS: 14.2 at 128, the ring 17.4
        ),
        (4096, 4096): (
            (1, GemvConfig(4, 4096, warps=8)),  # 7.5 us behind rounding, the ring 7.9
            (16, NarrowConfig(64, 2, 5)),  # 6.3 and 6.7 us; tiles 8.4, 7.9
            (32, NarrowConfig(64, 2, 9)),  # 7.6 us; tiles 8.9
            (64, NarrowConfig(64, 2, 6)),  # 9.3 us, tiles 9.0; a layer 114.8 us, with tiles 116.0
        ),
        (28672, 4096): (
            (1, GemvConfig(4, 4096, warps=8)),  # 29.9 us behind rounding, the ring 30.7
            (16, NarrowConfig(128, 1, 6)),  # 32.3 us; tiles 32.9
            (32, Tile(128, 32, 4, 4)),  # 33.3 us; the ring 34.0
            (64, Tile(128, 64, 4, 4)),  # 34.5 us; the ring 38.8, cuBLAS 36.9
        ),
        (4096, 14336): (
            (1, NarrowConfig(64, 2, 11, splits=2)),  # 16.6 us; tiles 19.2; without tensor cores 19.2 for 18.6
            (16, NarrowConfig(64, 2, 5, splits=4)),  # 17.5 us; tiles 18.7
            (32, NarrowConfig(64, 2, 9, splits=2)),  # 18.0 us; tiles 20.7
            (64, NarrowConfig(64, 2, 6, splits=2)),  # 20.1 us; tiles 20.9
            (128, NarrowConfig(64, 1, 9, splits=2)),  # 27.5 us, cuBLAS 37.4; at 256 rows 42.6 and 38.3
        ),
    }
}
"""Device name -> weight shape (N, K) -> (maximum number of tokens, configuration), ascending. Numbers that no entry
covers use cuBLAS, `hopper_scaled.py` or `TILES`. Figures are in fp8, with weights in turn; those of a layer include
attention to 300 tokens per row (Triton 3.6.0, CUDA 13.0). With int8 the order is the same up to 64 rows, and figures
are within 5 %."""

MORE_OF_INT8: dict[str, Table] = {
    "NVIDIA H200": {
        (6144, 4096): (
            (128, NarrowConfig(64, 1, 9)),  # 15.5 us at 80 tokens, 17.5 at 128; `hopper_scaled.py` 23
            (192, HopperConfig(shares=True)),  # 22.1 us; tiles of 128 by 128 32.5
            (256, TILES[3]),  # 20.3 us; 22.1
        ),
        (4096, 4096): ((256, NarrowConfig(64, 1, 9)),),  # 14.1 us at 80, 17.1 at 256; `hopper_scaled.py` 20.6
    }
}
"""Entries for int8, which cuBLAS does not support here, after those of `TABLES`."""


def choose(codes: Tensor, weight: ScaledWeight, dtype: torch.dtype) -> Config:
    """Return the configuration of the product of codes [T, K] and the weight with results of `dtype`."""
    tokens, (n, k) = len(codes), weight.codes.shape
    # cuBLAS supports this on Hopper with bfloat16 results only; its fp8 sums keep about 14 bits until completion.
    library = tokens > 0 and codes.dtype == torch.float8_e4m3fn and dtype == torch.bfloat16
    library = library and not weight.rounding.grouped and n % 16 == k % 16 == 0 and is_hopper(codes.device)
    if not weight.rounding.grouped:
        for most, config in _table(codes.device, codes.dtype).get((n, k), ()):
            if 0 < tokens <= most:
                usable = library if config == LIBRARY else isinstance(config, Tile) or fits_tensor_map(weight.codes)
                if usable:
                    return config
                break
        fills = ONE_TOKEN.columns // 2 < k <= ONE_TOKEN.columns and n % ONE_TOKEN.rows == 0
        if tokens == 1 and fills and fits_tensor_map(weight.codes):
            return ONE_TOKEN
    if library and tokens >= LIBRARY_TOKENS:
        return LIBRARY
    return _on_hopper(codes, weight, dtype) or choose_tile(TILES, tokens)


def _on_hopper(codes: Tensor, weight: ScaledWeight, dtype: torch.dtype) -> HopperConfig | None:
    """Return the configuration for `hopper_scaled.py` if it can compute the product and is the fastest."""
    tokens, n = len(codes), weight.codes.shape[0]
    able = not weight.rounding.grouped and dtype.itemsize == 2 and n % 16 == 0 and is_hopper(codes.device)
    if not able or tokens < LIBRARY_TOKENS or not (fits_tensor_map(codes) and fits_tensor_map(weight.codes)):
        return None
    tiles = triton.cdiv(n, 256) * triton.cdiv(tokens, 128)
    if tokens < HOPPER_TOKENS and tiles < _PROCESSORS // 2:
        return None
    return HopperConfig(shares=tiles < _FULL * _PROCESSORS * triton.cdiv(tiles, _PROCESSORS))


@cache
def _table(device: torch.device, dtype: torch.dtype) -> Table:
    table = TABLES.get(table_name(device), {})
    if dtype != torch.int8:
        return table
    more = MORE_OF_INT8.get(table_name(device), {})
    return {shape: (*entries, *more.get(shape, ())) for shape, entries in table.items()}


@triton.jit
def products(w, x, INTEGER: tl.constexpr):
    """Return w @ x in float32, or in int32 for integers."""
    if INTERPRET:
        if INTEGER:
            return tl.dot(w.to(tl.float32), x.to(tl.float32), input_precision="ieee").to(tl.int32)
        else:
            return tl.dot(e4m3_value(w), e4m3_value(x), input_precision="ieee")
    else:
        return tl.dot(w, x, out_dtype=tl.int32 if INTEGER else tl.float32)


@triton.jit
def added_products(w, x, acc, INTEGER: tl.constexpr):
    """Return acc + w @ x, as `products`. Tensor cores add up fp8 with fewer bits, so they get no sums of others."""
    if INTEGER and not INTERPRET:
        return tl.dot(w, x, acc, out_dtype=tl.int32)
    else:
        return acc + products(w, x, INTEGER)


@triton.jit
def _numbers(codes, INTEGER: tl.constexpr):
    """Return bytes of codes as int32, or of fp8 as float32."""
    if INTEGER:
        return codes.to(tl.int8, bitcast=True).to(tl.int32)
    elif INTERPRET:
        return e4m3_value(codes)
    else:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def one_token_kernel(
    x_ptr, x_scales_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr,
    N: tl.constexpr, K: tl.constexpr, INTEGER: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Bytes of codes x [K] with one scale times BLOCK_N rows of weight [N, K] with scales [N] -> out [N]. As in
    `small.gemv_kernel`, tensor cores are not used and the next tile of the weight is loaded ahead. GATED: the weight is
    [2 * N, K]."""
    release_consumers(USE_PDL)
    tile = tl.program_id(0)
    rows = gemv_rows(tile, N, BLOCK_N, GATED)
    column = tl.arange(0, BLOCK_K)
    w_ptrs = weight_ptr + rows[:, None].to(tl.int64) * K + column[None, :]
    coming = tl.load(w_ptrs, mask=(column < K)[None, :], other=0, eviction_policy="evict_first")
    wait_for_producers(USE_PDL)

    acc = tl.zeros([BLOCK_N, BLOCK_K // 16], dtype=tl.int32 if INTEGER else tl.float32)
    for start in range(0, K, BLOCK_K):
        w = _numbers(coming, INTEGER)
        left = K - start
        coming = tl.load(
            w_ptrs + start + BLOCK_K, mask=(column < left - BLOCK_K)[None, :], other=0, eviction_policy="evict_first"
        )
        x = _numbers(tl.load(x_ptr + start + column, mask=column < left, other=0), INTEGER)
        acc += tl.sum(tl.reshape(w * x[None, :], [BLOCK_N, BLOCK_K // 16, 16]), 2)
    y = tl.sum(acc, 1).to(tl.float32) * tl.load(scales_ptr + rows) * tl.load(x_scales_ptr)
    store_gemv(y, bias_ptr, out_ptr, rows, tile, GATED, HAS_BIAS)


@triton.jit(do_not_specialize=["tokens"])
def scaled_kernel(
    x_ptr, x_scales_ptr, weight_ptr, scales_ptr, bias_ptr, out_ptr, partial_ptr, counter_ptr, tokens,
    N: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, INTEGER: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Codes x [tokens, K] with scales [tokens, GROUPS] times codes weight [N, K] with scales [GROUPS, N] -> out
    [tokens, N], over one of SPLITS ranges of K. BLOCK_K: the size of a group. partial, counter: see `tiles.finish`."""
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    EVEN_K: tl.constexpr = K % BLOCK_K == 0
    release_consumers(USE_PDL)
    part = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows and tokens beyond the end repeat the last one, which needs no mask; their products are not stored.
    read = rows if N % BLOCK_N == 0 else tl.minimum(rows, N - 1)
    token_ids = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
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
            scales = tl.load(scales_ptr + step * N + read)
            acc += products(w, tl.trans(x), INTEGER).to(tl.float32) * (
                scales[:, None] * tl.load(x_scales_ptr + token * GROUPS + step)[None, :]
            )
        else:
            acc = added_products(w, tl.trans(x), acc, INTEGER)
    total = acc.to(tl.float32)
    if GROUPS == 1:
        total *= tl.load(scales_ptr + read)[:, None] * tl.load(x_scales_ptr + token)[None, :]
    finish(total, bias_ptr, out_ptr, partial_ptr, counter_ptr, tokens, N, SPLITS, HAS_BIAS)


def linear_scaled(x: Tensor, weight: ScaledWeight, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    n = weight.codes.shape[0]
    check_out(x, n, out)
    rows = round_rows(x.reshape(-1, x.shape[-1]), weight.rounding)
    into = None if out is None else out.view(-1, n)
    y = _product(rows.codes, rows.scales, weight, bias, x.dtype, into)
    return y.view(*x.shape[:-1], n) if out is None else out


def linear_rounded(
    codes: Tensor, scales: Tensor, weight: ScaledWeight, bias: Tensor | None = None, *, dtype: torch.dtype
) -> Tensor:
    return _product(codes, scales, weight, bias, dtype, None)


def linear_rounded_silu_mul(
    codes: Tensor, scales: Tensor, weight: ScaledWeight, *, dtype: torch.dtype
) -> Tensor | None:
    config = choose(codes, weight, dtype)
    if isinstance(config, GemvConfig | HopperConfig):
        out = torch.empty((len(codes), weight.codes.shape[0] // 2), dtype=dtype, device=codes.device)
        if isinstance(config, GemvConfig):
            multiply_one(codes, scales, weight, None, config, out, gated=True)
        else:
            _multiply_many(codes, scales, weight, None, config, out, gated=True)
        return out
    return silu_mul(_multiplied(codes, scales, weight, None, dtype, None, config)) if len(codes) == 1 else None


def _multiply_many(
    codes: Tensor,
    scales: Tensor,
    weight: ScaledWeight,
    bias: Tensor | None,
    config: HopperConfig,
    out: Tensor,
    *,
    gated: bool = False,
) -> None:
    from asyncllm.kernels.triton.linear.hopper_scaled import product

    product(codes, scales, weight, bias, out, shares=config.shares, gated=gated)


def _product(
    codes: Tensor, scales: Tensor, weight: ScaledWeight, bias: Tensor | None, dtype: torch.dtype, out: Tensor | None
) -> Tensor:
    return _multiplied(codes, scales, weight, bias, dtype, out, choose(codes, weight, dtype))


def _multiplied(
    codes: Tensor,
    scales: Tensor,
    weight: ScaledWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
    out: Tensor | None,
    config: Config,
) -> Tensor:
    tokens, n = len(codes), weight.codes.shape[0]
    if config == LIBRARY:
        y = torch._scaled_mm(
            codes, weight.codes.t(), scales, weight.scales, bias=bias, out_dtype=dtype, use_fast_accum=True
        )
        return y if out is None else out.copy_(y)
    if out is None:
        out = torch.empty((tokens, n), dtype=dtype, device=codes.device)
    if isinstance(config, GemvConfig):
        multiply_one(codes, scales, weight, bias, config, out)
    elif isinstance(config, NarrowConfig):
        from asyncllm.kernels.triton.linear.narrow_scaled import narrow_scaled

        narrow_scaled(codes, scales, weight, bias, config, out)
    elif isinstance(config, HopperConfig):
        _multiply_many(codes, scales, weight, bias, config, out)
    elif tokens:
        multiply(codes, scales, weight, bias, config, out)
    return out


def multiply(codes: Tensor, scales: Tensor, weight: ScaledWeight, bias: Tensor | None, tile: Tile, out: Tensor) -> None:
    """Multiply codes [T, K] with scales [T, G] by the weight, add bias [N], and write out [T, N]."""
    n, k = weight.codes.shape
    grid, partial, counters = split(tile, out, triton.cdiv(k, GROUP))
    x, w = operand(codes), operand(weight.codes)
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


def multiply_one(
    codes: Tensor,
    scales: Tensor,
    weight: ScaledWeight,
    bias: Tensor | None,
    config: GemvConfig,
    out: Tensor,
    *,
    gated: bool = False,
) -> None:
    """Multiply as `multiply`, for one token and a weight without groups. With `gated` the result is silu(gate) * up of
    a weight [2 * N, K] without a bias. `config.rows` divides the weight's rows."""
    rows, k = weight.codes.shape
    launch(
        one_token_kernel,
        (rows // config.rows, 1, 1),
        (
            codes.view(torch.uint8),
            scales,
            weight.codes.view(torch.uint8),
            weight.scales,
            scales if bias is None else bias,
            out,
        ),
        num_warps=config.warps,
        N=rows // 2 if gated else rows,
        K=k,
        INTEGER=weight.codes.dtype == torch.int8,
        BLOCK_N=config.rows,
        BLOCK_K=config.columns,
        GATED=gated,
        HAS_BIAS=bias is not None,
    )


def operand(codes: Tensor) -> Tensor:
    """Return codes in the dtype that kernels read: fp8 as bytes under the interpreter."""
    return codes.view(torch.uint8) if INTERPRET.value and codes.dtype != torch.int8 else codes
