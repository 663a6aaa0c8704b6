"""Tiles for Ovis2, the whole of an image in front of them: as few as cover most of it with what each can show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from asyncllm.prompt_image import PromptImage
from asyncllm.vl.loading import load_image
from asyncllm.vl.processing.settings import PictureSettings, digest_of, resized
from asyncllm.vl.processing.tiles import TileProcessor, tile_shapes

__all__ = ["CoveringProcessor"]

ENOUGH = 0.9
"""Share of an image that its tiles show."""


class CoveringProcessor(TileProcessor):
    """Squares of the tower's size, the whole image first and then its tiles row by row, or the whole alone."""

    def __init__(self, settings: PictureSettings, *, covering: bool, **rest: Any) -> None:
        """`covering`: whether tiles are chosen by what they show, and not by their ratio."""
        super().__init__(settings, **rest)
        self._covering = covering

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        most = self._most_tiles(options)
        loaded, side, resample = load_image(image), self._side, self.settings.resample
        columns, rows = self._grid(loaded.width, loaded.height, most) if most > 1 else (1, 1)
        tiles = np.asarray(resized(loaded, side, side, resample))[None]
        if rows * columns > 1:
            canvas = np.asarray(resized(loaded, rows * side, columns * side, resample))
            cut = canvas.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
            tiles = np.concatenate([tiles, cut])
        # A token begins, another one follows the whole, others stand between tiles, and one ends.
        marks = 2 + (rows * columns if len(tiles) > 1 else 1)
        return PromptImage(
            length=len(tiles) * self._tokens + marks,
            digest=digest_of(rows, columns, pixels=np.ascontiguousarray(tiles)),
            pixels=self.settings.numbers(tiles),
            size=(loaded.height, loaded.width),
            tiles=(rows, columns),
        )

    def _grid(self, width: int, height: int, most: int) -> tuple[int, int]:
        """Return columns and rows. Where they are chosen by what they show, transformers takes rows for columns, and
        so does this."""
        if not self._covering:
            return super()._grid(width, height, most)
        shown = [(shape, _shown(width, height, shape, self._side)) for shape in tile_shapes(1, most)]
        enough = [each for each in shown if each[1] > ENOUGH]
        if enough:
            return min(enough, key=lambda each: (each[0][0] * each[0][1], -each[1]))[0]
        return min(shown, key=lambda each: (-each[1], each[0][0] * each[0][1]))[0]


def _shown(width: int, height: int, shape: tuple[int, int], side: int) -> float:
    """Return which share of an image so many rows and columns of tiles show, each as much as fits into a square of
    this side."""
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
