"""Low-rank adapters (LoRA, arXiv 2106.09685): additions to the product of a linear layer, per row by its own
adapter."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from asyncllm.kernels.dispatch import op

__all__ = ["GROUP", "MAX_PARTS", "LoRAWeights", "RowGroups", "add_lora", "group_rows"]

GROUP = 4
"""Maximum number of rows in a group. Larger ones would leave too few programs to fill a device."""

MAX_PARTS = 4
"""Maximum number of parts of a layer's output."""


class LoRAWeights(NamedTuple):
    """The adapters of one linear layer, in S slots of rank R: a power of two, at least 16. The scale is included in
    `b`."""

    a: Tensor
    """[S, P * R, in]: R rows for each of P parts of the output; rows beyond the adapter's rank are zero."""
    b: Tensor
    """[S, out, R]: columns beyond the adapter's rank are zero."""
    ranks: Tensor
    """[S] int32: rank of the adapter in each slot; 0 if it has nothing for this layer."""
    sizes: tuple[int, ...]
    """Output features of each part; at most `MAX_PARTS` parts."""


class RowGroups(NamedTuple):
    """The first R rows of a step, as up to R groups of rows with the same adapter."""

    slots: Tensor
    """[R] int32: the slot of each group, then -1."""
    rows: Tensor
    """[R, GROUP] int32: the rows of each group, then -1; unspecified where `slots` is -1."""


@op("lora_groups:group_rows")
def group_rows(slots: Tensor) -> RowGroups:
    """Group rows by slots [R] int32. A row with slot -1 has no adapter, and is in no group.

    Groups are in the order of their first rows, rows in theirs, and only a slot's last group is not full.
    """
    groups: list[tuple[int, list[int]]] = []
    last: dict[int, list[int]] = {}
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        if len(last.get(slot, range(GROUP))) == GROUP:
            last[slot] = []
            groups.append((slot, last[slot]))
        last[slot].append(row)
    found = RowGroups(torch.full_like(slots, -1), slots.new_full((len(slots), GROUP), -1))
    for index, (slot, rows) in enumerate(groups):
        found.slots[index] = slot
        found.rows[index, : len(rows)] = slots.new_tensor(rows)
    return found


@op("lora:add_lora")
def add_lora(
    y: Tensor,
    x: Tensor,
    slots: Tensor,
    lora: LoRAWeights,
    *,
    groups: RowGroups | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """y [T, out] + (x [T, in] A^T rounded to x's dtype) B^T by the adapter of each row, in y's memory -> y.

    slots [T] int32; a row with slot -1 has no adapter and stays unchanged, bit for bit. No row depends on the adapters
    of others. Sums are float32, and the result is rounded once. `groups` of the first rows, whose adapters may all be
    different, like those of a decode step, multiplies those together that have the same one. Groups are read before the
    kernel in front has ended, so another kernel has to come between `group_rows` and the first product. The other rows
    are expected in runs of one adapter; any other order is correct but slow. `batch_invariant`: a row's result
    does not depend on the number of rows; then there are no groups.
    """
    rank = lora.b.shape[-1]
    for slot in sorted(set(slots.tolist())):
        own = 0 if slot < 0 else int(lora.ranks[slot])
        if not own:
            continue
        rows = (slots == slot).nonzero().flatten()
        taken, first = x[rows].float(), 0
        for part, size in enumerate(lora.sizes):
            a, b = lora.a[slot, part * rank :][:own], lora.b[slot, first : first + size, :own]
            shrunk = (taken @ a.float().t()).to(x.dtype).float()
            y[rows, first : first + size] = (y[rows, first : first + size] + shrunk @ b.float().t()).to(y.dtype)
            first += size
    return y
