"""Tiles with the image's ratio kept, and the downscaled whole image as one more tile (Phi-3-vision,
InternLM-XComposer2-4KHD and 2.5)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from asyncllm.prompt_image import ImageProcessor, PromptImage
from asyncllm.vl.loading import load_image
from asyncllm.vl.processing.options import is_low, refuse_options
from asyncllm.vl.processing.pictures import Pixels, digest_of, resized
from asyncllm.vl.processing.settings import PictureSettings

__all__ = ["HdProcessor", "XComposer25Processor", "hd_length"]

WHITE = (255, 255, 255)


def hd_length(rows: int, columns: int, side: int) -> int:
    """Return the number of tokens of an image with these tiles of side * side tokens. Each row of tokens ends with a
    newline, and a separator stands between the tiles and the whole."""
    return (rows * columns + 1) * side**2 + (rows + 1) * side + 1


class HdProcessor(ImageProcessor):
    """Pixels [1 + rows * columns, 3, side, side]: the downscaled whole image, then its tiles. The longer side is scaled
    to the largest number of tiles that keeps their total within the bound, and the shorter one is padded with white on
    both sides."""

    def __init__(
        self,
        settings: PictureSettings,
        *,
        token_id: int,
        placeholder: str,
        after: Sequence[int] = (),
        side: int,
        tokens: int,
        max_tiles: int,
    ) -> None:
        """`side`: the side of a tile in pixels. `tokens`: tokens along that side. `max_tiles`: maximum number of tiles
        of an image, without the whole."""
        self.settings, self.token_id, self.placeholder, self.after = settings, token_id, placeholder, after
        self._side, self._tokens, self._max_tiles = side, tokens, max_tiles

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        max_tiles = self._tile_limit(options)
        loaded, side = load_image(image), self._side
        canvas = self._canvas(loaded, max_tiles)
        numbers = self.settings.numbers(np.asarray(canvas))
        rows, columns = canvas.height // side, canvas.width // side
        tiles = numbers.reshape(3, rows, side, columns, side).transpose(1, 3, 0, 2, 4).reshape(-1, 3, side, side)
        pixels = np.ascontiguousarray(np.concatenate([self._whole(numbers), tiles]))
        return PromptImage(
            length=hd_length(rows, columns, self._tokens),
            digest=digest_of(rows, pixels=pixels),
            pixels=pixels,
            size=(loaded.height, loaded.width),
            tiles=(rows, columns),
        )

    def _tile_limit(self, options: Mapping[str, Any]) -> int:
        """Return the maximum number of tiles for the options of an image. Raises InvalidParameter."""
        refuse_options(options)
        return self._max_tiles

    def _columns(self, width: int, max_tiles: int) -> int:
        """Return the number of tiles, up to `max_tiles`, along the longer side of an image of this width."""
        return max_tiles

    def _canvas(self, image: Image.Image, max_tiles: int) -> Image.Image:
        """Return the image, scaled and padded to whole tiles. An upright image is transposed meanwhile, as in the
        authors' code, which decides how sizes are rounded."""
        upright = image.width < image.height
        if upright:
            image = image.transpose(Image.Transpose.TRANSPOSE)
        ratio, columns = image.width / image.height, 1
        while (columns + 1) * math.ceil((columns + 1) / ratio) <= max_tiles:
            columns += 1
        columns = self._columns(image.width, columns)
        width = columns * self._side
        height = max(1, int(width / ratio))
        canvas = Image.new("RGB", (width, math.ceil(height / self._side) * self._side), WHITE)
        canvas.paste(resized(image, height, width, self.settings.resample), (0, (canvas.height - height) // 2))
        return canvas.transpose(Image.Transpose.TRANSPOSE) if upright else canvas

    def _whole(self, numbers: Pixels) -> Pixels:
        """Scale numbers [3, height, width] to [1, 3, side, side]."""
        # Imported here, since a process whose model runs in another one needs no torch otherwise.
        import torch
        import torch.nn.functional as F

        picture = torch.from_numpy(numbers)[None]
        return F.interpolate(picture, (self._side, self._side), mode="bicubic").numpy()


class XComposer25Processor(HdProcessor):
    """Does not enlarge images beyond whole tiles, and uses fewer tiles in a conversation of several images."""

    max_cut_images = 1

    def __init__(self, settings: PictureSettings, *, few_tiles: int, **rest: Any) -> None:
        """`few_tiles`: maximum number of tiles of an image that is one of several, or whose `detail` is low."""
        super().__init__(settings, **rest)
        self._few_tiles = few_tiles

    def _tile_limit(self, options: Mapping[str, Any]) -> int:
        refuse_options(options, "detail")
        return self._few_tiles if is_low(options) else self._max_tiles

    def _columns(self, width: int, max_tiles: int) -> int:
        return min(math.ceil(width / self._side), max_tiles)
