"""Low-rank adapters (LoRA, arXiv 2106.09685): additions to the product of a linear layer, per row by its own
adapter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from asyncllm.kernels.activation import gelu_tanh_mul, silu_mul
from asyncllm.kernels.dispatch import op
from asyncllm.kernels.linear import linear

__all__ = [
    "FEW_ROWS",
    "GROUP",
    "MAX_PARTS",
    "LoRAWeights",
    "RowGroups",
    "ShrunkRows",
    "expand_lora",
    "expand_lora_gated",
    "group_rows",
    "linear_shrink_lora",
    "shrink_lora",
]

FEW_ROWS = 64
"""Number of decode rows that kernels multiply one by one, without groups. For Llama-3-8B's layers with rank 16 on an
H200, in ms per step: 64 rows with 64, 8 and 1 adapters take 1.8, 1.2 and 1.1, in groups 3.4, 1.7 and 1.6; 16 rows with
8 and 1 adapters 0.6 and 0.5, in groups 1.1 and 1.0. Reading 64 adapters takes 1.1."""

GROUP = 16
"""Maximum number of rows in a group: as many as tensor cores multiply at once."""

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


class ShrunkRows(NamedTuple):
    """Rows multiplied by their adapter's A: partial sums over the input features, to be added in their order and
    multiplied by B. Rows without an adapter, and numbers beyond an adapter's rank, are unspecified."""

    first: Tensor
    """[S, R, P * rank] float32: the rows that may each have a different adapter."""
    rest: Tensor
    """[S, T - R, P * rank] float32: the others."""


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


@op("lora:shrink_lora")
def shrink_lora(
    x: Tensor, slots: Tensor, lora: LoRAWeights, *, num_single: int = 0, groups: RowGroups | None = None
) -> ShrunkRows:
    """x [T, in] -> x A^T by the adapter of each row.

    slots [T] int32; a row with slot -1 has no adapter. No row depends on the adapters of others. The first `num_single`
    rows may each have a different adapter, like those of a decode step; `groups` of the first rows, instead, are faster
    for many, and a row's result then does not depend on their number. Kernels read groups before the kernel in front
    has ended, so another one has to come between `group_rows` and the first product. The other rows are expected in
    runs of one adapter; any other order is correct but slow.

    To be called before the layer's own product, whose kernel reads its first weights meanwhile, if `linear_shrink_lora`
    is not used.
    """
    first = num_single if groups is None else len(groups.slots)
    shrunk = x.new_zeros(1, len(x), lora.a.shape[1], dtype=torch.float32)
    rank = lora.b.shape[-1]
    for slot, own, rows in _rows_by_slot(slots, lora, groups):
        taken = x[rows].float()
        for part in range(0, shrunk.shape[2], rank):
            shrunk[0, rows, part : part + own] = taken @ lora.a[slot, part : part + own].float().t()
    return ShrunkRows(shrunk[:, :first], shrunk[:, first:])


@op("linear.adapted:linear_shrink_lora")
def linear_shrink_lora(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slots: Tensor,
    lora: LoRAWeights,
    *,
    num_single: int = 0,
    groups: RowGroups | None = None,
) -> tuple[Tensor, ShrunkRows]:
    """Return `linear` of x [T, in], and `shrink_lora` of the same rows."""
    return linear(x, weight, bias), shrink_lora(x, slots, lora, num_single=num_single, groups=groups)


@op("lora:expand_lora")
def expand_lora(
    y: Tensor, shrunk: ShrunkRows, slots: Tensor, lora: LoRAWeights, *, groups: RowGroups | None = None
) -> Tensor:
    """y [T, out] + (`shrunk` rounded to y's dtype) B^T by the adapter of each row, in y's memory -> y.

    `shrunk` is what `shrink_lora` returned for the same slots, adapters and groups. A row without an adapter stays
    unchanged, bit for bit. Sums are float32, and the result is rounded once.
    """
    inner = torch.cat([rows.sum(0) for rows in shrunk]).to(y.dtype).float()
    rank = lora.b.shape[-1]
    for slot, own, rows in _rows_by_slot(slots, lora, groups):
        first = 0
        for part, size in enumerate(lora.sizes):
            b = lora.b[slot, first : first + size, :own].float()
            added = inner[rows, part * rank : part * rank + own] @ b.t()
            y[rows, first : first + size] = (y[rows, first : first + size] + added).to(y.dtype)
            first += size
    return y


@op("lora:expand_lora_gated")
def expand_lora_gated(
    y: Tensor,
    shrunk: ShrunkRows,
    slots: Tensor,
    lora: LoRAWeights,
    *,
    groups: RowGroups | None = None,
    gelu: bool = False,
) -> Tensor:
    """Return `silu_mul`, or with `gelu` `gelu_tanh_mul`, of `expand_lora` [T, out / 2]. What y holds afterwards is
    unspecified."""
    y = expand_lora(y, shrunk, slots, lora, groups=groups)
    return gelu_tanh_mul(y) if gelu else silu_mul(y)


def _rows_by_slot(slots: Tensor, lora: LoRAWeights, groups: RowGroups | None) -> Iterator[tuple[int, int, Tensor]]:
    """Yield slot, its adapter's rank and its rows [R] int64 to process at once; slots with nothing are left out."""
    num_grouped = 0 if groups is None else len(groups.slots)
    ranks = lora.ranks.tolist()
    for slot in sorted(set(slots.tolist())):
        if slot < 0 or not ranks[slot]:
            continue
        found = (slots == slot).nonzero().flatten()
        grouped = int((found < num_grouped).sum()) if num_grouped else 0
        # A matrix library chooses the order of summation by the number of rows.
        for rows in found[:grouped].split(1) if grouped else ():
            yield slot, ranks[slot], rows
        if grouped < len(found):
            yield slot, ranks[slot], found[grouped:]
