"""Tiles of an image in the grid nearest to its ratio, followed by the downscaled whole (InternVL: Chen et al.,
2024)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from asyncllm.errors import InvalidParameter, short
from asyncllm.prompt_image import ImageProcessor, PromptImage
from asyncllm.vl.loading import load_image
from asyncllm.vl.processing.frames import read_frames
from asyncllm.vl.processing.options import is_low, refuse_options
from asyncllm.vl.processing.pictures import cut_tiles, digest_of, resized
from asyncllm.vl.processing.settings import PictureSettings

__all__ = [
    "AyaVisionProcessor",
    "Cohere2VisionProcessor",
    "InternVlProcessor",
    "TileProcessor",
    "tile_grid",
    "tile_shapes",
]

MAX_TILES = 128
FRAMES = 8
"""Default number of frames taken from a video file."""


@lru_cache(8)
def tile_shapes(min_tiles: int, max_tiles: int) -> Sequence[tuple[int, int]]:
    """Return the (columns, rows) of all grids with `min_tiles` to `max_tiles` tiles, the smallest first."""
    shapes = [(columns, rows) for columns in range(1, max_tiles + 1) for rows in range(1, max_tiles // columns + 1)]
    return sorted((each for each in shapes if each[0] * each[1] >= min_tiles), key=lambda each: each[0] * each[1])


def tile_grid(width: int, height: int, tile: int, min_tiles: int, max_tiles: int) -> tuple[int, int]:
    """Return the columns and rows whose ratio is nearest to the image's. Among equal ratios, a larger grid is chosen
    only if the image fills more than half of its area."""
    best, nearest = (1, 1), float("inf")
    for columns, rows in tile_shapes(min_tiles, max_tiles):
        away = abs(width / height - columns / rows)
        if away < nearest or (away == nearest and width * height > 0.5 * tile * tile * columns * rows):
            best, nearest = (columns, rows), away
    return best


def roomy_grid(width: int, height: int, tile: int, max_tiles: int) -> tuple[int, int]:
    """Return the columns and rows of the smallest grid that fits the image without shrinking it, or of the one that
    shrinks it least."""

    def scale(shape: tuple[int, int]) -> float:
        return min(shape[0] * tile / width, shape[1] * tile / height)

    shapes = tile_shapes(1, max_tiles)
    roomy = [each for each in shapes if scale(each) >= 1]
    return min(roomy, key=scale) if roomy else max(shapes, key=scale)


class TileProcessor(ImageProcessor):
    """Pixels [tiles, 3, side, side]: the tiles row by row; if there are several, the downscaled whole image follows."""

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
        min_tiles: int,
        max_tiles: int,
        thumbnail: bool = True,
    ) -> None:
        """`side`: the side of a tile in pixels. `tokens`: tokens of a tile. `min_tiles` and `max_tiles`: minimum and
        maximum number of tiles of an image, without the whole. `thumbnail`: whether the whole follows."""
        self.settings, self.token_id, self.placeholder = settings, token_id, placeholder
        self.before, self.after = before, after
        self._side, self._tokens, self._thumbnail = side, tokens, thumbnail
        self._min_tiles, self._max_tiles = min_tiles, max_tiles

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        max_tiles = self._tile_limit(options)
        loaded = load_image(image)
        side, resample = self._side, self.settings.resample
        columns, rows = self._grid(loaded.width, loaded.height, max_tiles)
        tiles = cut_tiles(resized(loaded, rows * side, columns * side, resample), side)
        if self._thumbnail and len(tiles) > 1:
            tiles = np.concatenate([tiles, np.asarray(resized(loaded, side, side, resample))[None]])
        return PromptImage(
            length=len(tiles) * self._tokens,
            digest=digest_of(pixels=tiles),
            pixels=self.settings.numbers(tiles),
            size=(loaded.height, loaded.width),
        )

    def _grid(self, width: int, height: int, max_tiles: int) -> tuple[int, int]:
        """Return the columns and rows of an image of this size, with `max_tiles` tiles at most."""
        return tile_grid(width, height, self._side, min(self._min_tiles, max_tiles), max_tiles)

    def _tile_limit(self, options: Mapping[str, Any]) -> int:
        """Return the maximum number of tiles for the options of an image. Raises InvalidParameter."""
        refuse_options(options, "max_dynamic_patch", "detail")
        low, max_tiles = is_low(options), options.get("max_dynamic_patch", self._max_tiles)
        if type(max_tiles) is not int or not 1 <= max_tiles <= MAX_TILES:
            raise InvalidParameter(
                f"max_dynamic_patch={short(max_tiles)} is not from 1 to {MAX_TILES} tiles.", "messages"
            )
        return 1 if low else max_tiles


class AyaVisionProcessor(TileProcessor):
    """Each tile has a placeholder of its own in the prompt, after its name (Aya Vision)."""

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        tiled = super().prepare(image, options)
        count, place = len(tiled.pixels), "<|IMG_PATCH|>"
        tiles = "".join(f"TILE_{number}{place}" for number in range(1, count))
        text = f"<|START_OF_IMG|>{tiles}TILE_GLOBAL{place}<|END_OF_IMG|>"
        return msgspec.structs.replace(tiled, text=text, placeholder_rows=(self._tokens,) * count)


class Cohere2VisionProcessor(TileProcessor):
    """Each tile has a placeholder of its own in the prompt, followed by a line break (Command A Vision)."""

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        tiled = super().prepare(image, options)
        count = len(tiled.pixels)
        tiles = "<|IMG_PATCH|><|IMG_LINE_BREAK|>" * count
        text = f"<|START_OF_IMG|>{tiles}<|END_OF_IMG|>"
        return msgspec.structs.replace(tiled, text=text, placeholder_rows=(self._tokens,) * count)

    def _grid(self, width: int, height: int, max_tiles: int) -> tuple[int, int]:
        return roomy_grid(width, height, self._side, max_tiles)


class InternVlProcessor(TileProcessor):
    """Also prepares videos: each frame is one tile, after its number."""

    @property
    def video_token_id(self) -> int:
        return self.token_id

    def prepare_video(self, video: Any, options: Mapping[str, Any]) -> PromptImage:
        """Use all frames of a list, but of a file `fps` frames per second or `num_frames` (default 8), each from the
        middle of an equal part of the duration.

        Raises InvalidMessage, InvalidParameter, UnsupportedFeature.
        """
        # Each frame is from the middle of its part of the duration.
        frames, size = read_frames(video, options, self._side, self.settings.resample, usual=FRAMES, offset=0.5)
        pixels, count = self.settings.numbers(frames), len(frames)
        return PromptImage(
            length=count * self._tokens,
            digest=digest_of("video", pixels=pixels),
            pixels=pixels,
            size=size,
            placeholder_rows=(self._tokens,) * count,
            separate=True,
            text="".join(f"Frame{number}: {self.placeholder}" for number in range(1, count + 1)),
        )
