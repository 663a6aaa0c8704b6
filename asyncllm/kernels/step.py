"""Kernels at the ends of a captured decode step: gathering inputs from state on the device, recording the sampled
tokens, and checking results."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from asyncllm.kernels.dispatch import op

__all__ = ["DecodeInputs", "prepare_decode", "record_tokens", "segments_finite"]


class DecodeInputs(NamedTuple):
    """The inputs of a decode step of B rows, one token each, at fixed addresses for a captured step."""

    input_ids: Tensor
    """[B] int64."""
    positions: Tensor
    """[B] int64, absolute."""
    places: Tensor
    """[B] int64: block id * block_size + offset in the block; -1 in padding rows."""
    kv_lens: Tensor
    """[B] int32: position + 1; 0 in padding rows."""
    block_tables: Tensor
    """[B, N] int32: the row's own blocks and one entry after them; further entries are any valid ids."""

    @staticmethod
    def zeros(rows: int, width: int, device: torch.device) -> DecodeInputs:
        """Return inputs for `prepare_decode` to fill: padding rows, block tables [rows, width]."""
        ids, positions, places = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(3))
        kv_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        return DecodeInputs(
            ids, positions, places.fill_(-1), kv_lens, torch.zeros(rows, width, dtype=torch.int32, device=device)
        )


@op("step:prepare_decode")
def prepare_decode(
    slots: Tensor, positions: Tensor, last_tokens: Tensor, block_tables: Tensor, block_size: int, out: DecodeInputs
) -> None:
    """Fill `out` with the next decode step of `slots` [B] int32; -1 is a padding row.

    positions [B] integers: positions of the tokens to compute. last_tokens [S] int64: each slot's latest token, the
    input. block_tables [S, N] int32: each slot's blocks, followed by at least one readable entry. The entries of a row
    up to that one are copied; the others keep the contents of `out`.
    """
    rows = slots >= 0
    known = slots.clamp(min=0).long()
    positions = positions.long().masked_fill(~rows, 0)
    own_tables = block_tables.index_select(0, known)
    page = positions // block_size
    blocks = own_tables.gather(1, page[:, None])[:, 0].long()
    out.input_ids.copy_(last_tokens.index_select(0, known).masked_fill_(~rows, 0))
    out.positions.copy_(positions)
    out.places.copy_((blocks * block_size + positions % block_size).masked_fill_(~rows, -1))
    out.kv_lens.copy_((positions + 1).masked_fill_(~rows, 0))
    columns = torch.arange(block_tables.shape[1], device=slots.device)
    copied = (columns <= page[:, None] + 1) & rows[:, None]
    out.block_tables.copy_(torch.where(copied, own_tables, out.block_tables))


@op("step:segments_finite")
def segments_finite(hidden: Tensor, offsets: Tensor) -> Tensor:
    """Return which rows of a step contain NaN or infinity. Row b owns tokens offsets[b] to offsets[b + 1].

    hidden [T, H], offsets [B + 1] int32 ascending from 0 -> int32 [B]: 1 if a value is not finite, else 0. Tokens from
    offsets[B] on belong to no row.
    """
    bad = torch.zeros(hidden.shape[0] + 1, dtype=torch.int32, device=hidden.device)
    torch.cumsum(~hidden.isfinite().all(-1), 0, out=bad[1:])
    sums = bad.index_select(0, offsets)
    return (sums[1:] > sums[:-1]).int()


@op("step:record_tokens")
def record_tokens(tokens: Tensor, flags: Tensor, slots: Tensor, last_tokens: Tensor, results: Tensor) -> None:
    """Make the tokens of R rows the next inputs of their slots, and store tokens and flags together for the host.

    tokens [R] int64, flags [R] int32, slots [R] int32 (-1: a padding row, which is not stored); writes last_tokens [S]
    int64 at the slots, and results [2, R] int32: tokens, flags.
    """
    used = slots >= 0
    if used.all():
        last_tokens.index_copy_(0, slots.long(), tokens)
    else:
        last_tokens[slots[used].long()] = tokens[used]
    results[0] = tokens
    results[1] = flags
