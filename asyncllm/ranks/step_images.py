"""Images of a step sent to ranks. Their pixels are sent ahead of it, only for images that its chunks reach into, and
only if the ranks do not have them from an earlier step.

Other images of a prompt are sent without pixels, for the positions after them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from asyncllm.prompt_image import PromptImage
from asyncllm.protocol import Batch, PrefillRow
from asyncllm.ranks.messages import TakePixels

__all__ = ["LatestPixels", "with_pixels", "without_pixels"]

MAX_BYTES = 2**27
"""Enough for four images of 13 tiles of 448 x 448 pixels, and a hundred of one."""

_KEPT = -1
"""Replaces the number of pixels: the ranks have them already."""


class LatestPixels:
    """The images sent most recently. The engine's process and each rank have one, and look up the same images in the
    same order, so their contents agree."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()
        """By digest, most recent last: pixels and their bytes. The engine's process needs no pixels."""
        self._num_bytes = 0

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._kept

    def look_up(self, digest: bytes) -> Any:
        """Return the pixels of a stored image."""
        self._kept.move_to_end(digest)
        return self._kept[digest][0]

    def add(self, digest: bytes, pixels: Any, num_bytes: int) -> None:
        """Store a new image."""
        self._kept[digest] = pixels, num_bytes
        self._num_bytes += num_bytes

    def trim(self) -> None:
        """Forget the oldest images at the end of each step, while there are too many bytes."""
        while self._num_bytes > self._max_bytes:
            _, (_, num_bytes) = self._kept.popitem(last=False)
            self._num_bytes -= num_bytes


def without_pixels(batch: Batch, latest: LatestPixels) -> tuple[Batch, list[Any]]:
    """Return a step whose images have a number instead of their pixels, and the pixels to send ahead, by number."""
    if not any(row.images for row in batch.prefill):
        return batch, []
    numbers: dict[bytes, int] = {}
    pixels: list[Any] = []

    def stripped(image: PromptImage, row: PrefillRow) -> PromptImage:
        if image.end <= row.position or image.position >= row.position + len(row.tokens):
            return msgspec.structs.replace(image, pixels=None)
        if image.digest in latest:
            latest.look_up(image.digest)
        else:
            latest.add(image.digest, None, image.pixels.nbytes)
            numbers[image.digest] = len(pixels)
            pixels.append(image.pixels)
        return msgspec.structs.replace(image, pixels=numbers.get(image.digest, _KEPT))

    rows = [
        msgspec.structs.replace(row, images=[stripped(image, row) for image in row.images]) if row.images else row
        for row in batch.prefill
    ]
    latest.trim()
    return msgspec.structs.replace(batch, prefill=rows), pixels


def with_pixels(batch: Batch, taken: Sequence[TakePixels], latest: LatestPixels) -> Batch:
    """Return a step of `without_pixels` with the pixels that arrived ahead of it or earlier."""
    if not any(row.images for row in batch.prefill):
        return batch

    def filled(image: PromptImage) -> PromptImage:
        if image.pixels is None:
            return image
        if image.digest not in latest:
            sent = taken[image.pixels]
            array = np.frombuffer(sent.values, np.float32).reshape(sent.shape)
            latest.add(image.digest, array, array.nbytes)
        return msgspec.structs.replace(image, pixels=latest.look_up(image.digest))

    rows = [
        msgspec.structs.replace(row, images=[filled(image) for image in row.images]) if row.images else row
        for row in batch.prefill
    ]
    latest.trim()
    return msgspec.structs.replace(batch, prefill=rows)
