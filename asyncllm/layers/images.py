"""Which tokens of a step are those of images, and the merge of their features into the embeddings."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncllm.layers.layer import Layer
from asyncllm.layers.step_inputs import Column, StepInputs
from asyncllm.prompt_image import PromptImage
from asyncllm.protocol import Batch, PrefillRow

__all__ = ["IMAGE_ROWS", "ImageMerge", "ImagePart", "ImageRows", "image_parts", "image_tokens"]


class ImagePart(NamedTuple):
    """Tokens of a chunk that are an image's, one after the other."""

    image: PromptImage
    position: int
    """Of the first, absolute."""
    first: int
    """The first one's row among the image's features, and"""
    last: int
    """the row behind the last one's; of `PromptImage.seen_at` this"""
    place: int
    """number of a place."""


def image_parts(row: PrefillRow) -> Iterator[ImagePart]:
    """Yield what images have in a chunk."""
    end = row.position + len(row.tokens)
    for image in row.images:
        rows = 0
        for place, (start, stop) in enumerate(image.spans or ((0, image.length),)):
            start, stop = image.position + start, image.position + stop
            first, last = max(row.position, start), min(end, stop)
            if first < last:
                yield ImagePart(image, first, rows + first - start, rows + last - start, place)
            rows += 0 if image.apart else stop - start


def _image_rows(batch: Batch, positions: NDArray[Any]) -> NDArray[Any]:
    rows = np.full(len(positions), -1, np.int64)
    start, count = len(batch.decode), 0
    for row in batch.prefill:
        for part in image_parts(row):
            place, length = start + part.position - row.position, part.last - part.first
            rows[place : place + length] = np.arange(count, count + length)
            count += length
        start += len(row.tokens)
    return rows


IMAGE_ROWS = Column(name="image_rows", dtype=torch.int64, per="token", padding=-1, of_step=_image_rows)
"""The row of the step's image features that a token's embedding is; -1: none, it is text."""


def image_tokens(step: StepInputs) -> Tensor | None:
    """Return the tokens of a step that are images' [F] int64; None where the host does not know how many they are."""
    count = step.num_image_tokens
    if step.image_tokens is None and count is not None:
        rows = step[IMAGE_ROWS]
        # Text goes to a place behind the last one.
        tokens = rows.new_empty(count + 1)
        tokens[torch.where(rows >= 0, rows, count)] = torch.arange(len(rows), device=rows.device)
        step.image_tokens = tokens[:count]
    return step.image_tokens


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
        # Other tokens take nothing, of what may be left from an earlier step and be no number.
        return torch.where((rows >= 0)[:, None], residual + own, residual)


class ImageRows(Layer):
    """What the tokens of images have of their own in one layer, in steps that have any."""

    columns: tuple[Column, ...]
    """What it reads of a step."""

    @abstractmethod
    def apply_to(self, y: Tensor, x: Tensor, step: StepInputs) -> Tensor:
        """Return the products y [T, out] of x [T, in] with those of images' tokens as they are to be, in y's memory or
        new. Ahead of the ranks' sum."""
