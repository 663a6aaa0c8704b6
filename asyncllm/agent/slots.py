"""What the host knows of every slot, and what follows from it for a step: block tables, positions, lengths.

All of it is arithmetic on the batches alone. The values of sampled tokens are not needed for it and stay on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncllm.batch import Batch, SlotStart

__all__ = ["SlotArrays", "StepArrays", "StepRows"]


@dataclass(slots=True)
class StepRows:
    """Which tokens of a step somebody wants to know more of.

    R are sampled from, in batch order: decode rows, then prefill rows with `sample`. L more are the last ones of
    prefill rows that pool nothing else.
    """

    slots: NDArray[np.int64]
    """[R]"""
    positions: NDArray[np.int64]
    """[R], absolute positions of the tokens to be drawn."""
    indices: NDArray[np.int64] | None
    """[R + L], rows of the hidden states; None when they are all of them, in order."""
    last: NDArray[np.int64]
    """[L], indices of the rows that pool their last token."""
    prefill_starts: list[int]
    """Index of each prefill row's first token among the step's tokens."""


@dataclass(slots=True)
class StepArrays:
    """A step of T tokens in B rows, decode rows first, as `StepInputs` describes it."""

    row_slots: NDArray[np.int64]
    """[B]"""
    offsets: NDArray[np.int64] | None
    """[B + 1]: row b owns tokens offsets[b] to offsets[b + 1]. None: every row has one token."""
    known: NDArray[np.int64]
    """Ids of the prefill tokens, which follow those of the decode rows."""
    positions: NDArray[np.int64]
    """[T]"""
    slot_mapping: NDArray[np.int64]
    """[T]"""
    kv_lens: NDArray[np.int64]
    """[B]"""
    prompt_lens: NDArray[np.int64]
    """[T]: prompt length of each token's sequence."""
    num_decode: int
    max_q_len: int
    rows: StepRows


class SlotArrays:
    """Block table, position and prompt length of each slot, in host memory."""

    def __init__(self, num_slots: int, max_position: int, block_size: int) -> None:
        self._block_size = block_size
        self._blocks = np.zeros((num_slots, -(-max_position // block_size)), np.int32)
        self._position = np.zeros(num_slots, np.int64)
        self._num_prompt = np.zeros(num_slots, np.int64)

    @property
    def max_blocks(self) -> int:
        """Most blocks of one slot."""
        return self._blocks.shape[1]

    def start(self, start: SlotStart) -> None:
        """Give the slot to a new sequence."""
        self._num_prompt[start.slot] = start.num_prompt
        self._position[start.slot] = 0

    def write_blocks(self, slot: int, index: int, blocks: list[int]) -> None:
        """Write block ids into the slot's block table, from entry `index` on."""
        self._blocks[slot, index : index + len(blocks)] = blocks

    def blocks(self, slot: int) -> NDArray[np.int32]:
        """Ids of the blocks that hold the slot's tokens so far."""
        return self._blocks[slot, : -(-int(self._position[slot]) // self._block_size)]

    def advance_decode(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Take one token further each of distinct `slots` [R]: the positions of those tokens, and the prompts' lengths.

        All that a decode step whose other inputs are on the device needs of the host.
        """
        positions = self._position[slots]
        self._position[slots] = positions + 1
        return positions, self._num_prompt[slots]

    def advance(self, batch: Batch) -> StepArrays:
        """The arrays of a step with at least one row; takes every row's position past its tokens."""
        num_decode = len(batch.decode)
        if not batch.prefill:
            slots = np.array(batch.decode, np.int64)
            positions, prompt_lens = self.advance_decode(slots)
            return StepArrays(
                row_slots=slots,
                offsets=None,
                known=np.zeros(0, np.int64),
                positions=positions,
                slot_mapping=self._slot_mapping(slots, positions),
                kv_lens=positions + 1,
                prompt_lens=prompt_lens,
                num_decode=num_decode,
                max_q_len=1,
                rows=StepRows(slots, positions + 1, None, np.zeros(0, np.int64), []),
            )
        lengths = [1] * num_decode + [len(row.tokens) for row in batch.prefill]
        row_slots = np.array(batch.decode + [row.slot for row in batch.prefill], np.int64)
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        first = self._position[row_slots]
        first[num_decode:] = [row.position for row in batch.prefill]
        # Token t of row b, which owns tokens offsets[b] on, sits at first[b] + t - offsets[b].
        positions = np.repeat(first - offsets[:-1], lengths) + np.arange(offsets[-1])
        token_slots = np.repeat(row_slots, lengths)
        kv_lens = first + np.diff(offsets)
        self._position[row_slots] = kv_lens
        sampled = np.array([True] * num_decode + [row.sample for row in batch.prefill])
        last = np.array([num_decode + i for i, row in enumerate(batch.prefill) if row.pooling == "last"], np.int64)
        ends = offsets[1:] - 1
        drawn = ends[sampled]
        return StepArrays(
            row_slots=row_slots,
            offsets=offsets,
            known=np.concatenate([np.array(row.tokens, np.int64) for row in batch.prefill]),
            positions=positions,
            slot_mapping=self._slot_mapping(token_slots, positions),
            kv_lens=kv_lens,
            prompt_lens=self._num_prompt[token_slots],
            num_decode=num_decode,
            max_q_len=max(lengths[num_decode:]),
            rows=StepRows(
                row_slots[sampled],
                positions[drawn] + 1,
                np.concatenate([drawn, ends[last]]),
                last,
                offsets[num_decode:-1].tolist(),
            ),
        )

    def block_tables(self, row_slots: NDArray[np.int64], kv_lens: NDArray[np.int64]) -> NDArray[np.int32]:
        """[B, N]. Past its own blocks a row repeats its first one: attention may read there and multiply by 0, which
        would carry a NaN over from another sequence's block."""
        owned = -(-kv_lens // self._block_size)
        width = int(owned.max())
        tables = self._blocks[row_slots, :width]
        if owned.min() == width:
            return tables
        return np.where(np.arange(width) < owned[:, None], tables, tables[:, :1])

    def _slot_mapping(self, token_slots: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        block, offset = np.divmod(positions, self._block_size)
        return self._blocks[token_slots, block].astype(np.int64) * self._block_size + offset
