"""Layers with a state: one program per token or row, and block of features or head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.recurrent import StatePlan
from asyncllm.kernels.triton.language import release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.launch import launch

__all__ = ["short_convolution"]

COLUMNS = 512
"""Features per program: 4 for each thread of 4 warps."""


@triton.jit
def convolution_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    row_ptr,
    offset_ptr,
    source_ptr,
    y_ptr,
    SIZE: tl.constexpr,
    LENGTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < SIZE
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    row = tl.load(row_ptr + token)
    begin = tl.load(offset_ptr + row).to(tl.int64)
    source = tl.load(source_ptr + row)
    y = tl.zeros((COLUMNS,), tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    for back in tl.static_range(LENGTH):
        index = token - back
        given = index >= begin
        line = source * (LENGTH - 1) + LENGTH - 1 + index - begin
        new = tl.load(x_ptr + index * SIZE + columns, mask=inside & given, other=0.0)
        old = tl.load(state_ptr + line * SIZE + columns, mask=inside & (given == 0) & (source >= 0), other=0.0)
        weight = tl.load(weight_ptr + columns * LENGTH + (LENGTH - 1 - back), mask=inside, other=0.0)
        y += (new.to(tl.float32) + old.to(tl.float32)) * weight.to(tl.float32)
    if SILU:
        y = y / (1.0 + tl.exp(-y))
    tl.store(y_ptr + token * SIZE + columns, round_to(y, y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _keep_inputs(
    x_ptr, state_ptr, target_ptr, token, begin, source, columns, inside, SIZE: tl.constexpr, KEPT: tl.constexpr
):
    """Write the latest inputs up to `token` to its target. A line from the state is further back in it than the line
    that it becomes, so both may be the same memory."""
    target = tl.load(target_ptr + token)
    for line in tl.static_range(KEPT):
        index = token - (KEPT - 1) + line
        given = index >= begin
        held = source * KEPT + KEPT + index - begin
        new = tl.load(x_ptr + index * SIZE + columns, mask=inside & given, other=0.0)
        old = tl.load(state_ptr + held * SIZE + columns, mask=inside & (given == 0) & (source >= 0), other=0.0)
        value = tl.where(given, new, old)
        tl.store(state_ptr + (target * KEPT + line) * SIZE + columns, value, mask=inside & (target >= 0))


@triton.jit
def inputs_kernel(
    x_ptr,
    state_ptr,
    row_ptr,
    offset_ptr,
    source_ptr,
    target_ptr,
    SIZE: tl.constexpr,
    KEPT: tl.constexpr,
    COLUMNS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < SIZE
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    row = tl.load(row_ptr + token)
    begin = tl.load(offset_ptr + row).to(tl.int64)
    source = tl.load(source_ptr + row)
    if token == begin:
        # One program does everything that needs the source's state, last token first, because the first may overwrite
        # it.
        end = tl.load(offset_ptr + row + 1).to(tl.int64)
        for back in tl.static_range(KEPT - 1):
            each = begin + (KEPT - 2 - back)
            if each < end:
                _keep_inputs(x_ptr, state_ptr, target_ptr, each, begin, source, columns, inside, SIZE, KEPT)
    if token - begin >= KEPT - 1:
        _keep_inputs(x_ptr, state_ptr, target_ptr, token, begin, source, columns, inside, SIZE, KEPT)


def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, plan: StatePlan, *, silu: bool
) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    count, size = x.shape
    if count:
        grid = (count, -(-size // COLUMNS), 1)
        where = (plan.rows, plan.q_offsets, plan.sources)
        launch(
            convolution_kernel,
            grid,
            (x, weight, weight if bias is None else bias, state, *where, y),
            SIZE=size,
            LENGTH=weight.shape[1],
            COLUMNS=COLUMNS,
            HAS_BIAS=bias is not None,
            SILU=silu,
        )
        tensors = (x, state, *where, plan.targets)
        launch(inputs_kernel, grid, tensors, SIZE=size, KEPT=weight.shape[1] - 1, COLUMNS=COLUMNS)
    return y
