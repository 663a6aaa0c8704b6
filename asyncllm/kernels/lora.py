"""Low-rank adapters (LoRA, arXiv 2106.09685): additions to the product of a linear layer, per row by its own
adapter."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from asyncllm.kernels.dispatch import op

__all__ = ["MAX_PARTS", "LoRAWeights", "add_lora"]

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


@op("lora:add_lora")
def add_lora(
    y: Tensor, x: Tensor, slots: Tensor, lora: LoRAWeights, *, num_single: int = 0, batch_invariant: bool = False
) -> Tensor:
    """y [T, out] + (x [T, in] A^T rounded to x's dtype) B^T by the adapter of each row, in y's memory -> y.

    slots [T] int32; a row with slot -1 has no adapter and stays unchanged, bit for bit. No row depends on the adapters
    of others. Sums are float32, and the result is rounded once. The first `num_single` rows may each have a different
    adapter, like those of a decode step. The others are expected in runs of one adapter; any other order is correct but
    slow. `batch_invariant`: a row's result does not depend on the number of rows.
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
