"""Kernels at the ends of a captured step: inputs from the device's own state, and checks of the results."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.step import DecodeInputs
from asyncllm.kernels.triton.language import release_consumers, wait_for_producers
from asyncllm.kernels.triton.launch import launch
from asyncllm.kernels.triton.page import place_of

__all__ = ["prepare_decode", "record_tokens", "segments_finite"]

ENTRIES = 512
"""Entries of a block table that a program copies at a time."""

ROWS = 256
"""Rows of `record_tokens` per program: a whole decode batch of usual size."""


@triton.jit(
    do_not_specialize=["width", "table_stride", "out_stride"],
    do_not_specialize_on_alignment=[
        "slot_ptr",
        "position_ptr",
        "last_token_ptr",
        "table_ptr",
        "out_id_ptr",
        "out_position_ptr",
        "out_place_ptr",
        "out_kv_len_ptr",
        "out_table_ptr",
    ],
)
def prepare_decode_kernel(
    slot_ptr,
    position_ptr,
    last_token_ptr,
    table_ptr,
    out_id_ptr,
    out_position_ptr,
    out_place_ptr,
    out_kv_len_ptr,
    out_table_ptr,
    width,
    table_stride,
    out_stride,
    BLOCK_SIZE: tl.constexpr,
    ENTRIES: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    row = tl.program_id(0)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    is_row = slot >= 0
    position = tl.load(position_ptr + row).to(tl.int64)
    # Masked loads instead of a branch: a padding row reads nothing.
    token = tl.load(last_token_ptr + slot, mask=is_row, other=0)
    own_table = table_ptr + slot * table_stride
    block = tl.load(own_table + position // BLOCK_SIZE, mask=is_row, other=0).to(tl.int64)
    place = place_of(block, position, BLOCK_SIZE)
    tl.store(out_id_ptr + row, token)
    tl.store(out_position_ptr + row, tl.where(is_row, position, 0))
    tl.store(out_place_ptr + row, tl.where(is_row, place, -1))
    tl.store(out_kv_len_ptr + row, tl.where(is_row, position + 1, 0).to(tl.int32))
    # One entry past the row's own, because attention reads ahead.
    count = tl.where(is_row, tl.minimum(position // BLOCK_SIZE + 2, width), 0).to(tl.int32)
    for first in range(0, count, ENTRIES):
        entry = first + tl.arange(0, ENTRIES)
        blocks = tl.load(own_table + entry, mask=entry < count, other=0)
        tl.store(out_table_ptr + row.to(tl.int64) * out_stride + entry, blocks, mask=entry < count)


def prepare_decode(
    slots: Tensor,
    positions: Tensor,
    last_tokens: Tensor,
    block_tables: Tensor,
    block_size: int,
    out: DecodeInputs,
) -> None:
    if slots.shape[0]:
        launch(
            prepare_decode_kernel,
            (slots.shape[0], 1, 1),
            (slots, positions, last_tokens, block_tables, *out),
            (block_tables.shape[1], block_tables.stride(0), out.block_tables.stride(0)),
            BLOCK_SIZE=block_size,
            ENTRIES=ENTRIES,
        )


@triton.jit(do_not_specialize=["segments"], do_not_specialize_on_alignment=["offset_ptr"])
def segments_finite_kernel(
    hidden_ptr,
    offset_ptr,
    flag_ptr,
    segments,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    row = tl.program_id(0)
    columns = tl.arange(0, COLUMNS)
    x = tl.load(hidden_ptr + row.to(tl.int64) * SIZE + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    # Comparisons with NaN are false.
    bad = tl.sum(1 - (tl.abs(x) < float("inf")).to(tl.int32), 0)
    if bad > 0:
        # The last segment that begins at or before this row; empty segments before it begin at the same row.
        low, high = segments * 0, segments
        while low < high:
            middle = (low + high + 1) // 2
            if tl.load(offset_ptr + middle) <= row:
                low = middle
            else:
                high = middle - 1
        if (low < segments) & (tl.load(offset_ptr) <= row):
            tl.atomic_or(flag_ptr + low, 1)


def segments_finite(hidden: Tensor, offsets: Tensor) -> Tensor:
    hidden = hidden.contiguous()
    tokens, size = hidden.shape
    flags = torch.zeros(offsets.shape[0] - 1, dtype=torch.int32, device=hidden.device)
    if tokens:
        launch(
            segments_finite_kernel,
            (tokens, 1, 1),
            (hidden, offsets, flags),
            (flags.shape[0],),
            SIZE=size,
            COLUMNS=triton.next_power_of_2(size),
        )
    return flags


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["tokens", "flags", "slots", "last_tokens", "results"],
)
def record_tokens_kernel(
    tokens, flags, slots, last_tokens, results, num_rows, BLOCK: tl.constexpr, USE_PDL: tl.constexpr
):
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_rows
    token = tl.load(tokens + rows, mask=inside, other=0)
    slot = tl.load(slots + rows, mask=inside, other=-1)
    tl.store(last_tokens + slot, token, mask=inside & (slot >= 0))
    tl.store(results + rows, token.to(tl.int32), mask=inside)
    tl.store(results + num_rows + rows, tl.load(flags + rows, mask=inside, other=0), mask=inside)


def record_tokens(tokens: Tensor, flags: Tensor, slots: Tensor, last_tokens: Tensor, results: Tensor) -> None:
    num_rows = tokens.shape[0]
    if num_rows:
        grid = (-(-num_rows // ROWS), 1, 1)
        launch(record_tokens_kernel, grid, (tokens, flags, slots, last_tokens, results), (num_rows,), BLOCK=ROWS)
