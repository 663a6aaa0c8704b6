"""SlotArrays: the host's state of every slot, and the step columns derived from it.

It is computed from the batches alone. The values of sampled tokens are not needed, and stay on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncllm.layers.lora import ADAPTER_SLOTS
from asyncllm.layers.step_inputs import INPUT_IDS, KV_LENS, POSITIONS, Column, places_of
from asyncllm.protocol import Batch, SlotStart

__all__ = ["SlotArrays", "StepArrays", "StepRows", "numpy_type"]

_NUMPY_TYPES: dict[torch.dtype, type[Any]] = {
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float32: np.float32,
    torch.float64: np.float64,
}


def numpy_type(column: Column) -> type[Any]:
    """Return the type of a column's values on the host."""
    return _NUMPY_TYPES[column.dtype]


@dataclass(slots=True)
class StepRows:
    """The tokens of a step whose hidden states are needed.

    R tokens are sampled from, in batch order: decode rows, then prefill rows with `sample`. L more are the last tokens
    of prefill rows that are only pooled.
    """

    slots: NDArray[np.int64]
    """[R]"""
    positions: NDArray[np.int64]
    """[R]: absolute positions of the tokens to be drawn."""
    indices: NDArray[np.int64] | None
    """[R + L]: their indices among the step's tokens; None if they are all tokens, in order."""
    numbers: NDArray[np.int64]
    """[R + L]: the numbers of the rows that they belong to."""
    prefill_starts: list[int]
    """Index of each prefill row's first token among the step's tokens."""


@dataclass(slots=True)
class StepArrays:
    """A step of T tokens in B rows, decode rows first, as described by `StepInputs`."""

    row_slots: NDArray[np.int64]
    """[B]"""
    offsets: NDArray[np.int64] | None
    """[B + 1]: row b owns tokens offsets[b] to offsets[b + 1]. None: every row has one token."""
    columns: dict[Column, NDArray[Any]]
    """Values of the columns that come from the host, [T] or [B] each. An input id of ~slot stands for the latest token
    of that slot, which only the device knows."""
    num_decode: int
    max_q_len: int
    rows: StepRows

    @property
    def num_tokens(self) -> int:
        return len(self.columns[INPUT_IDS])

    @property
    def adapted(self) -> bool:
        """Whether any token has an adapter."""
        slots = self.columns.get(ADAPTER_SLOTS)
        return slots is not None and bool((slots >= 0).any())

    @property
    def adapter_slots(self) -> list[int]:
        """Slots of the tokens' adapters."""
        slots = self.columns.get(ADAPTER_SLOTS)
        return [] if slots is None else np.unique(slots[slots >= 0]).tolist()

    @property
    def prompts(self) -> list[tuple[int, int]]:
        """For each prefill row, its number of tokens and the length of its context."""
        if self.offsets is None:
            return []
        first = self.num_decode
        counts = np.diff(self.offsets[first:])
        return list(zip(counts.tolist(), self.columns[KV_LENS][first:].tolist(), strict=True))


class SlotArrays:
    """Block tables, position and column values of each slot, in host memory."""

    def __init__(
        self,
        num_slots: int,
        max_position: int,
        block_size: int,
        columns: Sequence[Column] = (),
        *,
        num_groups: int = 1,
    ) -> None:
        """`columns`: columns of the model's layers. `num_groups`: number of block groups."""
        self._block_size = block_size
        self._blocks = np.zeros((num_groups, num_slots, -(-max_position // block_size)), np.int32)
        self._position = np.zeros(num_slots, np.int64)
        self._columns = columns
        self._of_slot = {column: np.zeros(num_slots, numpy_type(column)) for column in columns if column.of_slot}

    @property
    def max_blocks(self) -> int:
        """Maximum number of blocks of one slot in a block group."""
        return self._blocks.shape[2]

    def start(self, start: SlotStart) -> None:
        """Assign the slot to a new sequence."""
        self._position[start.slot] = 0
        for column, values in self._of_slot.items():
            assert column.of_slot is not None
            values[start.slot] = column.of_slot(start)

    def write_blocks(self, slot: int, group: int, index: int, blocks: list[int]) -> None:
        """Write block ids into the slot's block table of a group, from entry `index` on."""
        self._blocks[group, slot, index : index + len(blocks)] = blocks

    def longest_context(self, batch: Batch) -> int:
        """Return the number of tokens of the longest context in the next step, or 0 if it has no rows."""
        ends = [row.position + len(row.tokens) for row in batch.prefill]
        if batch.decode:
            ends.append(int(self._position[np.array(batch.decode, np.int64)].max()) + 1)
        return max(ends, default=0)

    def advance(self, batch: Batch) -> StepArrays:
        """Return the arrays of a step with at least one row, and move every row's position past its tokens."""
        num_decode, prefill = len(batch.decode), batch.prefill
        if not prefill:
            slots = np.array(batch.decode, np.int64)
            positions = self._position[slots]
            kv_lens = positions + 1
            self._position[slots] = kv_lens
            columns = self._columns_of(batch, slots, slots, ~slots, positions, kv_lens)
            return StepArrays(
                row_slots=slots,
                offsets=None,
                columns=columns,
                num_decode=num_decode,
                max_q_len=1,
                rows=StepRows(slots, kv_lens, None, np.arange(num_decode), []),
            )
        lengths = [1] * num_decode + [len(row.tokens) for row in prefill]
        row_slots = np.array(batch.decode + [row.slot for row in prefill], np.int64)
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        first = self._position[row_slots]
        first[num_decode:] = [row.position for row in prefill]
        # Token t of row b, whose tokens begin at offsets[b], has position first[b] + t - offsets[b].
        positions = np.repeat(first - offsets[:-1], lengths) + np.arange(offsets[-1])
        kv_lens = first + np.diff(offsets)
        self._position[row_slots] = kv_lens
        ids = np.concatenate([~row_slots[:num_decode], *(np.array(row.tokens, np.int64) for row in prefill)])
        sampled = np.flatnonzero([True] * num_decode + [row.sample for row in prefill])
        last = [num_decode + index for index, row in enumerate(prefill) if row.pooling in ("last", "score")]
        numbers = np.concatenate([sampled, np.array(last, np.int64)])
        return StepArrays(
            row_slots=row_slots,
            offsets=offsets,
            columns=self._columns_of(batch, np.repeat(row_slots, lengths), row_slots, ids, positions, kv_lens),
            num_decode=num_decode,
            max_q_len=max(lengths[num_decode:]),
            rows=StepRows(
                row_slots[sampled], kv_lens[sampled], offsets[1:][numbers] - 1, numbers, offsets[num_decode:-1].tolist()
            ),
        )

    def _columns_of(
        self,
        batch: Batch,
        token_slots: NDArray[np.int64],
        row_slots: NDArray[np.int64],
        ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        kv_lens: NDArray[np.int64],
    ) -> dict[Column, NDArray[Any]]:
        block, offset = np.divmod(positions, self._block_size)
        columns: dict[Column, NDArray[Any]] = {
            INPUT_IDS: ids,
            POSITIONS: positions,
            KV_LENS: kv_lens.astype(np.int32),
        }
        for group, blocks in enumerate(self._blocks):
            columns[places_of(group)] = blocks[token_slots, block].astype(np.int64) * self._block_size + offset
        for column in self._columns:
            if column.of_step is not None:
                columns[column] = np.asarray(column.of_step(batch, positions), numpy_type(column))
            else:
                columns[column] = self._of_slot[column][token_slots if column.per == "token" else row_slots]
        return columns
