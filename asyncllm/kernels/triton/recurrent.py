"""Layers with a state: programs of one token or row, and a block of features or a head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.recurrent import StatePlan
from asyncllm.kernels.triton.language import release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.launch import launch
from asyncllm.kernels.triton.pieces import recur_by_piece

__all__ = ["gated_delta_rule", "short_convolution", "state_space"]

COLUMNS = 512
"""Features of a program: 4 for each thread of 4 warps."""

VALUES = 32
"""Values of a head in a program of the delta rule: with 128 keys, 32 numbers of the memory in each thread of 4 warps.
Not measured on a device."""


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
    """Write the latest inputs up to `token` to its target. A line that comes from the state is further behind in it
    than the line that it becomes, so that the two may be the same memory."""
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
        # What needs the state of the source is done by one program, the last token first: the first may overwrite it.
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


@triton.jit
def delta_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    state_ptr,
    offset_ptr,
    source_ptr,
    target_ptr,
    out_ptr,
    HEADS: tl.constexpr,
    SHARING: tl.constexpr,
    KEYS: tl.constexpr,
    ALL_VALUES: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUES: tl.constexpr,
    DELTA: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    keys = tl.arange(0, KEY_TILE)
    values = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = keys < KEYS, values < ALL_VALUES
    tile = keys[:, None] * ALL_VALUES + values[None, :]
    inside = is_key[:, None] & is_value[None, :]
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    begin, end = tl.load(offset_ptr + row).to(tl.int64), tl.load(offset_ptr + row + 1).to(tl.int64)
    source = tl.load(source_ptr + row)
    memory = tl.load(
        state_ptr + (source * HEADS + head) * (KEYS * ALL_VALUES) + tile, mask=inside & (source >= 0), other=0.0
    )
    for token in range(begin, end):
        at_keys = (token * (HEADS // SHARING) + head // SHARING) * KEYS + keys
        at_values = (token * HEADS + head) * ALL_VALUES + values
        k = tl.load(k_ptr + at_keys, mask=is_key, other=0.0).to(tl.float32)
        q = tl.load(q_ptr + at_keys, mask=is_key, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + at_values, mask=is_value, other=0.0).to(tl.float32)
        memory *= tl.exp(tl.load(decay_ptr + token * HEADS + head))
        if DELTA:
            k /= tl.sqrt(tl.sum(k * k, 0) + 1e-6)
            q /= tl.sqrt((tl.sum(q * q, 0) + 1e-6) * KEYS)
            v -= tl.sum(memory * k[:, None], 0)
        learned = v * tl.load(beta_ptr + token * HEADS + head)
        memory += k[:, None] * learned[None, :]
        out = tl.sum(memory * q[:, None], 0)
        tl.store(out_ptr + at_values, round_to(out, out_ptr.dtype.element_ty), mask=is_value)
        target = tl.load(target_ptr + token)
        tl.store(state_ptr + (target * HEADS + head) * (KEYS * ALL_VALUES) + tile, memory, mask=inside & (target >= 0))


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, plan: StatePlan
) -> Tensor:
    return _recur(q, k, v, log_decay, beta, state, plan, delta=True)


def state_space(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, sizes: Tensor, state: Tensor, plan: StatePlan
) -> Tensor:
    return _recur(q, k, v, log_decay, sizes, state, plan, delta=False)


def _recur(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    plan: StatePlan,
    *,
    delta: bool,
) -> Tensor:
    q, k, v, log_decay, beta = (each.contiguous() for each in (q, k, v, log_decay, beta))
    out = torch.empty_like(v)
    count, heads, values = v.shape
    keys = k.shape[2]
    if count and plan.num_serial:
        tile = min(VALUES, triton.next_power_of_2(values))
        launch(
            delta_kernel,
            (plan.num_serial, heads, -(-values // tile)),
            (q, k, v, log_decay, beta, state, plan.q_offsets, plan.sources, plan.targets, out),
            HEADS=heads,
            SHARING=heads // k.shape[1],
            KEYS=keys,
            ALL_VALUES=values,
            KEY_TILE=triton.next_power_of_2(keys),
            VALUES=tile,
            DELTA=delta,
        )
    if count and plan.pieces is not None:
        recur_by_piece(q, k, v, log_decay, beta, state, plan, plan.pieces, out, delta=delta)
    return out
