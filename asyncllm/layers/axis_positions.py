"""Positions in several dimensions: text advances along all axes alike, an image's tokens along rows and columns.

They differ from a token's index by the shift of the images before it and, within an image, by the offset of the token
in it. If an image's tokens share a position, all axes are alike.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncllm.layers.step_inputs import Column, StepInputs
from asyncllm.prompt_image import PromptImage
from asyncllm.protocol import Batch, PrefillRow

__all__ = ["AXIS_COLUMNS", "axis_positions"]

_SHIFT = Column(
    name="position_shift", dtype=torch.int64, per="token", padding=0, of_slot=lambda start: start.position_shift
)
"""The total shift of all images of a token's sequence, which applies to generated tokens."""


def _moved(axis: int, batch: Batch, positions: NDArray[Any]) -> NDArray[Any]:
    """Return the offsets of prompt tokens from the positions that `_SHIFT` gives, along an axis: 0 time, 1 rows, 2
    columns."""
    moved = np.zeros(len(positions), np.int64)
    start = len(batch.decode)
    for row in batch.prefill:
        end = start + len(row.tokens)
        if row.images:
            moved[start:end] = _moved_in_row(axis, row, positions[start:end])
        start = end
    return moved


def _moved_in_row(axis: int, row: PrefillRow, positions: NDArray[Any]) -> NDArray[Any]:
    total = sum(image.shift for image in row.images)
    moved = np.full(len(positions), -total, np.int64)
    before = 0
    for image in row.images:
        if image.grid is None and not image.shares_position:
            continue
        spans = image.spans or ((0, image.length),)
        for start, stop in spans:
            start, stop = image.position + start, image.position + stop
            inside = (positions >= start) & (positions < stop)
            index = positions[inside] - start
            along = _along(axis, index, image)
            moved[inside] = before - total + along - index
            before += image.shift // len(spans)
            moved[positions >= stop] = before - total
    return moved


def _along(axis: int, index: NDArray[Any], image: PromptImage) -> NDArray[Any]:
    """Return the offsets along an axis of the tokens of an image or video, from their indices in it."""
    if image.grid is None:
        along: NDArray[Any] = np.minimum(index, 1) + (index == image.length - 1)
        return along
    rows, columns = image.grid
    if axis == 0:
        return (index // (rows * columns) * image.interval).astype(np.int64)
    return index % (rows * columns) // columns if axis == 1 else index % columns


def _column(axis: int, name: str) -> Column:
    values: Callable[[Batch, NDArray[Any]], NDArray[Any]] = partial(_moved, axis)
    return Column(name=f"moved_along_{name}", dtype=torch.int64, per="token", padding=0, of_step=values)


_MOVED = tuple(_column(axis, name) for axis, name in enumerate(("time", "rows", "columns")))

AXIS_COLUMNS = (_SHIFT, *_MOVED)


def axis_positions(step: StepInputs) -> Tensor:
    """Return the tokens' positions along time, rows and columns: [3, T] int64."""
    usual = step.positions + step[_SHIFT]
    return torch.stack([usual + step[column] for column in _MOVED])
