"""Images in about their native size for LFM2-VL: whole squares of patches within bounds of tokens, or tiles and a
thumbnail if there are too many (Liquid AI, 2025)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from asyncllm.errors import InvalidCheckpoint, InvalidMessage
from asyncllm.prompt_image import ImageProcessor, PromptImage
from asyncllm.vl.loading import load_image
from asyncllm.vl.processing.options import refuse_options
from asyncllm.vl.processing.pictures import Pixels, crops_of, cut_squares, digest_of, resized
from asyncllm.vl.processing.settings import PictureSettings
from asyncllm.vl.processing.tiles import MAX_TILES, tile_grid

__all__ = ["Lfm2VlProcessor"]

PLACE = "<image>"
BEGIN, WHOLE, END = "<|image_start|>", "<|img_thumbnail|>", "<|image_end|>"


class Lfm2VlProcessor(ImageProcessor):
    """Pixels [patches, 3, patch * patch] of all pictures, ordered by the squares of patches that become a token each.
    Each picture has a placeholder of its own in the prompt, a tile after its row and column."""

    placeholder = BEGIN + PLACE + END

    def __init__(self, settings: PictureSettings, *, token_id: int) -> None:
        """Raises InvalidCheckpoint for settings that contradict each other."""
        self.settings, self.token_id, fields = settings, token_id, settings.fields
        self.patch = settings.integer("encoder_patch_size", 16, maximum=1024)
        self.merge = settings.integer("downsample_factor", 2, maximum=64)
        self._bounds = settings.integer("min_image_tokens", 64), settings.integer("max_image_tokens", 256)
        self._tile = settings.integer("tile_size", 512, maximum=2**13)
        self._tiles = settings.integer("min_tiles", 2), settings.integer("max_tiles", 10, maximum=MAX_TILES)
        self._tolerance = settings.number("max_pixels_tolerance", 2.0)
        self._whole = fields.get("use_thumbnail", True) is not False
        self._splits = fields.get("do_image_splitting", True) is not False and self._tiles != (1, 1)
        if self._tile % self._square or self._tiles[0] > self._tiles[1] or self._bounds[0] > self._bounds[1]:
            raise InvalidCheckpoint(
                f"{settings.where}: tile_size, min_tiles, max_tiles, min_image_tokens and max_image_tokens do not fit "
                f"squares of {self._square} pixels or each other. Correct the file."
            )

    @property
    def _square(self) -> int:
        """Pixels along a side of the square that becomes a token."""
        return self.patch * self.merge

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        refuse_options(options)
        loaded = load_image(image)
        height, width = self._size(loaded)
        if height * width > max(self._bounds[1] * self._square**2, self._tile**2):
            raise InvalidMessage(
                f"The image of {loaded.width} x {loaded.height} is so long that this model's preparation makes "
                f"{width} x {height} pixels of it. Cut it into several."
            )
        rows, columns, pictures = 1, 1, [self._resized(loaded, height, width)]
        if self._splits and self._is_large(loaded):
            columns, rows = tile_grid(loaded.width, loaded.height, self._tile, *self._tiles)
            canvas = self._resized(loaded, rows * self._tile, columns * self._tile)
            tiles = crops_of(canvas, self._tile, self._tile)
            pictures = [*tiles, *(pictures if self._whole else ())]
        squares = [(each.height // self._square, each.width // self._square) for each in pictures]
        pixels = np.concatenate([self._patches(each) for each in pictures])
        shapes = tuple((down * self.merge, across * self.merge) for down, across in squares)
        counts = tuple(down * across for down, across in squares)
        return PromptImage(
            length=sum(counts),
            digest=digest_of(shapes, pixels=pixels),
            pixels=pixels,
            size=(loaded.height, loaded.width),
            pictures=shapes,
            text=self._text(rows, columns),
            placeholder_rows=counts,
        )

    def _size(self, image: Image.Image) -> tuple[int, int]:
        """Return the height and width in whole squares, within the bounds of tokens."""
        min_pixels, max_pixels = (tokens * self._square**2 for tokens in self._bounds)
        sides, area = (image.height, image.width), image.height * image.width
        height, width = (max(self._square, round(side / self._square) * self._square) for side in sides)
        if height * width > max_pixels:
            scale = math.sqrt(area / max_pixels)
            height, width = (
                max(self._square, math.floor(side / scale / self._square) * self._square) for side in sides
            )
        elif height * width < min_pixels:
            scale = math.sqrt(min_pixels / area)
            height, width = (math.ceil(side * scale / self._square) * self._square for side in sides)
        return height, width

    def _is_large(self, image: Image.Image) -> bool:
        """Return whether the image as a single picture would have too many tokens."""
        height, width = (max(self.patch, round(side / self._square) * self._square) for side in image.size)
        return height * width > self._bounds[1] * self._square**2 * self._tolerance

    def _resized(self, image: Image.Image, height: int, width: int) -> Image.Image:
        return resized(image, height, width, self.settings.resample)

    def _patches(self, picture: Image.Image) -> Pixels:
        return self.settings.numbers(cut_squares(picture, self.patch, self.merge)).reshape(-1, 3, self.patch**2)

    def _text(self, rows: int, columns: int) -> str:
        if rows * columns == 1:
            return self.placeholder
        places = (f"<|img_row_{row + 1}_col_{column + 1}|>{PLACE}" for row in range(rows) for column in range(columns))
        return "".join([BEGIN, *places, WHOLE + PLACE if self._whole else "", END])
