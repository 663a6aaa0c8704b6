"""Images of a step on its way to ranks: their pixels go ahead of it, and only those that its chunks reach into.

Other images of a prompt are there for the positions behind them alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from asyncllm.protocol import Batch, PrefillRow, PromptImage
from asyncllm.ranks.messages import TakePixels

__all__ = ["with_pixels", "without_pixels"]


def without_pixels(batch: Batch) -> tuple[Batch, list[Any]]:
    """Return a step whose images have the number of their pixels in place of these, and the pixels in that order."""
    if not any(row.images for row in batch.prefill):
        return batch, []
    numbers: dict[bytes, int] = {}
    pixels: list[Any] = []

    def stripped(image: PromptImage, row: PrefillRow) -> PromptImage:
        if image.end <= row.position or image.position >= row.position + len(row.tokens):
            return msgspec.structs.replace(image, pixels=None)
        if image.digest not in numbers:
            numbers[image.digest] = len(pixels)
            pixels.append(image.pixels)
        return msgspec.structs.replace(image, pixels=numbers[image.digest])

    rows = [
        msgspec.structs.replace(row, images=[stripped(image, row) for image in row.images]) if row.images else row
        for row in batch.prefill
    ]
    return msgspec.structs.replace(batch, prefill=rows), pixels


def with_pixels(batch: Batch, taken: Sequence[TakePixels]) -> Batch:
    """Return a step of `without_pixels` with the pixels that have arrived ahead of it."""
    if not taken:
        return batch
    arrays = [np.frombuffer(each.values, np.float32).reshape(each.shape) for each in taken]

    def filled(image: PromptImage) -> PromptImage:
        return image if image.pixels is None else msgspec.structs.replace(image, pixels=arrays[image.pixels])

    rows = [
        msgspec.structs.replace(row, images=[filled(image) for image in row.images]) if row.images else row
        for row in batch.prefill
    ]
    return msgspec.structs.replace(batch, prefill=rows)
