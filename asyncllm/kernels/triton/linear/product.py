"""Launchers of the linear ops, and the measured table of shapes for which Triton beats cuBLAS."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.linear import check_out
from asyncllm.kernels.triton.device import table_name
from asyncllm.kernels.triton.launch import fits_tensor_map
from asyncllm.kernels.triton.linear.invariant import choose_tile, matmul_invariant
from asyncllm.kernels.triton.linear.small import GemvConfig, NarrowConfig, SkinnyConfig, gemv, skinny

__all__ = ["TABLES", "by_tensor_cores", "choose", "for_few_tokens", "linear", "linear_invariant"]

_Entry = TypeVar("_Entry")

Config = GemvConfig | SkinnyConfig | NarrowConfig

Table = dict[tuple[int, int], tuple[tuple[int, Config], ...]]

TABLES: dict[str, Table] = {
    "NVIDIA H200": {
        (6144, 4096): (
            (1, GemvConfig(4, 1024)),  # 12.0 us, cuBLAS 15.2
            (2, GemvConfig(8, 1024)),  # 13.4 us, 16.3
            (32, SkinnyConfig(64, 128, splits=1, stages=6)),  # a layer of 8 tokens 120.1 us, with cuBLAS here 122.6
            (64, SkinnyConfig(64, 128, splits=1, stages=5)),
        ),
        (4096, 4096): (
            (1, GemvConfig(4, 2048, warps=8)),  # 8.9 us, 12.4
            (16, NarrowConfig(64, parts=2, stages=10, splits=2)),  # a layer 127.2 us, with skinny here 129.6
            (32, NarrowConfig(64, parts=2, stages=8, splits=2)),  # a layer 139.2 us, with skinny here 140.9
            (64, NarrowConfig(64, parts=2, stages=6, splits=2)),  # a layer at 60 tokens 145.2 us, cuBLAS 146.7
        ),
        (28672, 4096): (
            (1, GemvConfig(4, 2048, warps=8)),  # 51.7 us, 54.5
            (64, SkinnyConfig(128, 128, splits=1, stages=4, warps=8)),  # a layer 129.7 us, in tiles of 64 rows 131.5
        ),
        (4096, 14336): (
            (1, GemvConfig(8, 2048, warps=8)),  # 26.7 us, 30.4
            (16, NarrowConfig(64, parts=2, stages=10, splits=2)),  # a layer 115.7 us, with skinny here 118.6
            (32, NarrowConfig(64, parts=2, stages=8, splits=2)),  # a layer 121.0 us, with skinny here 123.4
            (64, SkinnyConfig(64, 128, splits=2, stages=5)),  # 31.6 us, 34.8
        ),
        (128256, 4096): ((1, GemvConfig(4, 4096, warps=8)),),  # 226 us, 238
        (3072, 4096): (
            (1, GemvConfig(4, 1024)),
            (2, GemvConfig(8, 1024)),
            (32, SkinnyConfig(64, 128, splits=2, stages=6)),
            (64, SkinnyConfig(64, 128, splits=2, stages=5)),
        ),
        (4096, 2048): (
            (1, GemvConfig(4, 2048, warps=8)),
            (32, NarrowConfig(64, parts=2, stages=8, splits=2)),
            (64, NarrowConfig(64, parts=2, stages=6, splits=2)),
        ),
        (14336, 4096): (
            (1, GemvConfig(4, 2048, warps=8)),
            (64, SkinnyConfig(128, 128, splits=1, stages=4, warps=8)),
        ),
        (4096, 7168): (
            (1, GemvConfig(8, 1024, warps=8)),
            (16, NarrowConfig(64, parts=2, stages=10, splits=2)),
            (32, NarrowConfig(64, parts=2, stages=8, splits=2)),
            (64, SkinnyConfig(64, 128, splits=2, stages=5)),
        ),
        (3072, 2048): ((1, GemvConfig(2, 1024)), (16, SkinnyConfig(64, 128, splits=2, stages=5))),  # 5.0, 6.8 us
        (5632, 2048): (
            (1, GemvConfig(8, 512)),  # 7.6 us, cuBLAS 9.7
            (16, SkinnyConfig(64, 128, splits=1, stages=5)),  # 8.7 us, 9.9
            (64, SkinnyConfig(64, 128, splits=1, stages=4)),  # 9.7 us, 11.1
        ),
        (2048, 2816): (
            (1, GemvConfig(2, 1024)),  # 5.0 us, 8.0
            (16, SkinnyConfig(64, 128, splits=2, stages=5)),  # 7.1 us, 8.4
            (64, SkinnyConfig(64, 128, splits=4, stages=4)),  # 7.8 us, 8.8
        ),
        (2048, 2048): (
            (1, GemvConfig(2, 1024)),  # 4.0 us, 7.1
            (16, SkinnyConfig(64, 128, splits=2, stages=5)),  # 6.0 us, 7.2
            (64, SkinnyConfig(64, 128, splits=4, stages=4)),  # 7.1 us, 7.5
        ),
        (5120, 2048): ((1, GemvConfig(4, 512)), (16, SkinnyConfig(64, 128, splits=1, stages=5))),  # 7.2, 8.3 us
        (2048, 4096): (
            (1, GemvConfig(2, 1024)),  # 6.3 us, 9.4
            (16, SkinnyConfig(64, 128, splits=2, stages=5)),  # 8.7 us, 9.9
            (64, SkinnyConfig(64, 128, splits=4, stages=4)),  # 9.3 us, 10.7
        ),
        (2880, 4096): ((1, GemvConfig(2, 1024)), (16, SkinnyConfig(64, 128, splits=2, stages=5))),  # 7.9, 9.7 us
        (8192, 3584): (
            (1, GemvConfig(4, 1024)),  # 18.0 us, 20.7
            (16, NarrowConfig(64, parts=2, stages=8)),  # 17.6 us, 18.6
            (64, SkinnyConfig(64, 128, splits=1, stages=4)),  # 18.4 us, 20.2
        ),
        (3584, 14336): (
            (1, GemvConfig(4, 1024)),  # 27.0 us, 30.9
            (16, NarrowConfig(64, parts=2, stages=8, splits=2)),  # 30.0 us, 33.6
            (64, SkinnyConfig(64, 128, splits=2, stages=4)),  # 33.5 us, 34.6
        ),
    }
}
"""Device name -> weight shape (N, K) -> (maximum number of tokens, configuration), ascending. Numbers that no entry
covers use cuBLAS. Figures are in bf16, with the weights of 32 layers in turn (Triton 3.6.0, CUDA 13.0).

Entries with a figure for the product are at least 5 % faster than cuBLAS. The others are as fast as cuBLAS alone, but
shorten a whole layer, since programmatic dependent launch hides the gaps around them. Their figures, and those of
entries without one, are for a layer's products, norms and gate in one graph (all cuBLAS: 126.9 us at 16 tokens, 129.4
at 32, 134.6 at 64). Those of 4096 x 4096 are for a layer with attention to 400 keys per row, or 250 at 60 tokens, since
the ring of weights is filled while attention runs.

Four shapes are halves of the first ones, for two ranks. They use the same configurations and are not timed. The nine
after them, timed after a norm, are DeepSeek-V2-Lite's, Qwen3-30B-A3B's, gpt-oss-20b's and Gemma-2-9B's; for lines with
two figures, cuBLAS takes 7.5 and 7.7, 9.1 and 9.3, 12.0 and 12.4 us.

From 65 tokens on no kernel here is consistently faster than cuBLAS. Products with a producer warp (`linear/hopper.py`),
in whole tiles, split or in equal shares, are within 2 % of it from 1,024 tokens on and 3 to 26 % slower below. Only the
product of gate and up is faster, 102.6 us instead of 109.5 at 256 tokens, and more so with the gate in the same kernel:
`linear/gated.py`."""


FEW_FEATURES, MOST_FEATURES = 1024, 65536

ONE_TOKEN = GemvConfig(4, 1024)
"""For one token and shapes without an entry, of up to MOST_FEATURES output features. After a norm on an H200, in us
here and with cuBLAS: 4608 x 3584 10.3, 12.7; 3584 x 3584 8.7, 12.1; 37888 x 3584 62.7, 71.6; 8192 x 3584 18.0, 20.7;
3584 x 14336 27.0, 30.9; 9216 x 3072 15.7, 20.1; 3072 x 8192 14.8, 19.3; 4544 x 4544 12.5, 15.9; 18176 x 4544 39.9,
47.2. No other of eight tiles is more than 9 % faster."""

ONE_TOKEN_FEW_FEATURES = GemvConfig(2, 2048, warps=8)
"""The same for fewer than FEW_FEATURES: 576 x 2048 2.5, 7.2; 128 x 2048 1.8, 5.8; 32 x 2880 2.3, 6.4."""

FEW_TOKENS = 16
"""Maximum number of tokens for which shapes without an entry use `linear/narrow.py`, if they have FEW_TILES to
MOST_TILES tiles of 64 features. After a norm on an H200, in us for 16 tokens here and with cuBLAS: 4608 x 3584 11.2,
12.3; 3072 x 3072 8.7, 10.1; 3072 x 8192 17.0, 19.1; 9216 x 3072 17.4, 20.4; 4672 x 4544 13.9, 16.9; 4544 x 4544 13.5,
16.3; 3584 x 3584 10.4, 11.7; 3584 x 4096 11.1, 12.9."""

FEW_TILES, MOST_TILES = 44, 160


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    check_out(x, weight.shape[0], out)
    rows = x.reshape(-1, x.shape[-1])
    config = for_few_tokens(rows, weight)
    if config is not None:
        into = None if out is None else out.view(-1, weight.shape[0])
        if isinstance(config, GemvConfig):
            y = gemv(rows, weight, bias, config=config, out=into)
        else:
            y = by_tensor_cores(rows, weight, bias, config=config, out=into)
        return y.view(*x.shape[:-1], weight.shape[0]) if out is None else out
    if _is_uneven(weight):
        return _uneven(x, weight, bias, out)
    if out is None:
        return F.linear(x, weight, bias)
    _multiply(x.reshape(-1, x.shape[-1]), weight, bias, out.view(-1, weight.shape[0]))
    return out


def by_tensor_cores(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    config: SkinnyConfig | NarrowConfig,
    release_first: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Return `small.skinny` or `narrow.narrow` of rows [T, K], as the configuration says."""
    if isinstance(config, SkinnyConfig):
        return skinny(rows, weight, bias, config=config, release_first=release_first, out=out)
    from asyncllm.kernels.triton.linear.narrow import narrow

    return narrow(rows, weight, bias, config=config, release_first=release_first, out=out)


def for_few_tokens(rows: Tensor, weight: Tensor) -> Config | None:
    """Return the configuration of the kernel for rows [T, K] and weight [N, K], or None for cuBLAS."""
    table = _table(rows.device)
    if not table or rows.dtype.itemsize != 2:
        return None
    entry = choose(table, rows, weight)
    if entry is not None:
        return entry
    config = _by_shape(*rows.shape, weight.shape[0])
    return config if config is not None and fits_tensor_map(rows) and fits_tensor_map(weight) else None


@cache
def _by_shape(tokens: int, in_features: int, features: int) -> GemvConfig | NarrowConfig | None:
    if tokens == 1:
        gemv = ONE_TOKEN_FEW_FEATURES if features < FEW_FEATURES else ONE_TOKEN
        return gemv if features <= MOST_FEATURES and features % gemv.rows == 0 else None
    tiles = -(-features // 64)
    if not (
        0 < tokens <= FEW_TOKENS and FEW_TILES <= tiles <= MOST_TILES and features % 8 == 0 and in_features >= 2048
    ):
        return None
    # One tile per multiprocessor, or larger tiles if there would be two for each.
    if tiles > 132:
        return NarrowConfig(128, parts=1, stages=8)
    return NarrowConfig(64, parts=2, stages=8, splits=2 if tiles <= 66 else 1)


def _multiply(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)


def _is_uneven(weight: Tensor) -> bool:
    """Return whether rows of results do not begin at multiples of 16 bytes."""
    lines = 16 // weight.itemsize
    return weight.shape[0] % lines > 0 and weight.shape[0] > lines


def _uneven(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """Return `linear` by two products: one with the largest number of the weight's rows for which cuBLAS has fast
    kernels, one with the last rows. A single product takes 2.0 ms for a vocabulary of 92,553 tokens, but 0.26 for one
    of 92,552 (256 rows of 4,096 numbers)."""
    features, lines = weight.shape[0], 16 // weight.itemsize
    even = features - features % lines
    rows = x.reshape(-1, x.shape[-1])
    results = rows.new_empty(rows.shape[0], even + lines)
    _multiply(rows, weight[:even], None if bias is None else bias[:even], results[:, :even])
    last = F.linear(rows, weight[-lines:], None if bias is None else bias[-lines:])
    results[:, even:features] = last[:, even - features :]
    results = results[:, :features].reshape(*x.shape[:-1], features)
    return results if out is None else out.copy_(results)


def linear_invariant(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    check_out(x, weight.shape[0], out)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if rows.shape[0] == 0:
        return x.new_empty((*x.shape[:-1], weight.shape[0])) if out is None else out
    tile = choose_tile(rows.shape[0], weight.shape[0], rows.dtype, _processors(x.device))
    into = None if out is None else out.view(-1, weight.shape[0])
    y = matmul_invariant(rows, weight.contiguous(), bias, tile, out=into)
    return y.view(*x.shape[:-1], weight.shape[0]) if out is None else out


def choose(
    table: Mapping[tuple[int, int], tuple[tuple[int, _Entry], ...]], rows: Tensor, weight: Tensor
) -> _Entry | None:
    """Return the table's entry for 16-bit rows [T, K] and weight [N, K], or None for cuBLAS."""
    for most, config in table.get((weight.shape[0], weight.shape[1]), ()):
        if 0 < rows.shape[0] <= most:
            return config if fits_tensor_map(rows) and fits_tensor_map(weight) else None
    return None


@cache
def _table(device: torch.device) -> Table:
    return TABLES.get(table_name(device), {})


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
