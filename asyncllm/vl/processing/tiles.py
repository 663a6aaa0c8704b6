"""Tiles of an image in the shape nearest to its own, and the whole of it behind them (InternVL)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from asyncllm.errors import InvalidParameter, short
from asyncllm.protocol import PromptImage
from asyncllm.vl.loading import load_image
from asyncllm.vl.processing.settings import PictureSettings, digest_of, is_low, refuse_options, resized

__all__ = ["TileProcessor", "tile_grid"]

MAX_TILES = 128


@lru_cache(8)
def _shapes(least: int, most: int) -> Sequence[tuple[int, int]]:
    """Return (columns, rows) of so many tiles, the smallest first."""
    shapes = [(columns, rows) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
    return sorted((each for each in shapes if each[0] * each[1] >= least), key=lambda each: each[0] * each[1])


def tile_grid(width: int, height: int, tile: int, least: int, most: int) -> tuple[int, int]:
    """Return columns and rows: the ratio nearest to the image's, and of equal ones the largest that is not more than
    twice the image."""
    best, nearest = (1, 1), float("inf")
    for columns, rows in _shapes(least, most):
        away = abs(width / height - columns / rows)
        if away < nearest or (away == nearest and width * height > 0.5 * tile * tile * columns * rows):
            best, nearest = (columns, rows), away
    return best


class TileProcessor:
    """Squares of the tower's size, row by row; behind several the whole image in one."""

    joint = 0

    def __init__(
        self,
        settings: PictureSettings,
        *,
        token_id: int,
        placeholder: str,
        before: Sequence[int],
        after: Sequence[int],
        side: int,
        tokens: int,
        least: int,
        most: int,
        thumbnail: bool = True,
    ) -> None:
        """`tokens`: of a tile. `least` and `most`: tiles of an image, the whole not counted."""
        self.settings, self.token_id, self.placeholder = settings, token_id, placeholder
        self.before, self.after = before, after
        self._side, self._tokens, self._least, self._most, self._thumbnail = side, tokens, least, most, thumbnail

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        most = self._most_tiles(options)
        loaded = load_image(image)
        side, resample = self._side, self.settings.resample
        columns, rows = tile_grid(loaded.width, loaded.height, side, min(self._least, most), most)
        canvas = np.asarray(resized(loaded, rows * side, columns * side, resample))
        tiles = canvas.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
        if self._thumbnail and len(tiles) > 1:
            tiles = np.concatenate([tiles, np.asarray(resized(loaded, side, side, resample))[None]])
        pixels = self.settings.numbers(tiles)
        return PromptImage(
            length=len(tiles) * self._tokens,
            digest=digest_of(pixels=pixels),
            pixels=pixels,
            size=(loaded.height, loaded.width),
        )

    def _most_tiles(self, options: Mapping[str, Any]) -> int:
        """Return how many tiles a part of a message allows. Raises InvalidParameter."""
        refuse_options(options, "max_dynamic_patch", "detail")
        low, most = is_low(options), options.get("max_dynamic_patch", self._most)
        if type(most) is not int or not 1 <= most <= MAX_TILES:
            raise InvalidParameter(f"max_dynamic_patch={short(most)} is not from 1 to {MAX_TILES} tiles.", "messages")
        return 1 if low else most
