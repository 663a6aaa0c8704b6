"""Tiles for Llama 4: an image scaled to the best canvas, padded with black, followed by the downscaled whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from asyncllm.prompt_image import ImageProcessor, PromptImage
from asyncllm.vl.loading import load_image
from asyncllm.vl.processing.options import refuse_options
from asyncllm.vl.processing.pictures import Pixels, cut_tiles, digest_of, resized
from asyncllm.vl.processing.settings import PictureSettings

__all__ = ["Llama4Processor"]

MAX_TILES = 128

BEGIN, WHOLE, PLACE, END = "<|image_start|>", "<|image|>", "<|patch|>", "<|image_end|>"
NEXT_COLUMN, NEXT_ROW = "<|tile_x_separator|>", "<|tile_y_separator|>"


class Llama4Processor(ImageProcessor):
    """Pixels [tiles + 1, 3, side, side], rounded to bfloat16 as by the published processor. Each tile has a placeholder
    of its own in the prompt, with separators between them."""

    placeholder = BEGIN + WHOLE + PLACE + END

    def __init__(self, settings: PictureSettings, *, token_id: int, tokens: int, side: int) -> None:
        """`tokens`: tokens of a tile. `side`: its side in pixels."""
        self.settings, self.token_id, self._tokens = settings, token_id, tokens
        self._side = settings.tower_side(side)
        self._max_tiles = settings.integer("max_patches", 16, maximum=MAX_TILES)
        self._largest = settings.fields.get("resize_to_max_canvas", False) is True

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        refuse_options(options)
        loaded, side, resample = load_image(image), self._side, self.settings.resample
        size = (loaded.height, loaded.width)
        rows, columns = _canvas(size, side, self._max_tiles, self._largest)
        bounds = (rows * side, columns * side)
        if not self._largest:
            # Small images are enlarged up to one tile only.
            bounds = (min(max(size[0], side), bounds[0]), min(max(size[1], side), bounds[1]))
        canvas = Image.new("RGB", (columns * side, rows * side))
        canvas.paste(resized(loaded, *_within(size, bounds), resample), (0, 0))
        tiles = cut_tiles(canvas, side)
        if len(tiles) > 1:
            tiles = np.concatenate([tiles, np.asarray(resized(loaded, side, side, resample))[None]])
        pixels = self._numbers(tiles)
        return PromptImage(
            length=len(tiles) * self._tokens,
            digest=digest_of(rows, columns, pixels=pixels),
            pixels=pixels,
            size=size,
            text=_text(rows, columns),
            placeholder_rows=(self._tokens,) * len(tiles),
        )

    def _numbers(self, pictures: NDArray[np.uint8]) -> Pixels:
        """Convert pictures [..., height, width, 3] to [..., 3, height, width]."""
        levels = _rounded(np.arange(256, dtype=np.float32) * np.float32(self.settings.scale))[:, None]
        levels = _rounded(_rounded(levels - _rounded(self.settings.mean)) / _rounded(self.settings.std))
        values = np.stack([levels[pictures[..., colour], colour] for colour in range(3)], -3)
        return np.ascontiguousarray(values)


def _rounded(values: Pixels) -> Pixels:
    """Round to bfloat16, ties to even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).astype(np.uint32).view(np.float32)


@lru_cache(8)
def _canvases(max_tiles: int) -> Sequence[tuple[int, int]]:
    """Return the (rows, columns) with up to `max_tiles` tiles: the largest first, those of equal ratio together."""
    by_ratio: dict[float, list[tuple[int, int]]] = {}
    for count in range(max_tiles, 0, -1):
        for rows in (each for each in range(1, count + 1) if count % each == 0):
            by_ratio.setdefault(rows / (count // rows), []).append((rows, count // rows))
    return [each for shapes in by_ratio.values() for each in shapes]


def _canvas(size: tuple[int, int], side: int, max_tiles: int, largest: bool) -> tuple[int, int]:
    """Return the rows and columns of tiles that enlarge the image least (most, for `largest`) without shrinking it, or
    shrink it least if all do. Among equal ones the smallest is chosen."""
    height, width = np.float32(size[0]), np.float32(size[1])
    scales = {
        (rows, columns): float(min(np.float32(rows * side) / height, np.float32(columns * side) / width))
        for rows, columns in _canvases(max_tiles)
    }
    enlarging = [scale for scale in scales.values() if scale >= 1]
    chosen = (max if largest else min)(enlarging) if enlarging else max(scales.values())
    return min((shape for shape, scale in scales.items() if scale == chosen), key=math.prod)


def _within(size: tuple[int, int], bounds: tuple[int, int]) -> tuple[int, int]:
    """Return the height and width of an image that is scaled to fit the bounds, with its ratio kept."""
    by_height, by_width = bounds[0] / size[0], bounds[1] / size[1]
    if by_width < by_height:
        return max(min(math.floor(size[0] * by_width), bounds[0]), 1), bounds[1]
    return bounds[0], max(min(math.floor(size[1] * by_height), bounds[1]), 1)


def _text(rows: int, columns: int) -> str:
    """Return the placeholder of an image with these rows and columns of tiles, or with the whole only for one tile."""
    tiles = (NEXT_COLUMN.join([PLACE] * columns) + NEXT_ROW) * rows if rows * columns > 1 else ""
    return BEGIN + tiles + WHOLE + PLACE + END
