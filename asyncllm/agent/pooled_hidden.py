"""Hidden states of prompts, added up without waiting and read once the step is over."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import torch
from torch import Tensor

from asyncllm.agent.sampler import NOT_FINITE
from asyncllm.agent.slots import StepRows
from asyncllm.agent.transfers import fetch
from asyncllm.batch import Batch, StepOutput

__all__ = ["PooledHidden"]


class PooledHidden:
    """The sums that a step's prefill rows ask for in `pooling`: one float32 vector [H] for each of them is all that
    comes to the host. Made in inference mode on the computing stream, which also brings it there; `write` may be called
    when the stream has come so far."""

    def __init__(self, batch: Batch, rows: StepRows, hidden: Tensor, wanted: Tensor) -> None:
        """`hidden` [T, H]: hidden states of all tokens, which are after the final norm if `reads_all(batch)`.
        `wanted` [R + L, H]: those of `rows.indices`, after it in any case."""
        pooled = list(_pooled(batch, rows, hidden, wanted))
        self._slots = [slot for slot, _ in pooled]
        sums = torch.empty(len(pooled), hidden.shape[1], dtype=torch.float32, device=hidden.device)
        for (_, states), out in zip(pooled, sums, strict=True):
            torch.sum(states, 0, dtype=torch.float32, out=out)
        self._sums = fetch(sums)

    @staticmethod
    def reads_all(batch: Batch) -> bool:
        """Whether a row pools tokens whose hidden states nobody else wants."""
        return any(row.pooling == "mean" for row in batch.prefill)

    def write(self, output: StepOutput) -> None:
        """Put the sums where the engine looks for them."""
        finite = self._sums.isfinite().all(1).tolist()
        for slot, values, sound in zip(self._slots, self._sums.numpy(), finite, strict=True):
            if sound:
                # Python floats of thousands of entries take long to make, and a step may end many prompts at once.
                output.pooled[slot] = array("f", values.tobytes())
            else:
                output.errors.setdefault(slot, NOT_FINITE)


def _pooled(batch: Batch, rows: StepRows, hidden: Tensor, wanted: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Slot and hidden states [n, H] to be added, of each row that pools."""
    place = len(rows.slots)
    for row, first in zip(batch.prefill, rows.prefill_starts, strict=True):
        if row.pooling == "mean":
            yield row.slot, hidden[first : first + len(row.tokens)]
        elif row.pooling == "last":
            yield row.slot, wanted[place : place + 1]
            place += 1
