"""SlotTables: the state of every slot on the device, and the step inputs made from it.

Block tables and last tokens are on the device, one row per slot. A captured decode step uploads only its slots,
positions, new blocks and the model's columns. Any other step uploads more, but also in one copy.
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
from asyncllm.agent.device.streams import offsets, upload_together, views
from asyncllm.agent.step.graph_sizes import MixedSize, empty_step, padded
from asyncllm.agent.step.slots import SlotArrays, StepArrays, numpy_type
from asyncllm.kernels import DecodeInputs
from asyncllm.layers.step_inputs import (
    INPUT_IDS,
    KV_LENS,
    POSITIONS,
    Column,
    GroupTables,
    SampledRows,
    StepInputs,
    places_of,
)
from asyncllm.protocol import Batch, SlotStart

__all__ = ["SlotTables", "StepTensors"]

_MORE_BYTES = 2**16
"""Bytes for a fixed-size step's additional uploads: 16 per sampled row, 12 per new block."""


@dataclass(slots=True)
class StepTensors:
    """A step on the device, and the host's arrays for it."""

    arrays: StepArrays
    size: MixedSize | None
    """The captured size in which `inputs` is laid out; None if the step is launched kernel by kernel."""
    inputs: StepInputs
    slots: Tensor
    """[R] int32: slots of the rows that are sampled from."""
    positions: Tensor
    """[R] int32: positions of the tokens to be drawn."""
    sampled: SampledRows | None
    """The tokens whose hidden states are needed: the R tokens that are sampled from, then L that are only pooled. None
    if they are all tokens, in order. There is at least one; if none is needed, its result is not read."""

    @property
    def prefill_offsets(self) -> Tensor:
        """[P + 1] int32: offsets of the tokens of the prefill rows; padding rows may follow."""
        return self.inputs.q_offsets[self.inputs.num_decode :]


class SlotTables:
    """Written by the thread that launches steps; its tensors also by the kernels of the steps, in order."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_rows: int,
        max_position: int,
        block_size: int,
        batch_invariant: bool,
        device: torch.device,
        columns: Sequence[Column] = (),
        mixed: Sequence[MixedSize] = (),
        layer_groups: Sequence[int] = (),
    ) -> None:
        """`max_rows`: maximum rows of a decode step, including padding. `columns`: columns of the model's layers.
        `mixed`: sizes of captured steps with prompt tokens, in ascending order. `layer_groups`: the block group of each
        layer; empty if there is only one."""
        self._layer_groups = layer_groups
        self._num_groups = num_groups = 1 + max(layer_groups, default=0)
        self._slots = SlotArrays(num_slots, max_position, block_size, columns, num_groups=num_groups)
        self._block_size = block_size
        self._columns = columns
        self._batch_invariant = batch_invariant
        self.caches: Sequence[Any] = ()
        """The cache of each layer. The agent sets it when it allocates the pool."""
        self._device = device
        self._updates: list[tuple[int, list[int]]] = []
        """(entry of the flat block tables, block ids to write from there on) not yet on the device."""
        # One entry more than a row can own, because kernels read one page ahead.
        self._width = self._slots.max_blocks + 1
        self.block_tables = torch.zeros(num_groups, num_slots, self._width, dtype=torch.int32, device=device)
        self._group_tables = list(self.block_tables)
        self.last_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._row_numbers = torch.arange(max_rows + 1, dtype=torch.int32, device=device)

        self._decode_rows: list[NDArray[Any]] = [
            np.full(max_rows, -1, np.int32),
            np.zeros(max_rows, np.int32),
            *(np.full(max_rows, column.padding, numpy_type(column)) for column in columns),
        ]
        """Slots, positions and the model's columns of a captured decode step, on the host."""
        max_new_blocks = num_groups * max_rows
        uploads: list[NDArray[Any]] = [
            *self._decode_rows,
            np.zeros(max_new_blocks, np.int64),
            np.zeros(max_new_blocks, np.int32),
        ]
        self._decode_bytes = torch.zeros(offsets(uploads)[-1], dtype=torch.uint8, device=device)
        self.decode_slots, self.decode_positions, *more = views(self._decode_rows, self._decode_bytes)
        """[max_rows] int32 each; -1 is the slot of a padding row."""
        self._decode_more = dict(zip(columns, more, strict=True))
        self._decode_inputs = [DecodeInputs.zeros(max_rows, self._width, device) for _ in range(num_groups)]
        """By block group. Tensors that do not depend on the group are read from the first."""

        self._mixed_sizes = mixed
        self._mixed_bytes = torch.zeros(0, dtype=torch.uint8, device=device)
        """The fixed memory for uploads of captured steps; each size divides it differently."""
        if mixed:
            num_bytes = offsets(_arrays_to_upload(self._empty(mixed[-1])))[-1] + _MORE_BYTES
            self._mixed_bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            self._mixed_tokens = torch.zeros(mixed[-1].tokens, dtype=torch.int64, device=device)
            self._mixed_tables = torch.zeros(num_groups, mixed[-1].rows, self._width, dtype=torch.int32, device=device)

    def start(self, start: SlotStart) -> None:
        """Assign the slot to a new sequence."""
        self._slots.start(start)

    def write_blocks(self, slot: int, group: int, index: int, blocks: list[int]) -> None:
        """Write block ids into the slot's block table of a group, from entry `index` on. The next step uploads
        them."""
        self._slots.write_blocks(slot, group, index, blocks)
        row = group * self.block_tables.shape[1] + slot
        self._updates.append((row * self._width + index, blocks))

    def fits(self, batch: Batch, num_rows: int) -> bool:
        """Return whether the batch is a decode step that `advance_decode` can upload in `num_rows` rows."""
        if batch.prefill or batch.copies or not 0 < len(batch.decode) <= num_rows:
            return False
        return sum(len(blocks) for _, blocks in self._updates) <= num_rows * self._num_groups

    def longest_context(self, batch: Batch) -> int:
        """Return the number of tokens of the longest context of a step that has not been uploaded yet."""
        return self._slots.longest_context(batch)

    def advance_decode(self, batch: Batch) -> StepArrays:
        """Upload a decode step to the fixed tensors that `decode_inputs` reads."""
        arrays = self._slots.advance(batch)
        num_rows = len(batch.decode)
        current = (
            arrays.row_slots,
            arrays.columns[POSITIONS],
            *(arrays.columns[column] for column in self._columns),
        )
        paddings = (-1, 0, *(column.padding for column in self._columns))
        for fixed, values, padding in zip(self._decode_rows, current, paddings, strict=True):
            fixed[:num_rows] = values
            fixed[num_rows:] = padding
        *_, entries, ids = upload_together(
            [*self._decode_rows, *self._take_updates()], self._device, into=self._decode_bytes
        )
        self._apply(entries, ids)
        return arrays

    def decode_inputs(self, num_rows: int, *, adapted: bool) -> StepInputs:
        """Return the decode step of the first `num_rows` fixed rows, built only from device state so that it can be
        captured. `adapted`: some rows may have adapters.

        Launches the kernel that gathers its inputs.
        """
        slots, positions = self.decode_slots[:num_rows], self.decode_positions[:num_rows]
        groups = [DecodeInputs(*(tensor[:num_rows] for tensor in inputs)) for inputs in self._decode_inputs]
        for inputs, block_tables in zip(groups, self.block_tables, strict=True):
            kernels.prepare_decode(slots, positions, self.last_tokens, block_tables, self._block_size, inputs)
        fixed, *others = groups
        return StepInputs(
            input_ids=fixed.input_ids,
            positions=fixed.positions,
            places=fixed.places,
            num_decode=num_rows,
            q_offsets=self._row_numbers[: num_rows + 1],
            kv_lens=fixed.kv_lens,
            block_tables=fixed.block_tables,
            max_q_len=1,
            caches=self.caches,
            more_groups=[GroupTables(inputs.places, inputs.block_tables) for inputs in others],
            layer_groups=self._layer_groups,
            more={column: values[:num_rows] for column, values in self._decode_more.items()},
            adapted=adapted,
            batch_invariant=self._batch_invariant,
        )

    def advance(self, batch: Batch, *, captured: bool = False) -> StepTensors:
        """Upload any step with at least one row.

        `captured`: into the fixed tensors of `mixed_inputs`, if the step has prompt tokens and fits one of the sizes.
        """
        arrays = self._slots.advance(batch)
        rows = arrays.rows
        sampled_columns = self._sampled_columns(arrays)
        additional = [*sampled_columns, *(self._take_updates() if self._updates else ())]
        size = self._size_for(arrays, additional) if captured else None
        placed = arrays if size is None else padded(arrays, size)
        into = None if size is None else self._mixed_bytes
        shared = _arrays_to_upload(placed)
        uploaded = upload_together([*shared, *additional], self._device, into)
        on_device = uploaded[len(shared) :]
        if len(additional) > len(sampled_columns):
            self._apply(*on_device[len(sampled_columns) :])
        if size is None:
            input_ids, block_tables = self._gather(uploaded, placed)
        else:
            input_ids, block_tables = self._mixed_buffers(size)
        inputs = self._inputs_of(uploaded, placed, input_ids, block_tables, adapted=arrays.adapted)
        inputs.contexts = placed.columns[KV_LENS]
        if size is None:
            inputs.prompts = arrays.prompts
        if not sampled_columns:
            return StepTensors(arrays, size, inputs, uploaded[0], inputs.kv_lens, sampled=None)
        slots, lens = on_device[:2]
        sampled = self._sampled_rows(*on_device[: len(sampled_columns)], adapted=arrays.adapted)
        return StepTensors(arrays, size, inputs, slots[: len(rows.slots)], lens[: len(rows.slots)], sampled)

    def _sampled_columns(self, arrays: StepArrays) -> list[NDArray[Any]]:
        """Return, for the tokens whose hidden states are needed: slots, lengths of their rows, indices among the
        tokens, and the values of the model's columns. Empty if they are all tokens, because the step's own arrays hold
        these."""
        rows, kv_lens = arrays.rows, arrays.columns[KV_LENS]
        if rows.indices is None:
            return []
        # A step that samples nothing uses its first token instead.
        numbers, indices = (values if len(values) else np.zeros(1, np.int64) for values in (rows.numbers, rows.indices))
        more = (arrays.columns[column][indices if column.per == "token" else numbers] for column in self._columns)
        return [arrays.row_slots[numbers].astype(np.int32), kv_lens[numbers], indices, *more]

    def _size_for(self, arrays: StepArrays, additional: list[NDArray[Any]]) -> MixedSize | None:
        """Return the smallest size that holds a step and its additional uploads, or None."""
        if arrays.offsets is None or offsets(additional)[-1] > _MORE_BYTES:
            return None
        return next((size for size in self._mixed_sizes if size.holds(arrays)), None)

    def _empty(self, size: MixedSize) -> StepArrays:
        return padded(empty_step(self._columns, self._num_groups), size)

    def empty_mixed(self, size: MixedSize) -> None:
        """Fill the fixed tensors with a step of padding only, so that kernels that read them can be launched."""
        upload_together(_arrays_to_upload(self._empty(size)), self._device, self._mixed_bytes)

    def mixed_inputs(self, size: MixedSize, *, adapted: bool) -> StepInputs:
        """Return the last uploaded step, in this size, built only from device state so that it can be captured.
        `adapted`: some of its tokens may have adapters.

        Launches the kernels that gather its inputs.
        """
        placed = self._empty(size)
        shared = views(_arrays_to_upload(placed), self._mixed_bytes)
        input_ids, block_tables = self._mixed_buffers(size)
        self._gather(shared, placed, input_ids, block_tables)
        return self._inputs_of(shared, placed, input_ids, block_tables, adapted=adapted)

    def _inputs_of(
        self,
        shared: Sequence[Tensor],
        arrays: StepArrays,
        input_ids: Tensor,
        block_tables: Sequence[Tensor],
        *,
        adapted: bool,
    ) -> StepInputs:
        """Return the inputs of a step from its tensors on the device, those of `_arrays_to_upload` and `_gather`."""
        _, q_offsets, *values = shared
        columns = dict(zip(arrays.columns, values, strict=False))
        groups = [GroupTables(columns[places_of(group)], tables) for group, tables in enumerate(block_tables)]
        return StepInputs(
            input_ids=input_ids,
            positions=columns[POSITIONS],
            places=groups[0].places,
            num_decode=arrays.num_decode,
            q_offsets=q_offsets,
            kv_lens=columns[KV_LENS],
            block_tables=groups[0].block_tables,
            max_q_len=arrays.max_q_len,
            caches=self.caches,
            more_groups=groups[1:],
            layer_groups=self._layer_groups,
            more={column: columns[column] for column in self._columns},
            adapted=adapted,
            batch_invariant=self._batch_invariant,
        )

    def _mixed_buffers(self, size: MixedSize) -> tuple[Tensor, list[Tensor]]:
        """Return where captured steps of a size gather their input ids, and their block tables by group."""
        return self._mixed_tokens[: size.tokens], [tables[: size.rows] for tables in self._mixed_tables]

    def _gather(
        self,
        shared: Sequence[Tensor],
        arrays: StepArrays,
        input_ids: Tensor | None = None,
        block_tables: Sequence[Tensor | None] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """Return a step's input ids, and its block tables by group, from the state of the slots, in the given tensors
        if any. The step has been uploaded as `_arrays_to_upload`."""
        row_slots, _, *values = shared
        outputs = block_tables or [None] * self._num_groups
        tables_of_rows = [
            torch.index_select(tables, 0, row_slots, out=out)
            for tables, out in zip(self._group_tables, outputs, strict=True)
        ]
        if arrays.offsets is None:
            return torch.index_select(self.last_tokens, 0, row_slots, out=input_ids), tables_of_rows
        ids = values[list(arrays.columns).index(INPUT_IDS)]
        latest = self.last_tokens.index_select(0, ids.bitwise_not().clamp_(min=0))
        return torch.where(ids < 0, latest, ids, out=input_ids), tables_of_rows

    def _sampled_rows(
        self, slots: Tensor, kv_lens: Tensor, indices: Tensor, *more: Tensor, adapted: bool
    ) -> SampledRows:
        """Return the step's tokens at `indices` [R], of `slots` [R] int32, as rows of `kv_lens` [R] int32 tokens."""
        num_rows = len(indices)
        groups = [GroupTables(indices, tables.index_select(0, slots)) for tables in self.block_tables]
        inputs = StepInputs(
            input_ids=indices,
            positions=indices,
            places=indices,
            num_decode=num_rows,
            q_offsets=self._row_numbers[: num_rows + 1],
            kv_lens=kv_lens,
            block_tables=groups[0].block_tables,
            max_q_len=1,
            caches=self.caches,
            more_groups=groups[1:],
            layer_groups=self._layer_groups,
            more=dict(zip(self._columns, more, strict=True)),
            adapted=adapted,
            batch_invariant=self._batch_invariant,
        )
        return SampledRows(indices=indices, inputs=inputs)

    def flush(self) -> None:
        """Upload new blocks without a step."""
        if self._updates:
            self._apply(*upload_together(self._take_updates(), self._device))

    def forget_updates(self) -> None:
        """Forget the new blocks of a step that is not launched, because its rows and their blocks are lost."""
        self._updates.clear()

    def _take_updates(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return the changed entries of the flat block tables, and the block ids that belong there."""
        if not self._updates:
            return _NO_ENTRIES, _NO_BLOCKS
        entries = np.concatenate([np.arange(first, first + len(blocks)) for first, blocks in self._updates])
        ids = np.concatenate([np.array(blocks, np.int32) for _, blocks in self._updates])
        self._updates.clear()
        return entries, ids

    def _apply(self, entries: Tensor, ids: Tensor) -> None:
        if len(entries):
            self.block_tables.view(-1).index_copy_(0, entries, ids)


_NO_ENTRIES, _NO_BLOCKS = np.zeros(0, np.int64), np.zeros(0, np.int32)


def _arrays_to_upload(arrays: StepArrays) -> list[NDArray[Any]]:
    """Return the arrays of a step to upload, in this order: slots of its rows, offsets of their tokens, its columns."""
    if arrays.offsets is None:
        ends = np.arange(len(arrays.row_slots) + 1, dtype=np.int32)
    else:
        ends = arrays.offsets.astype(np.int32)
    return [arrays.row_slots.astype(np.int32), ends, *arrays.columns.values()]
