"""Tiles for Idefics3 and SmolVLM: an image scaled to whole squares, row by row, and the whole of it behind them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from asyncllm.prompt_image import ImageProcessor, PromptImage
from asyncllm.vl.loading import load_image
from asyncllm.vl.processing.settings import PictureSettings, digest_of, refuse_options, resized

__all__ = ["SplitProcessor"]

LONGEST = 4096
"""Longest side of an image, for any settings."""

BEGIN, PLACE, WHOLE = "<fake_token_around_image>", "<image>", "<global-img>"


class SplitProcessor(ImageProcessor):
    """Each tile is a place in the prompt, named by its row and column."""

    placeholder = BEGIN + WHOLE + PLACE + BEGIN

    def __init__(self, settings: PictureSettings, *, token_id: int, tokens: int) -> None:
        """`tokens`: of a tile."""
        self.settings, self.token_id, self._tokens = settings, token_id, tokens
        self._longest = min(settings.longest("size", 4 * 364), LONGEST)
        self._tile = settings.longest("max_image_size", 364)
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
                tiles = [
                    scaled.crop((column * tile, row * tile, (column + 1) * tile, (row + 1) * tile))
                    for row in range(rows)
                    for column in range(columns)
                ]
        tiles.append(self._resized(scaled, tile, tile))
        pixels = self.settings.numbers(np.stack([np.asarray(each) for each in tiles]))
        return PromptImage(
            length=len(tiles) * self._tokens,
            digest=digest_of(rows, columns, pixels=pixels),
            pixels=pixels,
            size=(loaded.height, loaded.width),
            text=_text(rows, columns),
            slots=(self._tokens,) * len(tiles),
        )

    def _resized(self, image: Image.Image, width: int, height: int) -> Image.Image:
        return resized(image, height, width, self.settings.resample)

    def _fitted(self, width: int, height: int) -> tuple[int, int]:
        """Return the size whose longer side is as long as the settings say, the other one even."""
        ratio, longest = width / height, self._longest
        if width >= height:
            short = int(longest / ratio)
            return longest, max(short + short % 2, 1)
        short = int(longest * ratio)
        return max(short + short % 2, 1), longest

    def _whole_tiles(self, width: int, height: int) -> tuple[int, int]:
        """Return the size in whole tiles: the longer side rounded up, the other one after it."""
        ratio, tile = width / height, self._tile
        if width >= height:
            width = math.ceil(width / tile) * tile
            height = math.ceil(int(width / ratio) / tile) * tile
        else:
            height = math.ceil(height / tile) * tile
            width = math.ceil(int(height * ratio) / tile) * tile
        return width, height


def _text(rows: int, columns: int) -> str:
    """Return what stands for an image of so many tiles and the whole; of the latter alone if there are none."""
    lines = [
        "".join(f"{BEGIN}<row_{row + 1}_col_{column + 1}>{PLACE}" for column in range(columns)) + "\n"
        for row in range(rows)
    ]
    return "".join([*lines, "\n" if lines else "", SplitProcessor.placeholder])
