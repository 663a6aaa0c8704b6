"""Tiles for Ovis2: the downscaled whole image, then as few tiles as are needed to show most of it at full
resolution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from asyncllm.prompt_image import PromptImage
from asyncllm.vl.loading import load_image
from asyncllm.vl.processing.pictures import cut_tiles, digest_of, resized
from asyncllm.vl.processing.settings import PictureSettings
from asyncllm.vl.processing.tiles import TileProcessor, tile_shapes

__all__ = ["Ovis2Processor"]

ENOUGH = 0.9
"""Share of an image's area that tiles must show at full resolution."""


class Ovis2Processor(TileProcessor):
    """Pixels [1 + rows * columns, 3, side, side]: the whole image, then its tiles row by row; or the whole only."""

    def __init__(self, settings: PictureSettings, *, covering: bool, **rest: Any) -> None:
        """`covering`: whether the grid is chosen by the area that its tiles show, rather than by its ratio."""
        super().__init__(settings, **rest)
        self._covering = covering

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        max_tiles = self._tile_limit(options)
        loaded, side, resample = load_image(image), self._side, self.settings.resample
        columns, rows = self._grid(loaded.width, loaded.height, max_tiles) if max_tiles > 1 else (1, 1)
        tiles = np.asarray(resized(loaded, side, side, resample))[None]
        if rows * columns > 1:
            tiles = np.concatenate([tiles, cut_tiles(resized(loaded, rows * side, columns * side, resample), side)])
        # Mark tokens: one at the start, one after the whole, one between tiles, and one at the end.
        marks = 2 + (rows * columns if len(tiles) > 1 else 1)
        return PromptImage(
            length=len(tiles) * self._tokens + marks,
            digest=digest_of(rows, columns, pixels=tiles),
            pixels=self.settings.numbers(tiles),
            size=(loaded.height, loaded.width),
            tiles=(rows, columns),
        )

    def _grid(self, width: int, height: int, max_tiles: int) -> tuple[int, int]:
        """Return columns and rows. If the grid is chosen by area, transformers takes rows for columns, which is
        reproduced here."""
        if not self._covering:
            return super()._grid(width, height, max_tiles)
        shown = [(shape, _shown(width, height, shape, self._side)) for shape in tile_shapes(1, max_tiles)]
        enough = [each for each in shown if each[1] > ENOUGH]
        if enough:
            return min(enough, key=lambda each: (each[0][0] * each[0][1], -each[1]))[0]
        return min(shown, key=lambda each: (-each[1], each[0][0] * each[0][1]))[0]


def _shown(width: int, height: int, shape: tuple[int, int], side: int) -> float:
    """Return the share of an image's area that these rows and columns of tiles show at full resolution; a tile larger
    than a square of this side is downscaled to fit it."""
    rows, columns = shape
    area = 0.0
    for row in range(rows):
        for column in range(columns):
            down = height - row * (height // rows) if row == rows - 1 else height // rows
            across = width - column * (width // columns) if column == columns - 1 else width // columns
            longer, shorter = max(across, down), float(min(across, down))
            if longer > side:
                longer, shorter = side, shorter / longer * side
            area += longer * shorter
    return area / (width * height)
