"""SlotTables: how a batch becomes the tensors of a step that runs where the host's memory is."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncllm.agent.slots import SlotArrays, StepRows
from asyncllm.batch import Batch, SlotStart
from asyncllm.layers.step_inputs import StepInputs

__all__ = ["SlotTables"]


class SlotTables:
    """Block table, position and last token of each slot."""

    def __init__(
        self, num_slots: int, max_position: int, block_size: int, device: torch.device, *, rope_lens: bool = False
    ) -> None:
        self._device = device
        self._rope_lens = rope_lens
        self._slots = SlotArrays(num_slots, max_position, block_size)
        self._row_numbers = torch.arange(num_slots + 1, dtype=torch.int32, device=device)
        self._last_token = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def start(self, start: SlotStart) -> None:
        """Give the slot to a new sequence."""
        self._slots.start(start)

    def write_blocks(self, slot: int, index: int, blocks: list[int]) -> None:
        """Write block ids into the slot's block table, from entry `index` on."""
        self._slots.write_blocks(slot, index, blocks)

    def blocks(self, slot: int) -> NDArray[np.int32]:
        """Ids of the blocks that hold the slot's tokens so far."""
        return self._slots.blocks(slot)

    def set_last_tokens(self, slots: NDArray[np.int64], tokens: Tensor) -> None:
        """Remember what was sampled, int64 [R], as the next input of `slots` [R]."""
        self._last_token.index_copy_(0, self._tensor(slots), tokens)

    def build(self, batch: Batch) -> tuple[StepInputs, StepRows]:
        """The tensors of a step with at least one row; advances every row's position past its tokens."""
        step = self._slots.advance(batch)
        input_ids = self._last_token.index_select(0, self._tensor(step.row_slots[: step.num_decode]))
        if len(step.known):
            input_ids = torch.cat([input_ids, self._tensor(step.known)])
        if step.offsets is None:
            q_offsets = self._row_numbers[: len(step.row_slots) + 1]
        else:
            q_offsets = self._tensor(step.offsets.astype(np.int32))
        inputs = StepInputs(
            input_ids=input_ids,
            positions=self._tensor(step.positions),
            slot_mapping=self._tensor(step.slot_mapping),
            num_decode=step.num_decode,
            q_offsets=q_offsets,
            kv_lens=self._tensor(step.kv_lens.astype(np.int32)),
            block_tables=self._tensor(self._slots.block_tables(step.row_slots, step.kv_lens)),
            max_q_len=step.max_q_len,
            rope_lens=self._tensor(step.prompt_lens) if self._rope_lens else None,
        )
        return inputs, step.rows

    def _tensor(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self._device)
