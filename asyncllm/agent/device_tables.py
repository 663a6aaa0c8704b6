"""DeviceTables: the state of every slot on the device, and the inputs of a step made of it.

Block tables and last tokens live on the device, in one row per slot. A decode step brings up no more than its slots,
positions and new blocks; what a step with prompt tokens needs besides goes up in the same one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncllm import kernels
from asyncllm.agent.mixed_size import MixedSize, empty_step, padded
from asyncllm.agent.slots import SlotArrays, StepArrays
from asyncllm.agent.upload import offsets, upload_together, views
from asyncllm.batch import Batch, SlotStart
from asyncllm.kernels import DecodeInputs
from asyncllm.layers.step_inputs import SampledRows, StepInputs

__all__ = ["DeviceStep", "DeviceTables"]

_MORE_BYTES = 2**16
"""Room of a step of fixed size for what only goes up with it: 16 bytes for a sampled row, 12 for a new block."""


@dataclass(slots=True)
class DeviceStep:
    """A step that is not one of decode rows alone: its tensors on the device, and the host's account of them."""

    arrays: StepArrays
    size: MixedSize | None
    """Where `inputs` is laid out for a captured part; None when all of it is launched kernel by kernel."""
    inputs: StepInputs
    slots: Tensor
    """[R] int32: the rows that are sampled from."""
    positions: Tensor
    """[R] int32: positions of the tokens to be drawn."""
    indices: Tensor
    """[R + L] int64: their places among the step's tokens, then those of the L tokens that are pooled alone."""
    sampled: SampledRows | None
    """What the last layer goes on with: those R + L tokens; None when that is all tokens. There is at least one row,
    whose result nobody reads when none is wanted."""
    prefill_offsets: Tensor
    """[P + 1] int32: where the tokens of each prefill row begin and end; rows of padding may follow."""


class DeviceTables:
    """Written by the thread that launches steps; its tensors also by the kernels of the steps, in order."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_rows: int,
        max_position: int,
        block_size: int,
        rope_lens: bool,
        batch_invariant: bool,
        device: torch.device,
        mixed: Sequence[MixedSize] = (),
    ) -> None:
        """`max_rows`: most rows of a decode step in fixed tensors, padding included. `mixed`: sizes that other steps
        may be laid out in, from small to large."""
        self._slots = SlotArrays(num_slots, max_position, block_size)
        self._block_size = block_size
        self._rope_lens = rope_lens
        self._batch_invariant = batch_invariant
        self._device = device
        self._updates: list[tuple[int, list[int]]] = []
        """(entry of the flat block tables, block ids to write from there on), not yet on the device."""
        # One entry more than a row can own: kernels read one page ahead.
        self._width = self._slots.max_blocks + 1
        self.block_tables = torch.zeros(num_slots, self._width, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._row_numbers = torch.arange(max_rows + 1, dtype=torch.int32, device=device)

        self._decode_rows = np.zeros((3, max_rows), np.int32)
        """Slots, positions and prompt lengths of a decode step, on the host."""
        room: list[NDArray[Any]] = [self._decode_rows, np.zeros(max_rows, np.int64), np.zeros(max_rows, np.int32)]
        self._decode_bytes = torch.zeros(offsets(room)[-1], dtype=torch.uint8, device=device)
        fixed = self._decode_bytes[: self._decode_rows.nbytes].view(torch.int32).view(3, max_rows)
        self.decode_slots, self.decode_positions, self._decode_prompt_lens = fixed
        """[max_rows] int32 each; -1 is the slot of a padding row."""
        self._decode_inputs = DecodeInputs.zeros(max_rows, self._width, device)

        self._mixed_sizes = mixed
        self._mixed_bytes = torch.zeros(0, dtype=torch.uint8, device=device)
        """Where a step of fixed size is brought up to, and what only goes up with it. A size has its own division."""
        if mixed:
            num_bytes = offsets(_laid_out(padded(empty_step(), mixed[-1]), []))[-1] + _MORE_BYTES
            self._mixed_bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            self._mixed_tokens = torch.zeros(mixed[-1].tokens, dtype=torch.int64, device=device)
            self._mixed_tables = torch.zeros(mixed[-1].rows, self._width, dtype=torch.int32, device=device)

    def start(self, start: SlotStart) -> None:
        """Give the slot to a new sequence."""
        self._slots.start(start)

    def write_blocks(self, slot: int, index: int, blocks: list[int]) -> None:
        """Write block ids into the slot's block table, from entry `index` on; they go up with the next step."""
        self._slots.write_blocks(slot, index, blocks)
        self._updates.append((slot * self._width + index, blocks))

    def fits(self, batch: Batch, num_rows: int) -> bool:
        """Whether the batch is a decode step that `advance_decode` can bring up in `num_rows` rows."""
        num_blocks = sum(len(blocks) for _, blocks in self._updates)
        return not batch.prefill and not batch.copies and 0 < len(batch.decode) <= num_rows >= num_blocks

    def advance_decode(self, batch: Batch) -> NDArray[np.int64]:
        """Bring a decode step to the fixed tensors that `decode_inputs` reads. Returns its slots [R]."""
        slots = np.array(batch.decode, np.int64)
        rows = self._decode_rows
        rows[0, : len(slots)] = slots
        rows[0, len(slots) :] = -1
        rows[1, : len(slots)], rows[2, : len(slots)] = self._slots.advance_decode(slots)
        arrays: list[NDArray[Any]] = [rows, *self._take_updates()]
        _, *updates = upload_together(arrays, self._device, into=self._decode_bytes)
        self._apply(*updates)
        return slots

    def decode_drawn(self, num_rows: int) -> NDArray[np.int64]:
        """[R], absolute positions of the tokens to be drawn in the decode step that was brought up last."""
        return self._decode_rows[1, :num_rows].astype(np.int64) + 1

    def decode_inputs(self, num_rows: int) -> StepInputs:
        """The decode step of the first `num_rows` fixed rows; made of device state alone, so that it can be captured.

        Launches the kernel that gathers it.
        """
        fixed = DecodeInputs(*(tensor[:num_rows] for tensor in self._decode_inputs))
        kernels.prepare_decode(
            self.decode_slots[:num_rows],
            self.decode_positions[:num_rows],
            self.last_tokens,
            self.block_tables,
            self._block_size,
            fixed,
        )
        return StepInputs(
            input_ids=fixed.input_ids,
            positions=fixed.positions,
            slot_mapping=fixed.slot_mapping,
            num_decode=num_rows,
            q_offsets=self._row_numbers[: num_rows + 1],
            kv_lens=fixed.kv_lens,
            block_tables=fixed.block_tables,
            max_q_len=1,
            rope_lens=self._decode_prompt_lens[:num_rows] if self._rope_lens else None,
            batch_invariant=self._batch_invariant,
        )

    def advance(self, batch: Batch, *, captured: bool = False) -> DeviceStep:
        """Bring any step with at least one row to the device.

        `captured`: to the fixed tensors of `mixed_inputs`, if the step has prompt tokens and one of the sizes holds it.
        """
        arrays = self._slots.advance(batch)
        rows = arrays.rows
        wanted: list[NDArray[Any]] = [
            np.concatenate([rows.slots, arrays.row_slots[rows.last]]).astype(np.int32),
            np.concatenate([rows.positions, arrays.kv_lens[rows.last]]).astype(np.int32),
            np.arange(arrays.num_decode) if rows.indices is None else rows.indices,
        ]
        if not len(wanted[0]):
            first = arrays.positions[:1]
            wanted = [arrays.row_slots[:1].astype(np.int32), (first + 1).astype(np.int32), np.zeros(1, np.int64)]
        own = [*wanted, *self._take_updates()]
        size = self._size_for(arrays, own) if captured else None
        placed = arrays if size is None else padded(arrays, size)
        into = None if size is None else self._mixed_bytes
        everything = [*_laid_out(placed, batch.decode), *own]
        *shared, slots, lens, indices, entries, ids = upload_together(everything, self._device, into)
        self._apply(entries, ids)
        if size is None:
            input_ids = self.last_tokens.new_empty(len(placed.positions))
            block_tables = self.block_tables.new_empty(len(placed.row_slots), self._width)
            self._gather(shared, input_ids, block_tables)
        else:
            input_ids, block_tables = self._mixed_tokens[: size.tokens], self._mixed_tables[: size.rows]
        inputs = self._inputs_of(shared, placed, input_ids, block_tables)
        return DeviceStep(
            arrays=arrays,
            size=size,
            inputs=inputs,
            slots=slots[: len(rows.slots)],
            positions=lens[: len(rows.slots)],
            indices=indices,
            sampled=None if rows.indices is None else self._sampled_rows(indices, slots, lens),
            prefill_offsets=inputs.q_offsets[inputs.num_decode :],
        )

    def _size_for(self, arrays: StepArrays, own: list[NDArray[Any]]) -> MixedSize | None:
        """The smallest size that holds a step, which brings `own` up as well; None if there is none."""
        if arrays.offsets is None or offsets(own)[-1] > _MORE_BYTES:
            return None
        return next((size for size in self._mixed_sizes if size.holds(arrays)), None)

    def empty_mixed(self, size: MixedSize) -> None:
        """Make the fixed tensors a step of padding alone, so that what reads them may be launched."""
        upload_together(_laid_out(padded(empty_step(), size), []), self._device, self._mixed_bytes)

    def mixed_inputs(self, size: MixedSize) -> StepInputs:
        """The step that was brought up last, in this size; made of device state alone, so that it can be captured.

        Launches what gathers it.
        """
        placed = padded(empty_step(), size)
        shared = views(_laid_out(placed, []), self._mixed_bytes)
        input_ids, block_tables = self._mixed_tokens[: size.tokens], self._mixed_tables[: size.rows]
        self._gather(shared, input_ids, block_tables)
        return self._inputs_of(shared, placed, input_ids, block_tables)

    def _inputs_of(
        self, shared: Sequence[Tensor], arrays: StepArrays, input_ids: Tensor, block_tables: Tensor
    ) -> StepInputs:
        """The inputs of a step, which is on the device as `_laid_out`; the last two are what `_gather` fills."""
        _, q_offsets, _, positions, slot_mapping, kv_lens, prompt_lens = shared
        return StepInputs(
            input_ids=input_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            num_decode=arrays.num_decode,
            q_offsets=q_offsets,
            kv_lens=kv_lens,
            block_tables=block_tables,
            max_q_len=arrays.max_q_len,
            rope_lens=prompt_lens if self._rope_lens else None,
            batch_invariant=self._batch_invariant,
        )

    def _gather(self, shared: Sequence[Tensor], input_ids: Tensor, block_tables: Tensor) -> None:
        """Fill the last two from the state of the slots; an id of ~slot is that slot's latest token."""
        row_slots, _, ids, *_ = shared
        latest = self.last_tokens.index_select(0, ids.bitwise_not().clamp_(min=0))
        torch.where(ids < 0, latest, ids, out=input_ids)
        torch.index_select(self.block_tables, 0, row_slots, out=block_tables)

    def _sampled_rows(self, indices: Tensor, slots: Tensor, kv_lens: Tensor) -> SampledRows:
        """The step's tokens at `indices` [R], of `slots` [R] int32, as rows that see `kv_lens` [R] int32 tokens."""
        num_rows = len(indices)
        inputs = StepInputs(
            input_ids=indices,
            positions=indices,
            slot_mapping=indices,
            num_decode=num_rows,
            q_offsets=self._row_numbers[: num_rows + 1],
            kv_lens=kv_lens,
            block_tables=self.block_tables.index_select(0, slots),
            max_q_len=1,
            batch_invariant=self._batch_invariant,
        )
        return SampledRows(indices=indices, inputs=inputs)

    def flush(self) -> None:
        """Bring up new blocks without a step."""
        if self._updates:
            self._apply(*upload_together(self._take_updates(), self._device))

    def forget_updates(self) -> None:
        """The step that was to bring new blocks up is not launched: its rows are lost, and so are their blocks."""
        self._updates.clear()

    def _take_updates(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Entries of the flat block tables, and the block ids that belong there."""
        if not self._updates:
            return np.zeros(0, np.int64), np.zeros(0, np.int32)
        entries = np.concatenate([np.arange(first, first + len(blocks)) for first, blocks in self._updates])
        ids = np.concatenate([np.array(blocks, np.int32) for _, blocks in self._updates])
        self._updates.clear()
        return entries, ids

    def _apply(self, entries: Tensor, ids: Tensor) -> None:
        if len(entries):
            self.block_tables.view(-1).index_copy_(0, entries, ids)


def _laid_out(arrays: StepArrays, decode: Sequence[int]) -> list[NDArray[Any]]:
    """What goes up of a step, with decode rows of the slots `decode`: slots of its rows, where their tokens begin, ids
    (~slot for the latest token of a slot), positions, places in the cache, lengths of the rows, and of the prompts of
    all tokens."""
    ends = np.arange(len(arrays.row_slots) + 1) if arrays.offsets is None else arrays.offsets
    return [
        arrays.row_slots.astype(np.int32),
        ends.astype(np.int32),
        np.concatenate([~np.array(decode, np.int64), arrays.known]),
        arrays.positions,
        arrays.slot_mapping,
        arrays.kv_lens.astype(np.int32),
        arrays.prompt_lens,
    ]
