"""Norms of rows: one program per row, or per few short rows, with everything in registers.

A row is summed in an order that depends only on its length, so that the result does not change with the batch.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.language import release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.launch import Configured

__all__ = ["MAX_ROW", "add_layer_norm", "add_rms_norm", "layer_norm", "mean_squares", "normed", "rms_norm", "row_tile"]

MAX_ROW = 16384
"""Longest row: 64 registers per thread at 8 warps."""

TILE = 1024
"""Numbers per program that has several rows."""


def row_tile(size: int) -> tuple[int, int, int]:
    """Return rows, columns (a power of two) and warps of a program, for rows of `size`.

    At 4096 columns 8 warps hold 16 numbers per thread, two 16-byte loads from each input, in 40 registers (64 at 8192
    columns, 128 at 16384). With the addition, 256 rows of 4096 take 4.3 us in a decode step on an H200.
    """
    if size > MAX_ROW:
        raise ValueError(f"a norm takes rows of at most {MAX_ROW} numbers, not {size}")
    columns = triton.next_power_of_2(size)
    rows = max(1, TILE // columns)
    return rows, columns, 4 if rows * columns <= 2048 else 8


@triton.jit
def normed(x, weight, eps, SIZE: tl.constexpr, dtype: tl.constexpr):
    """Normalise x [ROWS, COLUMNS] float32, zeros past SIZE; round where the reference rounds."""
    # The mean of squares may be finite when their sum is not.
    scale = tl.rsqrt(tl.sum(x * (x * (1.0 / SIZE)), 1) + eps)
    x = x * scale[:, None]
    if weight.dtype == dtype:
        # The product of two 16-bit numbers is exact in float32, so it is rounded once, as in 16-bit arithmetic.
        return round_to(round_to(x, dtype).to(tl.float32) * weight.to(tl.float32)[None, :], dtype)
    else:
        return round_to(x * weight.to(tl.float32)[None, :], dtype)


@triton.jit(do_not_specialize=["rows", "eps"])
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    rows,
    eps,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADD: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    columns = tl.arange(0, COLUMNS)
    weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offsets = row.to(tl.int64)[:, None] * SIZE + columns[None, :]
    inside = (row < rows)[:, None] & (columns < SIZE)[None, :]
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if ADD:
        total = round_to(x + tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32), dtype)
        tl.store(sum_ptr + offsets, total, mask=inside)
        x = total.to(tl.float32)
    tl.store(out_ptr + offsets, normed(x, weight, eps, SIZE, dtype), mask=inside)


@triton.jit(do_not_specialize=["rows", "eps"])
def layer_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    sum_ptr,
    rows,
    eps,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    columns = tl.arange(0, COLUMNS)
    weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offsets = row.to(tl.int64)[:, None] * SIZE + columns[None, :]
    inside = (row < rows)[:, None] & (columns < SIZE)[None, :]
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        total = round_to(
            x + tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32), out_ptr.dtype.element_ty
        )
        tl.store(sum_ptr + offsets, total, mask=inside)
        x = total.to(tl.float32)
    mean = tl.sum(x, 1) / SIZE
    centred = tl.where(inside, x - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 1) / SIZE + eps)
    out = centred * scale[:, None] * weight[None, :]
    if HAS_BIAS:
        out += tl.load(bias_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + offsets, round_to(out, out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def mean_squares_kernel(
    x_ptr,
    out_ptr,
    rows,
    STRIDE: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    columns = tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    size = tl.where(part == 0, FIRST, SECOND)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (columns < size)[None, :]
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    start = row.to(tl.int64)[:, None] * STRIDE + part * FIRST
    x = tl.load(x_ptr + start + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row.to(tl.int64) * 2 + part, tl.sum(x * (x * (1.0 / size)), 1), mask=row < rows)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    _rms_norm(x, x, weight, out, out, eps, add=False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    _rms_norm(x, residual, weight, out, total, eps, add=True)
    return out, total


def _rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, total: Tensor, eps: float, *, add: bool
) -> None:
    size = x.shape[-1]
    rows = x.numel() // size
    if rows:
        tile, kernel = _configured_rms_norm(size, add)
        kernel((-(-rows // tile), 1, 1), (x, residual, weight, out, total), (rows, eps))


@functools.cache
def _configured_rms_norm(size: int, add: bool) -> tuple[int, Configured]:
    """Return rows per program, and the kernel."""
    rows, columns, num_warps = row_tile(size)
    return rows, Configured(rms_norm_kernel, num_warps=num_warps, SIZE=size, ROWS=rows, COLUMNS=columns, ADD=add)


def mean_squares(x: Tensor, sizes: tuple[int, int]) -> Tensor:
    x = x.contiguous()
    out = torch.empty(len(x), 2, dtype=torch.float32, device=x.device)
    if len(x):
        tile, kernel = _configured_mean_squares(x.shape[1], *sizes)
        kernel((-(-len(x) // tile), 2, 1), (x, out), (len(x),))
    return out


@functools.cache
def _configured_mean_squares(stride: int, first: int, second: int) -> tuple[int, Configured]:
    """Return rows of a program, and the kernel."""
    rows, columns, warps = row_tile(max(first, second))
    return rows, Configured(
        mean_squares_kernel,
        num_warps=warps,
        STRIDE=stride,
        FIRST=first,
        SECOND=second,
        ROWS=rows,
        COLUMNS=columns,
    )


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    _layer_norm(x, x, weight, bias, out, out, eps, add=False)
    return out


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    _layer_norm(x, residual, weight, bias, out, total, eps, add=True)
    return out, total


def _layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    total: Tensor,
    eps: float,
    *,
    add: bool,
) -> None:
    size = x.shape[-1]
    rows = x.numel() // size
    if rows:
        tile, kernel = _configured_layer_norm(size, bias is not None, add)
        pointers = (x, residual, weight, weight if bias is None else bias, out, total)
        kernel((-(-rows // tile), 1, 1), pointers, (rows, eps))


@functools.cache
def _configured_layer_norm(size: int, has_bias: bool, add: bool) -> tuple[int, Configured]:
    """Return rows per program, and the kernel."""
    rows, columns, warps = row_tile(size)
    return rows, Configured(
        layer_norm_kernel, num_warps=warps, SIZE=size, ROWS=rows, COLUMNS=columns, HAS_BIAS=has_bias, ADD=add
    )
