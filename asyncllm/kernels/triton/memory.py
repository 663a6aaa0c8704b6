"""Memories of keys and values, token by token: one program per row, head and group of values. For prompts see
`pieces`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.recurrent import StatePlan
from asyncllm.kernels.triton.language import release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.launch import launch
from asyncllm.kernels.triton.pieces import recur_by_piece

__all__ = ["delta_kernel", "gated_delta_rule", "state_space"]

VALUES = 32
"""Values of a head per program of the delta rule: with 128 keys, 32 numbers of the memory in each thread of 4 warps.
Not measured on a device."""


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
    BY_KEY: tl.constexpr,
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
        if BY_KEY:
            decay = tl.load(decay_ptr + (token * HEADS + head) * KEYS + keys, mask=is_key, other=0.0)
            memory *= tl.exp(decay)[:, None]
        else:
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
    by_key = log_decay.ndim == 3
    # Pieces have one decay of each token, which products of matrices are multiplied by.
    rows = len(plan.sources) if by_key else plan.num_serial
    if count and rows:
        tile = min(VALUES, triton.next_power_of_2(values))
        launch(
            delta_kernel,
            (rows, heads, -(-values // tile)),
            (q, k, v, log_decay, beta, state, plan.q_offsets, plan.sources, plan.targets, out),
            HEADS=heads,
            SHARING=heads // k.shape[1],
            KEYS=keys,
            ALL_VALUES=values,
            KEY_TILE=triton.next_power_of_2(keys),
            VALUES=tile,
            DELTA=delta,
            BY_KEY=by_key,
        )
    if not by_key:
        recur_by_piece(q, k, v, log_decay, beta, state, plan, out=out, delta=delta)
    return out
