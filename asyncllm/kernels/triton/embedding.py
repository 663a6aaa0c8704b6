"""Rows of a table by index: one program per row and block of columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.embedding import rounded
from asyncllm.kernels.triton.language import release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.launch import launch

__all__ = ["embed", "gather_rows"]

COLUMNS = 2048
"""Columns per program: with 4 warps, each thread has two 16-byte loads, in 24 registers."""


@triton.jit(do_not_specialize=["scale"], do_not_specialize_on_alignment=["index_ptr"])
def gather_kernel(
    index_ptr,
    table_ptr,
    out_ptr,
    scale,
    STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALED: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < SIZE
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    source = tl.load(index_ptr + tl.program_id(0)).to(tl.int64)
    row = tl.load(table_ptr + source * STRIDE + columns, mask=inside)
    if SCALED:
        row = round_to(row.to(tl.float32) * scale, out_ptr.dtype.element_ty)
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * SIZE + columns, row, mask=inside)


def embed(ids: Tensor, table: Tensor, scale: float | None = None) -> Tensor:
    return _gather(ids, table, 1.0 if scale is None else rounded(scale, table.dtype), scaled=scale is not None)


def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    return _gather(indices, x.contiguous(), 1.0, scaled=False)


def _gather(indices: Tensor, table: Tensor, scale: float, *, scaled: bool) -> Tensor:
    count, size = indices.shape[0], table.shape[1]
    out = torch.empty((count, size), dtype=table.dtype, device=table.device)
    # Queries are strided, with keys and values between them.
    if table.stride(1) != 1:
        table = table.contiguous()
    if count:
        launch(
            gather_kernel,
            (count, -(-size // COLUMNS), 1),
            (indices.contiguous(), table, out),
            (scale,),
            STRIDE=table.stride(0),
            SIZE=size,
            COLUMNS=COLUMNS,
            SCALED=scaled,
        )
    return out
