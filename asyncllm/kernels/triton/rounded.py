"""Quantizes rows to 8 bits (`kernels.scaled`), alone and fused with the op that makes them: a program has a row in
registers.

Groups of a row with their own scales have their own programs, except after a norm, which needs the whole row. Under the
interpreter, which lacks fp8, codes are bytes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.scaled import GROUP, LARGEST, RoundedRows, Rounding
from asyncllm.kernels.triton.activation import apply_gate
from asyncllm.kernels.triton.language import (
    INTERPRET,
    e4m3_bits,
    nearest_integer,
    release_consumers,
    round_to,
    wait_for_producers,
)
from asyncllm.kernels.triton.launch import Configured
from asyncllm.kernels.triton.norm import normed, row_tile

__all__ = ["add_rms_norm_rounded", "gate_rounded", "round_rows"]

COLUMNS = 1024
"""Columns per program if groups have their own scales."""


@triton.jit
def _scale_of(x, input_scale_ptr, LARGEST_CODE: tl.constexpr, STATIC: tl.constexpr):
    """x [ROWS, GROUPS, WIDTH] float32 -> scales [ROWS, GROUPS]; infinite for a group with NaN."""
    if STATIC:
        return tl.zeros([x.shape[0], x.shape[1]], tl.float32) + tl.load(input_scale_ptr)
    else:
        # A maximum may pass over NaN.
        found = tl.max(tl.where(x == x, tl.abs(x), float("inf")), 2)
        return tl.div_rn(tl.where(found < 1e-12, 1e-12, found), LARGEST_CODE)


@triton.jit
def _code_of(x, per_scale, LARGEST_CODE: tl.constexpr, INTEGER: tl.constexpr):
    """x float32, and the reciprocal of its scale -> the byte of its code."""
    code = x * per_scale
    if not INTEGER and not INTERPRET:
        # To nearest even, and to the largest number if it is beyond.
        return code.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    clipped = tl.where(code > LARGEST_CODE, LARGEST_CODE, tl.where(code < -LARGEST_CODE, -LARGEST_CODE, code))
    if INTEGER:
        # NaN is represented in the scale.
        return nearest_integer(tl.where(clipped == clipped, clipped, 0.0)).to(tl.int8)
    else:
        return e4m3_bits(clipped)


@triton.jit
def _store_rounded(
    x, row, first_group, rows, codes_ptr, scales_ptr, input_scale_ptr,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, LARGEST_CODE: tl.constexpr, INTEGER: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    """x [ROWS, COLUMNS] float32, zeros past SIZE, whose groups of WIDTH start at `first_group` -> codes [rows, SIZE]
    and scales [rows, groups]."""
    ROWS: tl.constexpr = x.shape[0]
    GROUPS: tl.constexpr = x.shape[1] // WIDTH
    ALL: tl.constexpr = (SIZE + WIDTH - 1) // WIDTH
    grouped = tl.reshape(x, [ROWS, GROUPS, WIDTH])
    scales = _scale_of(grouped, input_scale_ptr, LARGEST_CODE, STATIC)
    per_scale = tl.div_rn(tl.full([ROWS, GROUPS], 1.0, tl.float32), scales)
    spread = tl.reshape(tl.broadcast_to(per_scale[:, :, None], [ROWS, GROUPS, WIDTH]), [ROWS, GROUPS * WIDTH])
    columns = first_group * WIDTH + tl.arange(0, GROUPS * WIDTH)
    inside = (row < rows)[:, None] & (columns < SIZE)[None, :]
    codes = _code_of(x, spread, LARGEST_CODE, INTEGER)
    tl.store(codes_ptr + row.to(tl.int64)[:, None] * SIZE + columns[None, :], codes, mask=inside)
    groups = first_group + tl.arange(0, GROUPS)
    known = (row < rows)[:, None] & (groups < ALL)[None, :]
    tl.store(scales_ptr + row.to(tl.int64)[:, None] * ALL + groups[None, :], scales, mask=known)


@triton.jit(do_not_specialize=["rows"])
def round_rows_kernel(
    x_ptr, codes_ptr, scales_ptr, input_scale_ptr, rows,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, LARGEST_CODE: tl.constexpr, INTEGER: tl.constexpr,
    STATIC: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """x [rows, SIZE] -> codes, as bytes, and scales; one program per row and block of columns."""
    row = tl.program_id(0) + tl.arange(0, 1)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    offsets = row.to(tl.int64)[:, None] * SIZE + columns[None, :]
    x = tl.load(x_ptr + offsets, mask=(columns < SIZE)[None, :], other=0.0).to(tl.float32)
    first = tl.program_id(1) * (COLUMNS // WIDTH)
    _store_rounded(
        x, row, first, rows, codes_ptr, scales_ptr, input_scale_ptr, SIZE, WIDTH, LARGEST_CODE, INTEGER, STATIC
    )


@triton.jit(do_not_specialize=["rows"])
def gate_rounded_kernel(
    x_ptr, codes_ptr, scales_ptr, input_scale_ptr, rows,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, GELU: tl.constexpr, WIDTH: tl.constexpr, LARGEST_CODE: tl.constexpr,
    INTEGER: tl.constexpr, STATIC: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """x [rows, 2 * SIZE], gate first -> codes and scales of [rows, SIZE]; one program per row and block of columns."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0) + tl.arange(0, 1)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (columns < SIZE)[None, :]
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    offsets = row.to(tl.int64)[:, None] * (2 * SIZE) + columns[None, :]
    gate = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + SIZE + offsets, mask=inside, other=0.0).to(tl.float32)
    x = apply_gate(gate, up, dtype, GELU).to(tl.float32)
    first = tl.program_id(1) * (COLUMNS // WIDTH)
    _store_rounded(
        x, row, first, rows, codes_ptr, scales_ptr, input_scale_ptr, SIZE, WIDTH, LARGEST_CODE, INTEGER, STATIC
    )


@triton.jit(do_not_specialize=["rows", "eps"])
def add_rms_norm_rounded_kernel(
    x_ptr, residual_ptr, weight_ptr, sum_ptr, codes_ptr, scales_ptr, input_scale_ptr, rows, eps,
    SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, LARGEST_CODE: tl.constexpr,
    INTEGER: tl.constexpr, STATIC: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """x and residual [rows, SIZE] -> their sum, and codes and scales of its norm; one program per ROWS rows."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    columns = tl.arange(0, COLUMNS)
    weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offsets = row.to(tl.int64)[:, None] * SIZE + columns[None, :]
    inside = (row < rows)[:, None] & (columns < SIZE)[None, :]
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    total = round_to(x + tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32), dtype)
    tl.store(sum_ptr + offsets, total, mask=inside)
    x = normed(total.to(tl.float32), weight, eps, SIZE, dtype).to(tl.float32)
    _store_rounded(x, row, 0, rows, codes_ptr, scales_ptr, input_scale_ptr, SIZE, WIDTH, LARGEST_CODE, INTEGER, STATIC)


def round_rows(x: Tensor, rounding: Rounding) -> RoundedRows:
    x = x.contiguous()
    rows, size = x.shape
    codes, scales = _empty(rows, size, rounding, x)
    if rows:
        columns, kernel = _configured_round(size, *_form(rounding))
        kernel((rows, -(-size // columns), 1), (x, codes, scales, _given(rounding, scales)), (rows,))
    return RoundedRows(codes.view(rounding.dtype), scales, x.dtype)


def gate_rounded(x: Tensor, rounding: Rounding, *, gelu: bool = False) -> RoundedRows:
    x = x.contiguous()
    rows, size = len(x), x.shape[1] // 2
    codes, scales = _empty(rows, size, rounding, x)
    if rows:
        columns, kernel = _configured_gate(size, gelu, *_form(rounding))
        kernel((rows, -(-size // columns), 1), (x, codes, scales, _given(rounding, scales)), (rows,))
    return RoundedRows(codes.view(rounding.dtype), scales, x.dtype)


def add_rms_norm_rounded(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, rounding: Rounding
) -> tuple[RoundedRows, Tensor]:
    x, residual = x.contiguous(), residual.contiguous()
    rows, size = x.shape
    total = torch.empty_like(x)
    codes, scales = _empty(rows, size, rounding, x)
    if rows:
        tile, kernel = _configured_norm(size, *_form(rounding))
        tensors = (x, residual, weight, total, codes, scales, _given(rounding, scales))
        kernel((-(-rows // tile), 1, 1), tensors, (rows, eps))
    return RoundedRows(codes.view(rounding.dtype), scales, x.dtype), total


_Form = tuple[torch.dtype, bool, bool]


def _form(rounding: Rounding) -> _Form:
    return rounding.dtype, rounding.grouped, rounding.scale is not None


def _given(rounding: Rounding, stand_in: Tensor) -> Tensor:
    return stand_in if rounding.scale is None else rounding.scale


def _empty(rows: int, size: int, rounding: Rounding, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return empty codes, as bytes, and scales."""
    kind = torch.int8 if rounding.dtype == torch.int8 else torch.uint8
    codes = torch.empty((rows, size), dtype=kind, device=like.device)
    return codes, torch.empty((rows, rounding.groups(size)), dtype=torch.float32, device=like.device)


def _constexprs(dtype: torch.dtype, grouped: bool, static: bool, columns: int) -> dict[str, Any]:
    return {
        "WIDTH": GROUP if grouped else columns,
        "LARGEST_CODE": LARGEST[dtype],
        "INTEGER": dtype == torch.int8,
        "STATIC": static,
    }


def row_block(size: int, grouped: bool) -> tuple[int, int]:
    """Return columns and warps of a program: a whole row with 32 numbers per thread, in up to 32 warps, or some of its
    groups."""
    columns = max(GROUP, COLUMNS if grouped else triton.next_power_of_2(size))
    return columns, min(32, max(4, columns // 1024))


@functools.cache
def _configured_round(size: int, dtype: torch.dtype, grouped: bool, static: bool) -> tuple[int, Configured]:
    columns, warps = row_block(size, grouped)
    given = _constexprs(dtype, grouped, static, columns)
    return columns, Configured(round_rows_kernel, num_warps=warps, SIZE=size, COLUMNS=columns, **given)


@functools.cache
def _configured_gate(size: int, gelu: bool, dtype: torch.dtype, grouped: bool, static: bool) -> tuple[int, Configured]:
    columns, warps = row_block(size, grouped)
    given = _constexprs(dtype, grouped, static, columns)
    if not grouped:
        warps = min(32, 2 * warps)  # Of 14,336 numbers on an H200: 3.5 us for 3.6.
    return columns, Configured(gate_rounded_kernel, num_warps=warps, SIZE=size, COLUMNS=columns, GELU=gelu, **given)


@functools.cache
def _configured_norm(size: int, dtype: torch.dtype, grouped: bool, static: bool) -> tuple[int, Configured]:
    """Return rows per program, and the kernel."""
    rows, columns, warps = row_tile(max(size, GROUP))
    given = _constexprs(dtype, grouped, static, columns)
    if not grouped:
        warps = min(32, 2 * warps)  # Of 4,096 numbers on an H200: 1.6 us for 1.7.
    kernel = Configured(add_rms_norm_rounded_kernel, num_warps=warps, SIZE=size, ROWS=rows, COLUMNS=columns, **given)
    return rows, kernel
