"""Tiles for Phi-4-multimodal: the image at about its native size, or at the maximum number of tiles; white padding is
masked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from PIL import Image

from asyncllm.errors import InvalidMessage
from asyncllm.prompt_image import PromptImage
from asyncllm.vl.processing.hd import WHITE, HdProcessor
from asyncllm.vl.processing.pictures import resized
from asyncllm.vl.processing.settings import PictureSettings
from asyncllm.vl.processing.tiles import tile_grid

__all__ = ["Phi4Processor"]

MIN_SIDE = 10
"""Minimum number of pixels along a side of a scaled image."""


class Phi4Processor(HdProcessor):
    """Pixels [1 + rows * columns, 3, side, side]: the downscaled whole image, then its tiles, whose upper left corner
    the image fills."""

    adapter_name = "vision"

    def __init__(self, settings: PictureSettings, *, patch: int, **rest: Any) -> None:
        """`patch`: the side of a patch in pixels."""
        super().__init__(settings, **rest)
        self._patch = patch

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        tiled = super().prepare(image, options)
        canvas = (tiled.tiles[0] * self._side, tiled.tiles[1] * self._side)
        scaled = _fitted(tiled.size, canvas)
        # A patch counts as image if any of its pixels does.
        rows, columns = (
            (whole - (whole - own) // self._patch * self._patch) // self._patch
            for whole, own in zip(canvas, scaled, strict=True)
        )
        # A square of patches is a token, each row of tokens ends with a newline, and a separator precedes the whole.
        down, across = -(-rows // 2), -(-columns // 2)
        length = down * (across + 1) + 1 + self._tokens * (self._tokens + 1)
        digest = tiled.digest + b"%d,%d" % (rows, columns)
        return msgspec.structs.replace(tiled, length=length, digest=digest, pictures=((rows, columns),))

    def _canvas(self, image: Image.Image, max_tiles: int) -> Image.Image:
        side = self._side
        columns, rows = math.ceil(image.width / side), math.ceil(image.height / side)
        if columns * rows > max_tiles:
            columns, rows = tile_grid(image.width, image.height, side, 1, max_tiles)
        height, width = _fitted((image.height, image.width), (rows * side, columns * side))
        if min(height, width) < MIN_SIDE:
            raise InvalidMessage(
                f"The image of {image.width} x {image.height} is so long that this model's preparation makes {width} x "
                f"{height} pixels of it. Cut it into several."
            )
        canvas = Image.new("RGB", (columns * side, rows * side), WHITE)
        canvas.paste(resized(image, height, width, self.settings.resample))
        return canvas


def _fitted(size: tuple[int, int], canvas: tuple[int, int]) -> tuple[int, int]:
    """Return the height and width of an image that is scaled to fit a canvas, with its ratio kept."""
    down, across = canvas[0] / size[0], canvas[1] / size[1]
    return (int(size[0] * across), canvas[1]) if across < down else (canvas[0], int(size[1] * down))
