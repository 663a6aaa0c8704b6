"""Mamba's selective scan: one program per row and group of features. A few tokens of a prompt are one scan."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.recurrent import StatePlan
from asyncllm.kernels.triton.language import release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.launch import launch

__all__ = ["selective_scan", "selective_scan_kernel"]

TOKENS = 16
"""Tokens per scan."""
FEATURES = 32
"""Features per program. Neither constant has been timed yet."""


@triton.jit
def _after(decay, written, next_decay, next_written):
    return decay * next_decay, next_decay * written + next_written


@triton.jit(do_not_specialize=["first"])
def selective_scan_kernel(
    x_ptr,
    size_ptr,
    rate_ptr,
    write_ptr,
    read_ptr,
    state_ptr,
    end_ptr,
    source_ptr,
    target_ptr,
    span_ptr,
    offset_ptr,
    out_ptr,
    first,
    ALL_FEATURES: tl.constexpr,
    STATE: tl.constexpr,
    STATE_TILE: tl.constexpr,
    FEATURES: tl.constexpr,
    TOKENS: tl.constexpr,
    SIZE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """SIZE: maximum number of tokens in a piece; 0: rows are computed token by token."""
    row = tl.program_id(0)
    features = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    states, lines = tl.arange(0, STATE_TILE), tl.arange(0, TOKENS)
    is_feature, is_state = features < ALL_FEATURES, states < STATE
    tile = states[:, None] * ALL_FEATURES + features[None, :]
    inside = is_state[:, None] & is_feature[None, :]
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    begin, end = tl.load(end_ptr + first + row), tl.load(end_ptr + first + row + 1)
    source = tl.load(source_ptr + first + row)
    at_rates = features[None, :] * STATE + states[:, None]
    rates = tl.load(rate_ptr + at_rates, mask=inside, other=0.0)
    memory = tl.load(state_ptr + source * (STATE * ALL_FEATURES) + tile, mask=inside & (source >= 0), other=0.0)
    if SIZE > 0:
        own = tl.load(offset_ptr + row)
        pieces = tl.load(offset_ptr + row + 1) - own
        first_stop = tl.load(span_ptr + 2 * own + 1, mask=pieces > 0, other=0)
    else:
        pieces, first_stop = end - begin, begin + 1
    for piece in range(pieces):
        if SIZE > 0:
            start = tl.maximum(first_stop + (piece - 1) * SIZE, begin)
            stop = tl.minimum(first_stop + piece * SIZE, end)
        else:
            start, stop = begin + piece, begin + piece + 1
        for token in range(start, stop, TOKENS):
            tokens = (token + lines).to(tl.int64)
            there = tokens < stop
            at = tokens[:, None] * ALL_FEATURES + features[None, :]
            given = there[:, None] & is_feature[None, :]
            x = tl.load(x_ptr + at, mask=given, other=0.0).to(tl.float32)
            sizes = tl.load(size_ptr + at, mask=given, other=0.0)
            at_states = tokens[:, None] * STATE + states[None, :]
            known = there[:, None] & is_state[None, :]
            writes = tl.load(write_ptr + at_states, mask=known, other=0.0).to(tl.float32)
            reads = tl.load(read_ptr + at_states, mask=known, other=0.0).to(tl.float32)
            # A step of size 0, such as that of a missing token, changes nothing.
            decay = tl.exp(sizes[:, None, :] * rates[None, :, :])
            written = writes[:, :, None] * (sizes * x)[:, None, :]
            decay, written = tl.associative_scan((decay, written), 0, _after)
            held = decay * memory[None, :, :] + written
            out = tl.sum(held * reads[:, :, None], 1)
            tl.store(out_ptr + at, round_to(out, out_ptr.dtype.element_ty), mask=given)
            memory = tl.sum(tl.where((lines == TOKENS - 1)[:, None, None], held, 0.0), 0)
        target = tl.load(target_ptr + stop - 1)
        tl.store(state_ptr + target * (STATE * ALL_FEATURES) + tile, memory, mask=inside & (target >= 0))


def selective_scan(
    x: Tensor, sizes: Tensor, rates: Tensor, writes: Tensor, reads: Tensor, state: Tensor, plan: StatePlan
) -> Tensor:
    x, sizes, rates, writes, reads = (each.contiguous() for each in (x, sizes, rates, writes, reads))
    out = torch.empty_like(x)
    count, features = x.shape
    size, pieces, serial = rates.shape[1], plan.pieces, plan.num_serial
    rows = {0: (0, serial), 1: (serial, len(plan.sources) - serial)}
    for by_piece, (first, number) in rows.items():
        if not count or not number:
            continue
        spans, offsets = (plan.q_offsets,) * 2 if pieces is None else (pieces.spans, pieces.offsets)
        launch(
            selective_scan_kernel,
            (number, -(-features // FEATURES), 1),
            (
                *(x, sizes, rates, writes, reads, state, plan.q_offsets),
                *(plan.sources, plan.targets, spans, offsets, out),
            ),
            (first,),
            ALL_FEATURES=features,
            STATE=size,
            STATE_TILE=triton.next_power_of_2(size),
            FEATURES=FEATURES,
            TOKENS=TOKENS if by_piece else 1,
            SIZE=pieces.size if by_piece and pieces is not None else 0,
        )
    return out
