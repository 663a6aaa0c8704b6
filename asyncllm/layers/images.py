"""Which tokens of a step are those of images, and the merge of their features into the embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncllm.layers.layer import Layer
from asyncllm.layers.step_inputs import Column, StepInputs
from asyncllm.protocol import Batch, PrefillRow, PromptImage

__all__ = ["IMAGE_ROWS", "ImageMerge", "image_parts"]


def image_parts(row: PrefillRow) -> Iterator[tuple[PromptImage, int, int]]:
    """Yield the images that reach into a chunk, each with which of its tokens, from one to before the other, are
    there."""
    end = row.position + len(row.tokens)
    for image in row.images:
        first, last = max(row.position, image.position), min(end, image.end)
        if first < last:
            yield image, first - image.position, last - image.position


def _image_rows(batch: Batch, positions: NDArray[Any]) -> NDArray[Any]:
    rows = np.full(len(positions), -1, np.int64)
    start, count = len(batch.decode), 0
    for row in batch.prefill:
        for image, first, last in image_parts(row):
            place = start + image.position + first - row.position
            rows[place : place + last - first] = np.arange(count, count + last - first)
            count += last - first
        start += len(row.tokens)
    return rows


IMAGE_ROWS = Column(name="image_rows", dtype=torch.int64, per="token", padding=-1, of_step=_image_rows)
"""The row of the step's image features that a token's embedding is; -1: none, it is text."""


class ImageMerge(Layer):
    """Puts features in the place of the embeddings of images' tokens."""

    columns = (IMAGE_ROWS,)

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        """x [T, hidden] -> the same; a step without images passes as it is."""
        if step.image_features is None:
            return x
        rows = step[IMAGE_ROWS]
        features = step.image_features[:, : x.shape[1]].index_select(0, rows.clamp(min=0))
        return torch.where((rows >= 0)[:, None], features, x)

    def behind(self, layer: int, residual: Tensor, step: StepInputs) -> Tensor:
        """Add what features have for the outputs of `layer`, if they go on behind the embeddings' width."""
        features, size = step.image_features, residual.shape[1]
        if features is None or features.shape[1] < (layer + 2) * size:
            return residual
        rows = step[IMAGE_ROWS]
        own = features[:, (layer + 1) * size : (layer + 2) * size].index_select(0, rows.clamp(min=0))
        return residual + own * (rows >= 0)[:, None]
