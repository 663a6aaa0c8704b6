"""Layers that carry a state from token to token, and the simplest of them, a short convolution.

The state is stored in the blocks of the cache. A block holds the state after its latest token and thus, once it is
full, the state at its end: continuing after a block requires only that block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from asyncllm.kernels import activation
from asyncllm.kernels.dispatch import op

__all__ = ["Pieces", "StatePlan", "States", "plan_states", "short_convolution"]


class States(NamedTuple):
    """The states of a layer: tensors [blocks, *shape]."""

    tensors: tuple[Tensor, ...]
    block_size: int
    """Tokens of a block."""


MAX_TOKENS = 64
"""Maximum number of tokens in a piece. The work between its tokens grows with their number; the number of pieces
falls."""


class Pieces(NamedTuple):
    """The tokens of R rows, cut where a block ends and, within a block, every `size` tokens."""

    spans: Tensor
    """[P, 2] int32: first token of each piece, and the token after its last; in row order. Unused entries hold no
    token."""
    offsets: Tensor
    """[R + 1] int32: row r owns spans offsets[r] to offsets[r + 1]."""
    size: int
    """Maximum number of tokens in a piece; divides the block size."""


class StatePlan(NamedTuple):
    """Which states the T tokens of B rows read, and which they write."""

    rows: Tensor
    """[T] int64: the row of each token."""
    q_offsets: Tensor
    """[B + 1] int32: row b owns tokens q_offsets[b] to q_offsets[b + 1]."""
    sources: Tensor
    """[B] int64: the block of the token before the row's first one; -1 if there is none, and the state is 0."""
    targets: Tensor
    """[T] int64: the block that keeps the state after this token, or -1. Only the last tokens of rows and of blocks
    have one."""
    num_serial: int
    """Number of rows, the first ones, that are computed token by token."""
    pieces: Pieces | None
    """Pieces of the other rows; None if there are none."""


def plan_states(
    places: Tensor, q_offsets: Tensor, kv_lens: Tensor, block_tables: Tensor, block_size: int, *, num_serial: int
) -> StatePlan:
    """Return the plan of a step with these inputs; does not wait for the device. Padding rows have no source, and their
    tokens no target. The first `num_serial` rows are computed token by token."""
    num_tokens = places.shape[0]
    ends = q_offsets[1:]
    tokens = torch.arange(num_tokens, dtype=q_offsets.dtype, device=q_offsets.device)
    rows = torch.searchsorted(ends, tokens, right=True)
    before = kv_lens.long() - torch.diff(q_offsets) - 1
    known = block_tables.gather(1, before.clamp(min=0).div_(block_size, rounding_mode="floor")[:, None])[:, 0]
    at_border = (places + 1).remainder(block_size) == 0
    is_last = tokens + 1 == ends.gather(0, rows.clamp(max=len(ends) - 1))
    blocks = places.div(block_size, rounding_mode="floor")
    return StatePlan(
        rows,
        q_offsets,
        torch.where(before >= 0, known.long(), -1),
        torch.where((at_border | is_last) & (places >= 0), blocks, -1),
        num_serial,
        _cut(q_offsets[num_serial:], before[num_serial:] + 1, num_tokens, block_size),
    )


def _cut(q_offsets: Tensor, before: Tensor, num_tokens: int, block_size: int) -> Pieces | None:
    """`before`: number of tokens before each row's."""
    num_rows = len(before)
    if not num_rows or not num_tokens:
        return None
    size = max(size for size in range(1, min(MAX_TOKENS, block_size) + 1) if block_size % size == 0)
    begin, end = q_offsets[:-1], q_offsets[1:]
    begun = before.to(q_offsets.dtype).clamp(min=0) % size
    counts = torch.where(end > begin, (begun + end - begin + size - 1) // size, 0)
    offsets = torch.nn.functional.pad(counts.cumsum(0, dtype=q_offsets.dtype), (1, 0))
    # A row of n tokens has at most n // size pieces of `size` tokens, and two others.
    pieces = torch.arange(
        min(num_tokens, num_tokens // size + 2 * num_rows), dtype=q_offsets.dtype, device=q_offsets.device
    )
    rows = torch.searchsorted(offsets[1:], pieces, right=True).clamp_(max=num_rows - 1)
    starts = begin[rows] - begun[rows] + (pieces - offsets[rows]) * size
    spans = torch.stack([torch.maximum(starts, begin[rows]), torch.minimum(starts + size, end[rows])], 1)
    return Pieces(spans, offsets, size)


@op("recurrent:short_convolution")
def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, plan: StatePlan, *, silu: bool
) -> Tensor:
    """The convolution of each of C features over its latest K tokens, followed by silu if requested.

    x [T, C], weight [C, K], bias [C] -> [T, C], computed in float32 and rounded once. `state` [blocks, K - 1, C] holds
    the inputs before a row's first token, latest last, and receives those up to the targets.
    """
    size = weight.shape[1]
    begin = plan.q_offsets[:-1].long()[plan.rows]
    known = torch.where((plan.sources >= 0)[:, None, None], state[plan.sources.clamp(min=0)], 0)
    # The window of token t: the tokens of its row up to itself, after those in the state.
    window = x.new_empty(len(x), size, x.shape[1])
    for back in range(size):
        index = torch.arange(len(x)) - back
        lacking = begin - index
        of_state = known[plan.rows, (size - 1 - lacking).clamp(0, size - 2)]
        window[:, size - 1 - back] = torch.where((lacking > 0)[:, None], of_state, x[index.clamp(min=0)])
    written = plan.targets >= 0
    state[plan.targets[written]] = window[written, 1:]
    y = (window.float() * weight.float().t()).sum(1)
    if bias is not None:
        y += bias.float()
    return (activation.silu(y) if silu else y).to(x.dtype)
