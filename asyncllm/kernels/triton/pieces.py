"""Memories of keys and values, by pieces of prompts: matrix products instead of a loop over tokens.

For the delta rule, what the tokens of a piece forget of each other is a triangular system. It is solved for all pieces
at once, before the memory is known (Yang et al., Gated Delta Networks, 2024, section 3.3): token i learns u_i - w_i S,
where S is the memory before the piece. The remaining loop is over pieces.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.recurrent import StatePlan
from asyncllm.kernels.triton.language import INTERPRET, release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.launch import launch

__all__ = ["pieces_config", "pieces_kernel", "recur_by_piece", "solve_kernel"]


class PiecesConfig(NamedTuple):
    values: int
    """Values of a head per program that walks a row."""
    num_stages: int
    """Number of pieces in shared memory, including those loaded ahead."""


def pieces_config(keys: int, values: int, itemsize: int) -> PiecesConfig:
    """Return the tiles for heads of this shape: 128 programs for one row of Qwen3-Next. They are chosen by what
    compiles for sm_90 within its registers and shared memory, and have not been timed yet."""
    most = 32 if keys <= 128 else 16
    return PiecesConfig(min(most, max(16, triton.next_power_of_2(values))), 2 if itemsize == 2 else 1)


SOLVED_TILE = 32
"""Minimum number of keys and values of a head in a tile of `solve_kernel`: with 16 columns of bfloat16, 4 warps and 64
tokens, Triton 3.6 compiles wrong products on an H200."""


@triton.jit
def _product(a, b):
    """a [M, K] @ b [K, N] of one dtype -> [M, N] float32; for float32, accurate to some 2^-20."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _inverse(lower, lines, TOKENS: tl.constexpr):
    """Return the inverse of 1 + lower [TOKENS, TOKENS], where lower is 0 on and above its diagonal.

    Blocks of 16 are inverted by substitution, all at once; then, with D the inverse of these and N the rest of `lower`,
    the result is (1 + D N)^-1 D, where D N is nilpotent of degree TOKENS / 16. Powers of `lower` itself would lose
    digits.
    """
    within = (lines[:, None] // 16) == (lines[None, :] // 16)
    blocks = tl.where(within, -lower, 0.0)
    inverse = blocks
    for index in range(1, 16):
        is_row = (lines % 16) == index
        row = tl.sum(tl.where(is_row[:, None], blocks, 0.0), 0)
        row += tl.sum(row[:, None] * inverse, 0)
        inverse = tl.where(is_row[:, None] & within, row[None, :], inverse)
    one = tl.where(lines[:, None] == lines[None, :], 1.0, 0.0)
    inverse += one
    if TOKENS > 16:
        step = _product(inverse, tl.where(within, 0.0, lower))
        rest = one - step
        if TOKENS > 32:
            rest += _product(rest, _product(step, step))
        inverse = _product(rest, inverse)
    return inverse


@triton.jit(do_not_specialize=["count"])
def solve_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    span_ptr,
    w_ptr,
    u_ptr,
    length_ptr,
    count,
    HEADS: tl.constexpr,
    SHARING: tl.constexpr,
    KEYS: tl.constexpr,
    ALL_VALUES: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    KEY_HEADS: tl.constexpr = HEADS // SHARING
    piece, head = tl.program_id(0), tl.program_id(1)
    lines, keys, values = tl.arange(0, TOKENS), tl.arange(0, KEY_TILE), tl.arange(0, VALUE_TILE)
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    start, stop = tl.load(span_ptr + 2 * piece), tl.load(span_ptr + 2 * piece + 1)
    if start < stop:
        # An address is a number for the piece, plus a 32-bit offset for each place in it.
        there = lines < stop - start
        key_heads = lines * KEY_HEADS
        at_key_head = start.to(tl.int64) * KEY_HEADS + head // SHARING
        at_keys = key_heads[:, None] * KEYS + keys[None, :]
        is_key = there[:, None] & (keys < KEYS)[None, :]
        k = tl.load(k_ptr + at_key_head * KEYS + at_keys, mask=is_key, other=0.0)
        wide = k.to(tl.float32)
        inverse_length = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) + 1e-6)
        if head % SHARING == 0:
            q = tl.load(q_ptr + at_key_head * KEYS + at_keys, mask=is_key, other=0.0).to(tl.float32)
            of_query = 1.0 / tl.sqrt((tl.sum(q * q, 1) + 1e-6) * KEYS)
            tl.store(length_ptr + at_key_head + key_heads, of_query, mask=there)
            tl.store(length_ptr + count.to(tl.int64) * KEY_HEADS + at_key_head + key_heads, inverse_length, mask=there)
        at_head = start.to(tl.int64) * HEADS + head
        decay = tl.cumsum(tl.load(decay_ptr + at_head + lines * HEADS, mask=there, other=0.0), 0)
        beta = tl.load(beta_ptr + at_head + lines * HEADS, mask=there, other=0.0)
        said = _product(k, tl.trans(k)) * (beta * inverse_length)[:, None] * inverse_length[None, :]
        is_before = lines[:, None] > lines[None, :]
        left = tl.exp(tl.where(is_before, decay[:, None] - decay[None, :], 0.0))
        inverse = round_to(_inverse(tl.where(is_before, said * left, 0.0), lines, TOKENS), k_ptr.dtype.element_ty)
        known = round_to(wide * (beta * inverse_length * tl.exp(decay))[:, None], k_ptr.dtype.element_ty)
        w = _product(inverse, known)
        at_w = at_head * KEYS + (lines * HEADS)[:, None] * KEYS + keys[None, :]
        tl.store(w_ptr + at_w, round_to(w, w_ptr.dtype.element_ty), mask=is_key)
        at_values = at_head * ALL_VALUES + (lines * HEADS)[:, None] * ALL_VALUES + values[None, :]
        is_value = there[:, None] & (values < ALL_VALUES)[None, :]
        v = tl.load(v_ptr + at_values, mask=is_value, other=0.0).to(tl.float32)
        u = _product(inverse, round_to(v * beta[:, None], v_ptr.dtype.element_ty))
        tl.store(u_ptr + at_values, round_to(u, u_ptr.dtype.element_ty), mask=is_value)


@triton.jit(do_not_specialize=["first", "count"])
def pieces_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    weight_ptr,
    w_ptr,
    length_ptr,
    state_ptr,
    end_ptr,
    source_ptr,
    target_ptr,
    span_ptr,
    offset_ptr,
    out_ptr,
    first,
    count,
    HEADS: tl.constexpr,
    SHARING: tl.constexpr,
    KEYS: tl.constexpr,
    ALL_VALUES: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUES: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    DELTA: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """v is what tokens learn if the memory holds nothing for their keys: for the delta rule u, which includes
    `weight`."""
    KEY_HEADS: tl.constexpr = HEADS // SHARING
    row, head = tl.program_id(0), tl.program_id(1)
    lines, keys = tl.arange(0, TOKENS), tl.arange(0, KEY_TILE)
    values = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    tile = keys[:, None] * ALL_VALUES + values[None, :]
    inside = (keys < KEYS)[:, None] & (values < ALL_VALUES)[None, :]
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    begin, end = tl.load(end_ptr + first + row), tl.load(end_ptr + first + row + 1)
    source = tl.load(source_ptr + first + row)
    own = tl.load(offset_ptr + row)
    pieces = tl.load(offset_ptr + row + 1) - own
    first_stop = tl.load(span_ptr + 2 * own + 1, mask=pieces > 0, other=0)
    memory = tl.load(
        state_ptr + (source * HEADS + head) * (KEYS * ALL_VALUES) + tile, mask=inside & (source >= 0), other=0.0
    )
    # An address is a number for the piece, plus a 32-bit offset for each place in it.
    heads, key_heads = lines * HEADS, lines * KEY_HEADS
    at_keys = key_heads[:, None] * KEYS + keys[None, :]
    at_w = heads[:, None] * KEYS + keys[None, :]
    at_values = heads[:, None] * ALL_VALUES + values[None, :]
    for piece in range(pieces):
        start = tl.maximum(first_stop + (piece - 1) * SIZE, begin)
        stop = tl.minimum(first_stop + piece * SIZE, end)
        there = lines < stop - start
        at_head = start.to(tl.int64) * HEADS + head
        at_key_head = start.to(tl.int64) * KEY_HEADS + head // SHARING
        is_key = there[:, None] & (keys < KEYS)[None, :]
        q = tl.load(q_ptr + at_key_head * KEYS + at_keys, mask=is_key, other=0.0)
        k = tl.load(k_ptr + at_key_head * KEYS + at_keys, mask=is_key, other=0.0)
        is_value = there[:, None] & (values < ALL_VALUES)[None, :]
        learned = tl.load(v_ptr + at_head * ALL_VALUES + at_values, mask=is_value, other=0.0).to(tl.float32)
        steps = tl.load(decay_ptr + at_head + heads, mask=there, other=0.0)
        decay, all_decay = tl.cumsum(steps, 0), tl.sum(steps, 0)
        known = round_to(memory, k_ptr.dtype.element_ty)
        if DELTA:
            learned -= _product(tl.load(w_ptr + at_head * KEYS + at_w, mask=is_key, other=0.0), known)
            of_query = tl.load(length_ptr + at_key_head + key_heads, mask=there, other=0.0)
            at_key = count.to(tl.int64) * KEY_HEADS + at_key_head
            of_key = tl.load(length_ptr + at_key + key_heads, mask=there, other=0.0)
        else:
            learned *= tl.load(weight_ptr + at_head + heads, mask=there, other=0.0)[:, None]
        learned = round_to(learned, k_ptr.dtype.element_ty)
        is_seen = lines[:, None] >= lines[None, :]
        left = tl.exp(tl.where(is_seen, decay[:, None] - decay[None, :], 0.0))
        scores = tl.where(is_seen, _product(q, tl.trans(k)) * left, 0.0)
        of_memory = tl.exp(decay)
        to_memory = tl.exp(all_decay - decay)
        if DELTA:
            scores *= of_query[:, None] * of_key[None, :]
            of_memory *= of_query
            to_memory *= of_key
        out = _product(q, known) * of_memory[:, None]
        out += _product(round_to(scores, k_ptr.dtype.element_ty), learned)
        tl.store(out_ptr + at_head * ALL_VALUES + at_values, round_to(out, out_ptr.dtype.element_ty), mask=is_value)
        written = round_to(k.to(tl.float32) * to_memory[:, None], k_ptr.dtype.element_ty)
        memory = memory * tl.exp(all_decay) + _product(tl.trans(written), learned)
        target = tl.load(target_ptr + stop - 1)
        tl.store(state_ptr + (target * HEADS + head) * (KEYS * ALL_VALUES) + tile, memory, mask=inside & (target >= 0))


def recur_by_piece(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    weights: Tensor,
    state: Tensor,
    plan: StatePlan,
    *,
    out: Tensor,
    delta: bool,
) -> None:
    """Compute the plan's rows that have pieces; all tensors are contiguous. out [T, H, V]."""
    pieces = plan.pieces
    if pieces is None:
        return
    count, heads, values = v.shape
    keys = k.shape[2]
    shape = {
        "HEADS": heads,
        "SHARING": heads // k.shape[1],
        "KEYS": keys,
        "ALL_VALUES": values,
        "KEY_TILE": max(SOLVED_TILE, triton.next_power_of_2(keys)),
        "TOKENS": max(16, triton.next_power_of_2(pieces.size)),
    }
    w = lengths = weights
    if delta:
        w, u = k.new_empty(count, heads, keys), torch.empty_like(v)
        lengths = log_decay.new_empty(2, count, k.shape[1])
        launch(
            solve_kernel,
            (len(pieces.spans), heads, 1),
            (q, k, v, log_decay, weights, pieces.spans, w, u, lengths),
            (count,),
            VALUE_TILE=max(SOLVED_TILE, triton.next_power_of_2(values)),
            **shape,
        )
        v = u
    config = pieces_config(keys, values, k.element_size())
    launch(
        pieces_kernel,
        (len(plan.sources) - plan.num_serial, heads, -(-values // config.values)),
        (
            *(q, k, v, log_decay, weights, w, lengths, state),
            *(plan.q_offsets, plan.sources, plan.targets, pieces.spans, pieces.offsets, out),
        ),
        (plan.num_serial, count),
        VALUES=config.values,
        SIZE=pieces.size,
        DELTA=delta,
        num_stages=config.num_stages,
        **shape,
    )
