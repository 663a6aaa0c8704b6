"""Images for Molmo: the whole image in a square, and overlapping crops of it (Deitke et al., 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from asyncllm.errors import InvalidCheckpoint, short
from asyncllm.prompt_image import ImageProcessor, PromptImage
from asyncllm.vl.loading import load_image
from asyncllm.vl.processing.options import refuse_options
from asyncllm.vl.processing.pictures import Pixels, digest_of
from asyncllm.vl.processing.settings import PictureSettings

__all__ = ["POOL", "CropGrid", "MolmoProcessor", "crop_grid"]

POOL = 2
"""Patches along a side of the square that becomes a token."""

Size = tuple[int, int]
"""Height and width, or rows and columns."""


class CropGrid(NamedTuple):
    """The positions of crops in a picture. Along each axis, a crop overlaps the previous one by `before` patches and
    the next one by `after` patches."""

    side: int
    """Side of a crop, and of the picture of the whole image, in pixels."""
    patch: int
    before: int
    after: int

    @property
    def step(self) -> int:
        """Patches from one crop to the next."""
        return self.side // self.patch - self.before - self.after

    def canvas(self, tiles: Size) -> Size:
        """Return the size in pixels of these rows and columns of crops."""
        rows, columns = ((count * self.step + self.before + self.after) * self.patch for count in tiles)
        return rows, columns

    def tiles(self, size: Size, max_crops: int) -> Size:
        """Return the rows and columns of up to `max_crops` crops: those that enlarge the image least, or shrink it
        least if all do.

        As in the authors' code, margins are subtracted from both sizes and numbers are float32, so that the ratio of an
        image smaller than its margins is negative."""
        shapes = [(rows, columns) for rows in range(1, max_crops + 1) for columns in range(1, max_crops // rows + 1)]
        shapes.sort(key=lambda each: (each[0] * each[1], each[0]))
        margin, step = (self.before + self.after) * self.patch, self.step * self.patch
        inner = np.array([each - margin for each in size], np.float32)
        with np.errstate(divide="ignore"):
            scales = (np.array(shapes, np.float32) * np.float32(step) / inner).min(-1)
        enlarging = np.where(scales < 1, np.float32(10e9), scales)
        return shapes[int(np.argmax(scales) if (scales < 1).all() else np.argmin(enlarging))]

    def fitted(self, size: Size, canvas: Size) -> Size:
        """Return the size of an image that is scaled to fit a canvas."""
        height, width = (np.float32(each) for each in size)
        scale = min(np.float32(canvas[1]) / width, np.float32(canvas[0]) / height)
        return max(1, int(height * scale)), max(1, int(width * scale))

    def inside(self, size: Size, tiles: Size) -> Pixels:
        """Return the share of each patch that is image rather than padding [crops, patches]."""
        canvas = self.canvas(tiles)
        axes = []
        for whole, scaled in zip(canvas, self.fitted(size, canvas), strict=True):
            covered = np.zeros(whole, np.float32)
            start = (whole - scaled) // 2
            covered[start : start + scaled] = 1
            axes.append(covered.reshape(-1, self.patch).mean(1, dtype=np.float64))
        shares: NDArray[Any] = np.multiply.outer(*axes)
        return self.cropped(shares, self.step, self.side // self.patch).reshape(tiles[0] * tiles[1], -1)

    def cropped(self, picture: NDArray[Any], step: int, side: int) -> Pixels:
        """Return the crops of a picture [..., height, width], row by row, [crops, ..., side, side]."""
        rows, columns = ((length - side) // step + 1 for length in picture.shape[-2:])
        corners = [(row * step, column * step) for row in range(rows) for column in range(columns)]
        return np.stack([picture[..., top : top + side, left : left + side] for top, left in corners]).astype(
            np.float32
        )

    def parts(self, tiles: int) -> list[tuple[int, int]]:
        """Return the (start, end) of the tokens of each crop along an axis that are used; the remaining ones repeat an
        adjacent crop's."""
        found = []
        for number in range(tiles):
            first = 0 if number == 0 else self.before // POOL
            patches = self.step + (self.before if number == 0 else 0) + (self.after if number == tiles - 1 else 0)
            found.append((first, first + -(-patches // POOL)))
        return found

    def tokens(self, tiles: Size) -> Size:
        """Return the rows and columns of tokens of these rows and columns of crops."""
        rows, columns = (sum(last - first for first, last in self.parts(count)) for count in tiles)
        return rows, columns


def crop_grid(tower: Mapping[str, Any], settings: PictureSettings) -> CropGrid:
    """Return the grid of crops for a tower's `vision_config` and preprocessor_config.json. Raises
    InvalidCheckpoint."""
    margins = settings.fields.get("overlap_margins", [4, 4])
    known = PictureSettings(tower, "config.json: vision_config")
    side, patch = known.side("image_size", 336), known.side("patch_size", 14)
    fits = isinstance(margins, list) and len(margins) == 2 and all(type(each) is int and each >= 0 for each in margins)
    patches = side // patch
    if not fits or side % (POOL * patch) or margins[0] % POOL or sum(margins) >= patches:
        raise InvalidCheckpoint(
            f"{settings.where}: overlap_margins = {short(margins)} does not fit crops of {patches} patches, or these "
            f"are not even in number. Correct the file."
        )
    return CropGrid(side, patch, *margins)


class MolmoProcessor(ImageProcessor):
    """Pixels [1 + rows * columns, 3, side, side]: the downscaled whole image, then its crops, padded with black."""

    def __init__(
        self, settings: PictureSettings, *, token_id: int, placeholder: str, grid: CropGrid, max_crops: int
    ) -> None:
        """`max_crops`: maximum number of crops of an image, without the whole."""
        self.settings, self.token_id, self.placeholder = settings, token_id, placeholder
        self._grid, self._max_crops = grid, max_crops

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        refuse_options(options)
        loaded, grid = load_image(image), self._grid
        size = (loaded.height, loaded.width)
        tiles = grid.tiles(size, self._max_crops)
        whole = self._placed(loaded, (grid.side, grid.side))
        crops = grid.cropped(self._placed(loaded, grid.canvas(tiles)), grid.step * grid.patch, grid.side)
        pixels = np.concatenate([whole[None], crops])
        # The whole has a start and an end token, as have the crops together, and each row has an end token.
        length = sum(rows * (columns + 1) + 2 for rows, columns in (grid.tokens((1, 1)), grid.tokens(tiles)))
        return PromptImage(
            length=length, digest=digest_of(size, tiles, pixels=pixels), pixels=pixels, size=size, tiles=tiles
        )

    def _placed(self, image: Image.Image, canvas: Size) -> Pixels:
        """Return the numbers [3, height, width] of the image at the centre of a black canvas of this size. The image is
        resized in float32, as by the authors."""
        height, width = self._grid.fitted((image.height, image.width), canvas)
        top, left = (canvas[0] - height) // 2, (canvas[1] - width) // 2
        numbers = np.zeros((3, *canvas), np.float32)
        for plane, colour in zip(numbers, image.split(), strict=True):
            exact = Image.fromarray(np.asarray(colour, np.float32) * np.float32(self.settings.scale))
            scaled = np.asarray(exact.resize((width, height), self.settings.resample))
            plane[top : top + height, left : left + width] = scaled.clip(0, 1)
        numbers -= self.settings.mean[:, None, None]
        numbers /= self.settings.std[:, None, None]
        return numbers
