"""Pictures for DeepSeek-OCR (Wei et al., 2025): the whole image, padded, and tiles if it is large."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import ImageOps

from asyncllm.prompt_image import ImageProcessor, PromptImage
from asyncllm.vl.loading import load_image
from asyncllm.vl.processing.options import refuse_options
from asyncllm.vl.processing.pictures import cut_tiles, digest_of, resized
from asyncllm.vl.processing.settings import PictureSettings
from asyncllm.vl.processing.tiles import tile_grid

__all__ = ["DeepseekOcrProcessor"]

MIN_TILES, MAX_TILES = 2, 9
"""Minimum and maximum number of tiles of an image that is tiled."""
GREY = (127, 127, 127)


class DeepseekOcrProcessor(ImageProcessor):
    """Pixels are flat: the whole image [3, side, side], then its tiles [rows * columns, 3, tile, tile]."""

    def __init__(
        self,
        settings: PictureSettings,
        *,
        token_id: int,
        placeholder: str,
        side: int,
        tile: int,
        shrunk: int,
    ) -> None:
        """`side` and `tile`: the sides of the whole picture and of a tile in pixels. `shrunk`: pixels along a side of
        the square that becomes a token."""
        self.settings, self.token_id, self.placeholder = settings, token_id, placeholder
        self._side, self._tile = side, tile
        self._tokens, self._tile_tokens = side // shrunk, tile // shrunk

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        refuse_options(options)
        loaded, tile, resample = load_image(image), self._tile, self.settings.resample
        whole = np.asarray(ImageOps.pad(loaded, (self._side, self._side), resample, GREY))
        pictures, rows, columns = [self.settings.numbers(whole).ravel()], 0, 0
        length = self._tokens * (self._tokens + 1) + 1
        if max(loaded.size) > tile:
            columns, rows = tile_grid(loaded.width, loaded.height, tile, MIN_TILES, MAX_TILES)
            tiles = cut_tiles(resized(loaded, rows * tile, columns * tile, resample), tile)
            pictures.append(self.settings.numbers(tiles).ravel())
            length += rows * self._tile_tokens * (columns * self._tile_tokens + 1)
        pixels = np.concatenate(pictures)
        return PromptImage(
            length=length,
            digest=digest_of(rows, columns, pixels=pixels),
            pixels=pixels,
            size=(loaded.height, loaded.width),
            tiles=(rows, columns),
        )
