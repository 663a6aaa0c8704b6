"""Sums of ranks' partial results over memory that they map from each other, in one kernel with what follows the sum.

Each rank writes its rows to the other ranks' memory, and reads what these write to its own. There are no signals: a
word that has arrived differs from `_ABSENT`, which each reader restores. Each row alternates between two places. Two
are enough: a rank that writes to a place again has read the answer to what came after it, which the reader sent when it
was done with the place. A number per row on the device counts the turns, because a graph's launches have no arguments
of their own. All ranks therefore have to launch the same sums in the same order.

Sums are taken in rank order, so that all ranks have the same bits. A program waits only for the same row of the other
ranks, and all programs of a launch fit on the device at once, so that none waits for one that cannot start. A dead rank
is waited for without end; the process that started the ranks ends them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.language import release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.launch import Configured
from asyncllm.kernels.triton.norm import MAX_ROW, normed

__all__ = ["Mailbox", "add_sum_rms_norm", "fits", "mailbox_bytes", "sum_of_ranks"]

PROGRAMS_PER_PROCESSOR = 2
"""256 rows of 8 KB have one program each on an H200. Two programs per multiprocessor keep more bytes in flight than a
link of 371 GB/s carries in the microseconds of a round trip."""

_ABSENT = tl.constexpr(-1)
"""The bits of a number that has not arrived: a NaN in each floating-point type; another NaN is sent instead of it."""

_PLACES = tl.constexpr(2)
"""Number of places per row."""


class Mailbox(NamedTuple):
    """Where the ranks' rows arrive. Written only by `sum_kernel`, once it has been `clear`ed."""

    rank: int
    size: int
    """Number of ranks."""
    addresses: Tensor
    """Address of each rank's mailbox in this process: int64 [size]."""
    own: Tensor
    """This rank's mailbox: bytes, uint8 [mailbox_bytes(size, rows, row_bytes)]."""
    turns: Tensor
    """How often each row has been summed, int32 [rows]."""
    row_bytes: int
    """Size of the longest row, a multiple of 16."""

    def clear(self) -> None:
        """Empty the mailbox. No rank may be writing to it."""
        self.own.fill_(255)
        self.turns.zero_()


def mailbox_bytes(size: int, rows: int, row_bytes: int) -> int:
    """Return the size of a rank's mailbox."""
    return rows * int(_PLACES.value) * (size - 1) * row_bytes


def fits(x: Tensor, box: Mailbox) -> bool:
    """Return whether rows of x [..., H] fit, whatever their number."""
    size = x.shape[-1]
    return (
        size * x.itemsize <= box.row_bytes
        and size <= MAX_ROW
        and x.is_contiguous()
        and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    )


@triton.jit
def _place(row, turn, sender: tl.constexpr, receiver: tl.constexpr, STRIDE: tl.constexpr, RANKS: tl.constexpr):
    """Return the offset, in numbers, of a rank's row in another rank's mailbox."""
    index: tl.constexpr = sender - 1 if sender > receiver else sender
    return ((tl.cast(row, tl.int64) * _PLACES + (turn & (_PLACES - 1))) * (RANKS - 1) + index) * STRIDE


@triton.jit
def _received(box, inside, BITS: tl.constexpr):
    """Wait for a row, take it, and leave its place empty. Return the bits of its numbers."""
    bits = tl.load(box, mask=inside, other=0, volatile=True)
    while tl.max(tl.max((bits == _ABSENT).to(tl.int32), 1), 0) != 0:
        bits = tl.load(box, mask=inside, other=0, volatile=True)
    tl.store(box, tl.full(bits.shape, _ABSENT, BITS), mask=inside)
    return bits


@triton.jit(do_not_specialize=["rows", "eps"])
def sum_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    own_ptr,
    address_ptr,
    turn_ptr,
    rows,
    eps,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    NORM: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """own_ptr points to integers as wide as x's numbers, and STRIDE is the number of numbers in a place.

    NORM: total is the sum over ranks plus the residual, and out its norm; otherwise out is the sum.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    bits_type: tl.constexpr = own_ptr.dtype.element_ty
    columns = tl.arange(0, COLUMNS)
    if NORM:
        weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0)
    columns = columns[None, :]
    inside = columns < SIZE
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        turn = tl.load(turn_ptr + row)
        offsets = tl.cast(row, tl.int64) * SIZE + columns
        mine = tl.load(x_ptr + offsets, mask=inside, other=0.0)
        bits = mine.to(bits_type, bitcast=True)
        sent = tl.where(bits == _ABSENT, 0x7FFF if bits_type == tl.int16 else 0x7FFFFFFF, bits).to(bits_type)
        for other in tl.static_range(RANKS):
            if other != RANK:
                box = tl.multiple_of(tl.load(address_ptr + other).to(tl.pointer_type(bits_type)), 16)
                tl.store(box + _place(row, turn, RANK, other, STRIDE, RANKS) + columns, sent, mask=inside)
        if NORM:
            residual = tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        total = tl.zeros([1, COLUMNS], tl.float32)
        for other in tl.static_range(RANKS):
            if other == RANK:
                total += mine.to(tl.float32)
            else:
                box = own_ptr + _place(row, turn, other, RANK, STRIDE, RANKS) + columns
                total += _received(box, inside, bits_type).to(dtype, bitcast=True).to(tl.float32)
        tl.store(turn_ptr + row, turn + 1)
        whole = round_to(total, dtype)
        if NORM:
            whole = round_to(whole.to(tl.float32) + residual, dtype)
            tl.store(total_ptr + offsets, whole, mask=inside)
            whole = normed(whole.to(tl.float32), weight, eps, SIZE, dtype)
        tl.store(out_ptr + offsets, whole, mask=inside)


def sum_of_ranks(x: Tensor, box: Mailbox) -> Tensor:
    """Return the sum of the ranks' x [..., H], in x's memory. x `fits`, and has no more rows than the mailbox.

    The sum is computed in float32 and rounded once.
    """
    _launch(x, x, x, x, x, 0.0, box, norm=False)
    return x


def add_sum_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, box: Mailbox) -> tuple[Tensor, Tensor]:
    """Apply `kernels.add_rms_norm` to `sum_of_ranks`; x, which `fits`, is not changed."""
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual.contiguous(), weight, out, total, eps, box, norm=True)
    return out, total


def _launch(
    x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, total: Tensor, eps: float, box: Mailbox, *, norm: bool
) -> None:
    size = x.shape[-1]
    rows = x.numel() // size
    if rows:
        kernel = _configured(size, box.rank, box.size, box.row_bytes // x.itemsize, norm)
        own = box.own.view(torch.int32 if x.itemsize == 4 else torch.int16)
        tensors = (x, residual, weight, out, total, own, box.addresses, box.turns)
        kernel((min(rows, _max_programs(x.device)), 1, 1), tensors, (rows, eps))


@functools.cache
def _max_programs(device: torch.device) -> int:
    if device.type == "cpu":
        return 2
    return PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def tile(size: int) -> tuple[int, int]:
    """Return columns (a power of two) and warps of a program, for rows of `size`."""
    columns = triton.next_power_of_2(size)
    return columns, min(8, max(1, columns // 256)) if columns <= 4096 else 16


@functools.cache
def _configured(size: int, rank: int, ranks: int, stride: int, norm: bool) -> Configured:
    columns, num_warps = tile(size)
    return Configured(
        sum_kernel,
        num_warps=num_warps,
        RANK=rank,
        RANKS=ranks,
        STRIDE=stride,
        SIZE=size,
        COLUMNS=columns,
        NORM=norm,
    )
