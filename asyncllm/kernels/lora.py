"""What low-rank adapters (LoRA, arXiv 2106.09685) add to the product of a linear layer, each row by its own adapter."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from asyncllm.kernels.dispatch import op

__all__ = ["MAX_PARTS", "LoRAWeights", "add_lora"]

MAX_PARTS = 4
"""Of a layer's output."""


class LoRAWeights(NamedTuple):
    """The adapters of one linear layer, in S slots of rank R: a power of two, 16 at least. The scale is in `b`."""

    a: Tensor
    """[S, P * R, in]: for each of P parts of the output R rows, of which those past the adapter's rank are zero."""
    b: Tensor
    """[S, out, R]: columns past the adapter's rank are zero."""
    ranks: Tensor
    """[S] int32: of the adapter in each slot; 0 where it has nothing for this layer."""
    sizes: tuple[int, ...]
    """Output features of each part, `MAX_PARTS` at most."""


@op("lora:add_lora")
def add_lora(
    y: Tensor, x: Tensor, slots: Tensor, lora: LoRAWeights, *, num_single: int = 0, batch_invariant: bool = False
) -> Tensor:
    """y [T, out] + (x [T, in] A^T rounded to x's type) B^T by the adapter of each row, in y's memory -> y.

    slots [T] int32; -1 is a row without an adapter, which stays as it is, bit by bit, as every row does whatever
    adapters the others have. Sums are float32, and the result is rounded once. Of the first `num_single` rows each may
    have another adapter, as those of a decode step have; the others are taken to come in runs of one adapter, and any
    order is right, but slow. `batch_invariant`: nothing of a row's result follows from the number of rows.
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
