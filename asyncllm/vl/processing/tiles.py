"""Tiles of an image in the shape nearest to its own, and the whole of it behind them (InternVL)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from asyncllm.errors import InvalidParameter, short
from asyncllm.prompt_image import ImageProcessor, PromptImage
from asyncllm.vl.loading import load_image
from asyncllm.vl.processing.sampling import Asked, asked_of, check_numbers, check_taken
from asyncllm.vl.processing.settings import PictureSettings, digest_of, is_low, refuse_options, resized
from asyncllm.vl.video_files import Recording, open_clip

__all__ = [
    "BrokenTileProcessor",
    "NamedTileProcessor",
    "TileProcessor",
    "TileVideoProcessor",
    "tile_grid",
    "tile_shapes",
]

MAX_TILES = 128
FRAMES = 8
"""Frames shown of a video file by default."""


@lru_cache(8)
def tile_shapes(least: int, most: int) -> Sequence[tuple[int, int]]:
    """Return (columns, rows) of so many tiles, the smallest first."""
    shapes = [(columns, rows) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
    return sorted((each for each in shapes if each[0] * each[1] >= least), key=lambda each: each[0] * each[1])


def tile_grid(width: int, height: int, tile: int, least: int, most: int) -> tuple[int, int]:
    """Return columns and rows: the ratio nearest to the image's, and of equal ones the largest that is not more than
    twice the image."""
    best, nearest = (1, 1), float("inf")
    for columns, rows in tile_shapes(least, most):
        away = abs(width / height - columns / rows)
        if away < nearest or (away == nearest and width * height > 0.5 * tile * tile * columns * rows):
            best, nearest = (columns, rows), away
    return best


def roomy_grid(width: int, height: int, tile: int, most: int) -> tuple[int, int]:
    """Return columns and rows: the smallest in which an image fits as large as it is, or the ones that shrink it
    least."""

    def scale(shape: tuple[int, int]) -> float:
        return min(shape[0] * tile / width, shape[1] * tile / height)

    shapes = tile_shapes(1, most)
    roomy = [each for each in shapes if scale(each) >= 1]
    return min(roomy, key=scale) if roomy else max(shapes, key=scale)


class TileProcessor(ImageProcessor):
    """Squares of the tower's size, row by row; behind several the whole image in one."""

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
        columns, rows = self._grid(loaded.width, loaded.height, most)
        canvas = np.asarray(resized(loaded, rows * side, columns * side, resample))
        tiles = canvas.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
        if self._thumbnail and len(tiles) > 1:
            tiles = np.concatenate([tiles, np.asarray(resized(loaded, side, side, resample))[None]])
        return PromptImage(
            length=len(tiles) * self._tokens,
            digest=digest_of(pixels=np.ascontiguousarray(tiles)),
            pixels=self.settings.numbers(tiles),
            size=(loaded.height, loaded.width),
        )

    def _grid(self, width: int, height: int, most: int) -> tuple[int, int]:
        """Return columns and rows of an image of this size, so many tiles at most."""
        return tile_grid(width, height, self._side, min(self._least, most), most)

    def _most_tiles(self, options: Mapping[str, Any]) -> int:
        """Return how many tiles a part of a message allows. Raises InvalidParameter."""
        refuse_options(options, "max_dynamic_patch", "detail")
        low, most = is_low(options), options.get("max_dynamic_patch", self._most)
        if type(most) is not int or not 1 <= most <= MAX_TILES:
            raise InvalidParameter(f"max_dynamic_patch={short(most)} is not from 1 to {MAX_TILES} tiles.", "messages")
        return 1 if low else most


class NamedTileProcessor(TileProcessor):
    """Each tile is a place in the prompt, behind its name (Aya Vision)."""

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        tiled = super().prepare(image, options)
        count, place = len(tiled.pixels), "<|IMG_PATCH|>"
        tiles = "".join(f"TILE_{number}{place}" for number in range(1, count))
        text = f"<|START_OF_IMG|>{tiles}TILE_GLOBAL{place}<|END_OF_IMG|>"
        return msgspec.structs.replace(tiled, text=text, slots=(self._tokens,) * count)


class BrokenTileProcessor(TileProcessor):
    """Each tile is a place in the prompt, with a line break behind it (Command A Vision)."""

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        tiled = super().prepare(image, options)
        count = len(tiled.pixels)
        tiles = "<|IMG_PATCH|><|IMG_LINE_BREAK|>" * count
        text = f"<|START_OF_IMG|>{tiles}<|END_OF_IMG|>"
        return msgspec.structs.replace(tiled, text=text, slots=(self._tokens,) * count)

    def _grid(self, width: int, height: int, most: int) -> tuple[int, int]:
        return roomy_grid(width, height, self._side, most)


class TileVideoProcessor(TileProcessor):
    """Each frame of a video is one tile behind its number."""

    @property
    def video_token_id(self) -> int:
        return self.token_id

    def prepare_video(self, video: Any, options: Mapping[str, Any]) -> PromptImage:
        """Show a list of frames as it is; of a file `fps` frames a second, or `num_frames`, which are 8 if neither is
        said, each from the middle of its part of the time.

        Raises InvalidMessage, InvalidParameter, UnsupportedFeature as `prepare`.
        """
        asked = asked_of(options)
        with open_clip(video, lambda recording: _chosen(recording, asked)) as clip:
            if clip.rate is None:
                asked.check_list()
            count, side = len(clip.indices), self._side
            check_numbers(count, side, side)
            frames = [np.asarray(resized(frame, side, side, self.settings.resample)) for frame in clip.frames]
        pixels = self.settings.numbers(np.stack(frames))
        return PromptImage(
            length=count * self._tokens,
            digest=digest_of("video", pixels=pixels),
            pixels=pixels,
            size=(clip.height, clip.width),
            slots=(self._tokens,) * count,
            apart=True,
            text="".join(f"Frame{number}: {self.placeholder}" for number in range(1, count + 1)),
        )


def _chosen(recording: Recording, asked: Asked) -> list[int]:
    total = recording.total
    count = asked.num_frames or min(FRAMES, total)
    if asked.fps is not None:
        count = max(int(total / recording.rate * asked.fps), 1)
    check_taken(count, total)
    return [int((number + 0.5) * (total / count)) for number in range(count)]
