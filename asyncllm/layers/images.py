"""Which tokens of a step belong to images, and the merge of image features into the embeddings."""

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
    """Consecutive tokens of a chunk that belong to one image."""

    image: PromptImage
    position: int
    """Absolute position of the first token."""
    first: int
    """Row of the first token among the image's features (those of `PromptImage.at_placeholder`)."""
    last: int
    """Row after that of the last token."""
    placeholder: int
    """Index of the placeholder that the tokens belong to."""


def image_parts(row: PrefillRow) -> Iterator[ImagePart]:
    """Yield the parts of images in a chunk."""
    end = row.position + len(row.tokens)
    for image in row.images:
        rows = 0
        for placeholder, (start, stop) in enumerate(image.spans or ((0, image.length),)):
            start, stop = image.position + start, image.position + stop
            first, last = max(row.position, start), min(end, stop)
            if first < last:
                yield ImagePart(image, first, rows + first - start, rows + last - start, placeholder)
            rows += 0 if image.separate else stop - start


def _image_rows(batch: Batch, positions: NDArray[Any]) -> NDArray[Any]:
    rows = np.full(len(positions), -1, np.int64)
    start, count = len(batch.decode), 0
    for row in batch.prefill:
        for part in image_parts(row):
            first, length = start + part.position - row.position, part.last - part.first
            rows[first : first + length] = np.arange(count, count + length)
            count += length
        start += len(row.tokens)
    return rows


IMAGE_ROWS = Column(name="image_rows", dtype=torch.int64, per="token", padding=-1, of_step=_image_rows)
"""The row of the step's image features that is a token's embedding; -1 for text."""


def image_tokens(step: StepInputs) -> Tensor | None:
    """Return the image tokens of a step [F] int64; None if the host does not know their number."""
    count = step.num_image_tokens
    if step.image_tokens is None and count is not None:
        rows = step[IMAGE_ROWS]
        # Text goes to a row after the last one.
        tokens = rows.new_empty(count + 1)
        tokens[torch.where(rows >= 0, rows, count)] = torch.arange(len(rows), device=rows.device)
        step.image_tokens = tokens[:count]
    return step.image_tokens


class ImageMerge(Layer):
    """Replaces the embeddings of image tokens by features."""

    columns = (IMAGE_ROWS,)

    def forward(self, x: Tensor, step: StepInputs) -> Tensor:
        """x [T, hidden] -> [T, hidden]; a step without images is unchanged."""
        if step.image_features is None:
            return x
        rows = step[IMAGE_ROWS]
        features = step.image_features[:, : x.shape[1]].index_select(0, rows.clamp(min=0))
        return torch.where((rows >= 0)[:, None], features, x)

    def add_after_layer(self, layer: int, residual: Tensor, step: StepInputs) -> Tensor:
        """Add the features for the output of `layer`, if features are wider than the embeddings."""
        features, size = step.image_features, residual.shape[1]
        if features is None or features.shape[1] < (layer + 2) * size:
            return residual
        rows = step[IMAGE_ROWS]
        own = features[:, (layer + 1) * size : (layer + 2) * size].index_select(0, rows.clamp(min=0))
        # Other tokens add nothing, because rows left from an earlier step may be nan.
        return torch.where((rows >= 0)[:, None], residual + own, residual)


class ImageRows(Layer):
    """Changes image tokens' products in one layer, in steps that have images."""

    columns: tuple[Column, ...]
    """The step columns that it reads."""

    @abstractmethod
    def apply_to(self, y: Tensor, x: Tensor, step: StepInputs) -> Tensor:
        """Return the products y [T, out] of x [T, in] with those of image tokens replaced, in y's memory or new. Runs
        before the sum over ranks."""
