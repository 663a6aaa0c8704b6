"""Slot tables, and how a batch becomes the tensors of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncllm.batch import Batch, SlotStart
from asyncllm.layers.step_inputs import StepInputs

__all__ = ["SlotTables", "StepRows"]


@dataclass(slots=True)
class StepRows:
    """Which tokens of a step are sampled from, in batch order: decode rows, then prefill rows with `sample`."""

    slots: NDArray[np.int64]
    """[R]"""
    positions: NDArray[np.int64]
    """[R], absolute positions of the tokens to be drawn."""
    indices: NDArray[np.int64] | None
    """[R], rows of the hidden states; None when they are all of them, in order."""
    prefill_starts: list[int]
    """Index of each prefill row's first token among the step's tokens."""


class SlotTables:
    """Block table, position and last token of each slot.

    Block tables and positions follow from the batches alone and live in host memory. The last tokens are what sampling
    gave, and stay on the device.
    """

    def __init__(
        self, num_slots: int, max_position: int, block_size: int, device: torch.device, *, rope_lens: bool = False
    ) -> None:
        self._block_size = block_size
        self._device = device
        self._rope_lens = rope_lens
        self._blocks = np.zeros((num_slots, -(-max_position // block_size)), np.int32)
        self._position = np.zeros(num_slots, np.int64)
        self._num_prompt = np.zeros(num_slots, np.int64)
        self._row_numbers = torch.arange(num_slots + 1, dtype=torch.int32, device=device)
        self._last_token = torch.zeros(num_slots, dtype=torch.int64, device=device)

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

    def set_last_tokens(self, slots: NDArray[np.int64], tokens: Tensor) -> None:
        """Remember what was sampled, int64 [R], as the next input of `slots` [R]."""
        self._last_token.index_copy_(0, self._tensor(slots), tokens)

    def build(self, batch: Batch) -> tuple[StepInputs, StepRows]:
        """The tensors of a step with at least one row; advances every row's position past its tokens."""
        num_decode = len(batch.decode)
        decode_slots = np.array(batch.decode, np.int64)
        decode_positions = self._position[decode_slots]
        input_ids = self._last_token.index_select(0, self._tensor(decode_slots))
        if not batch.prefill:
            inputs = self._inputs(decode_slots, None, decode_positions, input_ids, num_decode, 1)
            return inputs, StepRows(decode_slots, decode_positions + 1, None, [])

        lengths = [1] * num_decode + [len(row.tokens) for row in batch.prefill]
        row_slots = np.array(batch.decode + [row.slot for row in batch.prefill], np.int64)
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        first = np.concatenate([decode_positions, np.array([row.position for row in batch.prefill], np.int64)])
        # Token t of row b, which owns tokens offsets[b] on, sits at first[b] + t - offsets[b].
        positions = np.repeat(first - offsets[:-1], lengths) + np.arange(offsets[-1])
        known = np.concatenate([np.array(row.tokens, np.int64) for row in batch.prefill])
        input_ids = torch.cat([input_ids, self._tensor(known)])
        inputs = self._inputs(row_slots, offsets, positions, input_ids, num_decode, max(lengths[num_decode:]))

        ends = offsets[1:] - 1
        sampled = np.array([True] * num_decode + [row.sample for row in batch.prefill])
        indices = ends[sampled]
        rows = StepRows(row_slots[sampled], positions[indices] + 1, indices, offsets[num_decode:-1].tolist())
        return inputs, rows

    def _inputs(
        self,
        row_slots: NDArray[np.int64],
        offsets: NDArray[np.int64] | None,
        positions: NDArray[np.int64],
        input_ids: Tensor,
        num_decode: int,
        max_q_len: int,
    ) -> StepInputs:
        """`offsets` [B + 1] are None when every row has one token; `positions` and `input_ids` are [T]."""
        if offsets is None:
            token_slots, kv_lens = row_slots, positions + 1
            q_offsets = self._row_numbers[: len(row_slots) + 1]
        else:
            token_slots = np.repeat(row_slots, np.diff(offsets))
            kv_lens = positions[offsets[1:] - 1] + 1
            q_offsets = self._tensor(offsets.astype(np.int32))
        self._position[row_slots] = kv_lens
        block, offset = np.divmod(positions, self._block_size)
        slot_mapping = self._blocks[token_slots, block].astype(np.int64) * self._block_size + offset
        return StepInputs(
            input_ids=input_ids,
            positions=self._tensor(positions),
            slot_mapping=self._tensor(slot_mapping),
            num_decode=num_decode,
            q_offsets=q_offsets,
            kv_lens=self._tensor(kv_lens.astype(np.int32)),
            block_tables=self._tensor(self._block_tables(row_slots, kv_lens)),
            max_q_len=max_q_len,
            max_kv_len=int(kv_lens.max()),
            rope_lens=self._tensor(self._num_prompt[token_slots]) if self._rope_lens else None,
        )

    def _block_tables(self, row_slots: NDArray[np.int64], kv_lens: NDArray[np.int64]) -> NDArray[np.int32]:
        """[B, N]. Past its own blocks a row repeats its first one: attention may read there and multiply by 0, which
        would carry a NaN over from another sequence's block."""
        owned = -(-kv_lens // self._block_size)
        width = int(owned.max())
        tables = self._blocks[row_slots, :width]
        if owned.min() == width:
            return tables
        return np.where(np.arange(width) < owned[:, None], tables, tables[:, :1])

    def _tensor(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self._device)
