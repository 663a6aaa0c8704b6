"""Tiles for Idefics3 and SmolVLM: an image scaled to whole tiles, row by row, followed by the downscaled whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from asyncllm.prompt_image import ImageProcessor, PromptImage
from asyncllm.vl.loading import load_image
from asyncllm.vl.processing.options import refuse_options
from asyncllm.vl.processing.pictures import crops_of, digest_of, resized
from asyncllm.vl.processing.settings import PictureSettings

__all__ = ["Idefics3Processor"]

LONGEST = 4096
"""Maximum side of an image in pixels, regardless of the settings."""

BEGIN, PLACE, WHOLE = "<fake_token_around_image>", "<image>", "<global-img>"


class Idefics3Processor(ImageProcessor):
    """Pixels [tiles + 1, 3, tile, tile]. Each tile has a placeholder of its own in the prompt, after its row and
    column."""

    placeholder = BEGIN + WHOLE + PLACE + BEGIN

    def __init__(self, settings: PictureSettings, *, token_id: int, tokens: int, side: int) -> None:
        """`tokens`: tokens of a tile. `side`: the side of the tower's pictures in pixels. Raises ValueError if the
        settings have another."""
        self.settings, self.token_id, self._tokens = settings, token_id, tokens
        self._longest = min(settings.longest("size", 4 * 364), LONGEST)
        self._tile = settings.longest("max_image_size", side)
        if self._tile != side:
            raise ValueError(f"tiles of {self._tile} pixels, and a tower that takes {side}")
        self._splits = settings.fields.get("do_image_splitting", True) is not False

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        refuse_options(options)
        loaded = load_image(image)
        scaled = self._resized(loaded, *self._fitted(loaded.width, loaded.height))
        tile, rows, columns, tiles = self._tile, 0, 0, list[Image.Image]()
        if self._splits:
            scaled = self._resized(scaled, *self._whole_tiles(scaled.width, scaled.height))
            if max(scaled.size) > tile:
                columns, rows = scaled.width // tile, scaled.height // tile
                tiles = crops_of(scaled, tile, tile)
        tiles.append(self._resized(scaled, tile, tile))
        pixels = self.settings.numbers(np.stack([np.asarray(each) for each in tiles]))
        return PromptImage(
            length=len(tiles) * self._tokens,
            digest=digest_of(rows, columns, pixels=pixels),
            pixels=pixels,
            size=(loaded.height, loaded.width),
            text=_text(rows, columns),
            placeholder_rows=(self._tokens,) * len(tiles),
        )

    def _resized(self, image: Image.Image, width: int, height: int) -> Image.Image:
        return resized(image, height, width, self.settings.resample)

    def _fitted(self, width: int, height: int) -> tuple[int, int]:
        """Return the size with the longer side of the settings; the shorter side is even."""
        ratio, longest = width / height, self._longest
        if width >= height:
            short = int(longest / ratio)
            return longest, max(short + short % 2, 1)
        short = int(longest * ratio)
        return max(short + short % 2, 1), longest

    def _whole_tiles(self, width: int, height: int) -> tuple[int, int]:
        """Return the size in whole tiles: the longer side is rounded up, then the shorter one, scaled alike."""
        ratio, tile = width / height, self._tile
        if width >= height:
            width = math.ceil(width / tile) * tile
            height = math.ceil(int(width / ratio) / tile) * tile
        else:
            height = math.ceil(height / tile) * tile
            width = math.ceil(int(height * ratio) / tile) * tile
        return width, height


def _text(rows: int, columns: int) -> str:
    """Return the placeholder of an image with these rows and columns of tiles, or with the whole only for (0, 0)."""
    lines = [
        "".join(f"{BEGIN}<row_{row + 1}_col_{column + 1}>{PLACE}" for column in range(columns)) + "\n"
        for row in range(rows)
    ]
    return "".join([*lines, "\n" if lines else "", Idefics3Processor.placeholder])
