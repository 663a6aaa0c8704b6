"""Slices for MiniCPM-V: the whole image in about a slice's area, and slices in the grid whose ratio is nearest to the
image's, all in whole patches and with about the image's ratio (LLaVA-UHD: Xu et al., 2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from asyncllm.prompt_image import ImageProcessor, PromptImage
from asyncllm.text.image_marks import INDEX_MARK
from asyncllm.vl.loading import load_image
from asyncllm.vl.processing.options import refuse_options
from asyncllm.vl.processing.pictures import Pixels, crops_of, digest_of, resized
from asyncllm.vl.processing.settings import PictureSettings

__all__ = ["MiniCpmVProcessor"]

MAX_SLICES = 128

Size = tuple[float, float]
"""Width and height."""


class MiniCpmVProcessor(ImageProcessor):
    """Pixels [patches, 3 * patch * patch] of all pictures, the whole first. Each picture has a placeholder of its own
    in the prompt."""

    def __init__(self, settings: PictureSettings, *, token_id: int, tokens: int, sliced: bool) -> None:
        """`tokens`: tokens of a picture. `sliced`: whether the prompt marks each slice as a slice, and numbers its
        images unless the settings say otherwise (2.6), rather than marking all slices as images within one slice (2.5).
        Raises ValueError if the settings have another number of tokens."""
        self.settings, self.token_id, self._tokens, self._sliced = settings, token_id, tokens, sliced
        self._numbered = sliced and settings.fields.get("use_image_id") is not False
        if settings.integer("image_feature_size", tokens) != tokens:
            raise ValueError("image_feature_size is another than query_num")
        self._patch = settings.integer("patch_size", 14, maximum=1024)
        self._side = settings.integer("scale_resolution", 448, maximum=2**14)
        cuts = settings.fields.get("slice_mode", True) is not False
        self._max_slices = settings.integer("max_slice_nums", 9, maximum=MAX_SLICES) if cuts else 1
        self.placeholder = self._text(0, 0)

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        refuse_options(options)
        loaded = load_image(image)
        columns, rows = self._grid(loaded.width, loaded.height)
        size = self._fitted(loaded.size, enlarged=not columns)
        pictures = [self._resized(loaded, *size)]
        if columns:
            # All slices get the fitted size of the average one.
            average = (_whole(loaded.width, columns) / columns, _whole(loaded.height, rows) / rows)
            width, height = self._fitted(average, enlarged=True)
            pictures += crops_of(self._resized(loaded, width * columns, height * rows), height, width)
        pixels = np.concatenate([self._patches(each) for each in pictures])
        patch = self._patch
        shapes = tuple((each.height // patch, each.width // patch) for each in pictures)
        return PromptImage(
            length=len(pictures) * self._tokens,
            digest=digest_of(shapes, rows, pixels=pixels),
            pixels=pixels,
            pictures=shapes,
            size=(loaded.height, loaded.width),
            text=self._text(rows, columns),
            placeholder_rows=(self._tokens,) * len(pictures),
        )

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the columns and rows of slices, or (0, 0) for an image no larger than one slice."""
        count = min(math.ceil(width * height / self._side**2), self._max_slices)
        if count <= 1:
            return 0, 0
        counts = [each for each in (count - 1, count, count + 1) if 1 < each <= self._max_slices]
        grids = [(columns, each // columns) for each in counts for columns in range(1, each + 1) if each % columns == 0]
        ratio = math.log(width / height)
        return min(grids, key=lambda grid: abs(ratio - math.log(grid[0] / grid[1])))

    def _fitted(self, size: Size, *, enlarged: bool) -> tuple[int, int]:
        """Return the width and height in whole patches, of at most a slice's area, or of that area if `enlarged`."""
        width, height = size
        if enlarged or width * height > self._side**2:
            ratio = width / height
            height = int(self._side / math.sqrt(ratio))
            width = int(height * ratio)
        return _whole(width, self._patch), _whole(height, self._patch)

    def _resized(self, image: Image.Image, width: int, height: int) -> Image.Image:
        return resized(image, height, width, self.settings.resample)

    def _patches(self, picture: Image.Image) -> Pixels:
        patch, numbers = self._patch, self.settings.numbers(np.asarray(picture))
        rows, columns = picture.height // patch, picture.width // patch
        cut = numbers.reshape(3, rows, patch, columns, patch).transpose(1, 3, 0, 2, 4)
        return np.ascontiguousarray(cut.reshape(rows * columns, -1))

    def _text(self, rows: int, columns: int) -> str:
        """Return the placeholder of an image with these rows and columns of slices."""
        whole = "<image><unk></image>"
        if self._numbered:
            whole = f"<image_id>{INDEX_MARK}</image_id>{whole}"
        if self._sliced:
            return whole + "\n".join(["<slice><unk></slice>" * columns] * rows) + "\n"
        lines = "\n".join(["<image><unk></image>" * columns] * rows)
        return f"{whole}<slice>{lines}</slice>\n" if rows else f"{whole}\n"


def _whole(length: float, unit: int) -> int:
    """Return the nearest multiple of the unit, at least one unit."""
    return max(round(length / unit) * unit, unit)
