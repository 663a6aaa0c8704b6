"""MixedSize: the size of a captured step with prompt tokens, and the layout of a step in it.

    tokens   | decode rows' | prompts'                 | padding         |
    rows     | decode rows, absent ones | prompts, a row of the padding, empty ones |

The kernels of a graph have fixed grids, so row counts are fixed too. An absent decode row has no token and a kv_len of
-1; the padding tokens belong to a row with a kv_len of 0, which reads no key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncllm.agent.device.graphs import LARGEST_BATCH
from asyncllm.agent.step.slots import StepArrays, StepRows, numpy_type
from asyncllm.layers.step_inputs import INPUT_IDS, KV_LENS, POSITIONS, Column, places_of

__all__ = ["LARGEST_MIXED", "MixedSize", "empty_step", "mixed_sizes", "padded"]

_TOKENS = (32, 64, 128, 160, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
"""Token counts of captured steps. Larger steps take longer than their launches. Sizes that take as long as the next one
are left out: on an H200 the products of a layer of Llama-3-8B take 137 us for 96 tokens and 136 for 128, 193 for 224
and 186 for 256, 391 for 576 and 394 for 640."""

LARGEST_MIXED = _TOKENS[-1]
"""Tokens of the largest captured step. Steps that decode streamed answers are no larger, because each answer waits for
its next token: 26 ms on an H200 for Llama-3-8B."""

_FEW_ROWS = 16
"""Number of decode rows up to which decode attention divides its work differently (`kernels.triton.attention.plan`)."""

_PROMPTS = 32
"""Maximum number of prompts in a captured step. Each adds a block per KV head to the grid of attention, even if
absent."""


class MixedSize(NamedTuple):
    """Numbers of tokens, decode rows and prompt rows; one of the latter is for padding."""

    tokens: int
    decode_rows: int
    prompts: int

    @property
    def rows(self) -> int:
        """Number of rows of both kinds."""
        return self.decode_rows + self.prompts

    def holds(self, arrays: StepArrays) -> bool:
        """Return whether the step fits."""
        num_prompts = len(arrays.row_slots) - arrays.num_decode
        return arrays.num_tokens <= self.tokens and arrays.num_decode <= self.decode_rows and num_prompts < self.prompts


def mixed_sizes(max_batch_size: int, max_tokens: int) -> list[MixedSize]:
    """Return the sizes for up to `max_batch_size` decode rows and `max_tokens` tokens, from small to large."""
    largest = min(max_batch_size, LARGEST_BATCH)
    rows = [largest] if largest <= _FEW_ROWS else [_FEW_ROWS, largest]
    tokens = [size for size in _TOKENS if size < max_tokens + _TOKENS[0]]
    return [MixedSize(size, max_rows, _PROMPTS + 1) for size in tokens for max_rows in rows]


def empty_step(columns: Sequence[Column] = (), num_groups: int = 1) -> StepArrays:
    """Return a step without rows, with `num_groups` block groups and the model's `columns`. `padded` turns it into a
    step of padding only."""
    none = np.zeros(0, np.int64)
    return StepArrays(
        row_slots=none,
        offsets=np.zeros(1, np.int64),
        columns={
            column: np.zeros(0, numpy_type(column))
            for column in (INPUT_IDS, POSITIONS, KV_LENS, *map(places_of, range(num_groups)), *columns)
        },
        num_decode=0,
        max_q_len=0,
        rows=StepRows(none, none, none, none, []),
    )


def padded(arrays: StepArrays, size: MixedSize) -> StepArrays:
    """Return the step laid out in `size`, which holds it. `rows` stays unchanged."""
    assert arrays.offsets is not None
    num_tokens, num_decode = arrays.num_tokens, arrays.num_decode
    absent = size.decode_rows - num_decode
    empty = size.prompts - (len(arrays.row_slots) - num_decode)

    def rows(values: NDArray[Any], of_absent: int, of_empty: int) -> NDArray[Any]:
        between = np.full(absent, of_absent, values.dtype)
        after = np.full(empty, of_empty, values.dtype)
        return np.concatenate([values[:num_decode], between, values[num_decode:], after])

    def filled(column: Column, values: NDArray[Any]) -> NDArray[Any]:
        if column.per == "row":
            return rows(values, column.padding if column.absent is None else column.absent, column.padding)
        return np.concatenate([values, np.full(size.tokens - num_tokens, column.padding, values.dtype)])

    ends = rows(arrays.offsets[1:], num_decode, size.tokens)
    return dataclasses.replace(
        arrays,
        row_slots=rows(arrays.row_slots, 0, 0),
        offsets=np.concatenate([np.zeros(1, np.int64), ends]),
        columns={column: filled(column, values) for column, values in arrays.columns.items()},
        num_decode=size.decode_rows,
        max_q_len=size.tokens,
    )
