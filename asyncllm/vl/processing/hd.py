"""Images in so many tiles as suits them, without their ratio being bent, and the whole in one tile (Phi-3-vision,
InternLM-XComposer2-4KHD and 2.5)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from asyncllm.prompt_image import ImageProcessor, PromptImage
from asyncllm.vl.loading import load_image
from asyncllm.vl.processing.settings import PictureSettings, Pixels, digest_of, is_low, refuse_options, resized

__all__ = ["HdProcessor", "SparingHdProcessor", "hd_length"]

WHITE = (255, 255, 255)


def hd_length(rows: int, columns: int, side: int) -> int:
    """Return the tokens of an image of these tiles of side * side tokens and the whole: each row of tokens has one more
    for its end, and one stands between the two pictures."""
    return (rows * columns + 1) * side**2 + (rows + 1) * side + 1


class HdProcessor(ImageProcessor):
    """Tiles [1 + rows * columns, 3, side, side], the whole first. The longer side of the image is as many tiles as
    leave all of them within the bound; the shorter one is padded with white on both sides."""

    def __init__(
        self,
        settings: PictureSettings,
        *,
        token_id: int,
        placeholder: str,
        after: Sequence[int] = (),
        side: int,
        tokens: int,
        most: int,
    ) -> None:
        """`side`: of a tile in pixels. `tokens`: along a tile's side. `most`: tiles of an image, without the whole."""
        self.settings, self.token_id, self.placeholder, self.after = settings, token_id, placeholder, after
        self._side, self._tokens, self._most = side, tokens, most

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        most = self._most_tiles(options)
        loaded, side = load_image(image), self._side
        canvas = self._canvas(loaded, most)
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

    def _most_tiles(self, options: Mapping[str, Any]) -> int:
        """Return how many tiles a part of a message allows. Raises InvalidParameter."""
        refuse_options(options)
        return self._most

    def _columns(self, width: int, most: int) -> int:
        """Return how many tiles an image of this width has along its longer side, of so many at most."""
        return most

    def _canvas(self, image: Image.Image, most: int) -> Image.Image:
        """Return the image in whole tiles; an upright one lies down for it, as its authors do."""
        upright = image.width < image.height
        if upright:
            image = image.transpose(Image.Transpose.TRANSPOSE)
        ratio, columns = image.width / image.height, 1
        while (columns + 1) * math.ceil((columns + 1) / ratio) <= most:
            columns += 1
        columns = self._columns(image.width, columns)
        width = columns * self._side
        height = max(1, int(width / ratio))
        canvas = Image.new("RGB", (width, math.ceil(height / self._side) * self._side), WHITE)
        canvas.paste(resized(image, height, width, self.settings.resample), (0, (canvas.height - height) // 2))
        return canvas.transpose(Image.Transpose.TRANSPOSE) if upright else canvas

    def _whole(self, numbers: Pixels) -> Pixels:
        """numbers [3, height, width] -> [1, 3, side, side]."""
        # Here, since a process whose model runs in another one needs no torch for text.
        import torch
        import torch.nn.functional as F

        picture = torch.from_numpy(numbers)[None]
        return F.interpolate(picture, (self._side, self._side), mode="bicubic").numpy()


class SparingHdProcessor(HdProcessor):
    """Images are not enlarged beyond whole tiles, and have fewer where a conversation has several of them."""

    most_cut = 1

    def __init__(self, settings: PictureSettings, *, few: int, **rest: Any) -> None:
        """`few`: tiles of an image that is one of several, or whose `detail` is low."""
        super().__init__(settings, **rest)
        self._few = few

    def _most_tiles(self, options: Mapping[str, Any]) -> int:
        refuse_options(options, "detail")
        return self._few if is_low(options) else self._most

    def _columns(self, width: int, most: int) -> int:
        return min(math.ceil(width / self._side), most)
