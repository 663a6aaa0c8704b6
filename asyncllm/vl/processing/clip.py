"""Square pictures for CLIP's towers: the centre of an image or all of it (LLaVA), or the downscaled whole and tiles
(LLaVA-NeXT)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from asyncllm.prompt_image import ImageProcessor, PromptImage
from asyncllm.vl.loading import load_image
from asyncllm.vl.processing.anyres import best_resolution, fitted, num_tokens
from asyncllm.vl.processing.options import refuse_options
from asyncllm.vl.processing.pictures import crops_of, digest_of, padded_square, resized
from asyncllm.vl.processing.settings import PictureSettings

__all__ = ["AnyresProcessor", "CenterProcessor", "PaddedProcessor"]


class CenterProcessor(ImageProcessor):
    """Scales the shorter side to the tower's and crops the centre. If the settings have a height and a width, as
    SigLIP's do, the whole image is stretched to them."""

    def __init__(self, settings: PictureSettings, *, token_id: int, placeholder: str, length: int, side: int) -> None:
        """`length`: tokens of an image. `side`: the side of the tower's pictures in pixels. Raises ValueError if the
        settings have another."""
        self.settings, self.token_id, self.placeholder, self.length = settings, token_id, placeholder, length
        self.edge, size = settings.side("size", side), settings.fields.get("size")
        self._squeezes = isinstance(size, dict) and size.get("height") is not None
        self.crop = settings.side("crop_size", side) if settings.fields.get("do_center_crop", True) else None
        if (self.crop or self.edge) != side:
            raise ValueError(f"pictures of {self.crop or self.edge} pixels, and a tower that takes {side}")

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        refuse_options(options, one_picture=True)
        loaded = load_image(image)
        pixels = self.settings.numbers(np.asarray(self.squared(loaded))[None])
        return PromptImage(
            length=self.length,
            digest=digest_of(pixels=pixels),
            pixels=pixels,
            size=(loaded.height, loaded.width),
        )

    def squared(self, image: Image.Image) -> Image.Image:
        """Return the centre of the image in the tower's size, or the whole image, stretched, if crops are off."""
        edge, (width, height) = self.edge, image.size
        if self._squeezes or self.crop is None:
            height, width = edge, edge
        elif width < height:
            height, width = int(edge * height / width), edge
        else:
            height, width = edge, int(edge * width / height)
        scaled = resized(image, height, width, self.settings.resample)
        if self.crop is None:
            return scaled
        left, top = (width - self.crop) // 2, (height - self.crop) // 2
        return scaled.crop((left, top, left + self.crop, top + self.crop))


class PaddedProcessor(CenterProcessor):
    """Pads the image to a square with the mean colour before it is scaled (LLaVA 1.5, as its authors do)."""

    def squared(self, image: Image.Image) -> Image.Image:
        return super().squared(padded_square(image, self.settings.background))


class AnyresProcessor(CenterProcessor):
    """Pixels [1 + tiles, 3, side, side]: the downscaled whole image, and its tiles in the best shape, padded with
    black."""

    def __init__(
        self,
        settings: PictureSettings,
        *,
        token_id: int,
        placeholder: str,
        side: int,
        patches: int,
        pinpoints: Sequence[tuple[int, int]],
        max_patches: int | None = None,
    ) -> None:
        """`patches`: patches along a side of the tower's pictures. `pinpoints`: the possible heights and widths.
        `max_patches`: maximum number of patches of all tiles, as in `anyres.shrunk`."""
        super().__init__(settings, token_id=token_id, placeholder=placeholder, length=0, side=side)
        self._max_patches = max_patches
        self._tile, self._patches, self._pinpoints = side, patches, pinpoints

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        refuse_options(options)
        loaded = load_image(image)
        size = (loaded.height, loaded.width)
        shape = best_resolution(size, self._pinpoints)
        height, width = fitted(size, shape)
        canvas = Image.new("RGB", (shape[1], shape[0]))
        scaled = resized(loaded, height, width, self.settings.resample)
        canvas.paste(scaled, ((shape[1] - width) // 2, (shape[0] - height) // 2))
        whole = resized(loaded, self.edge, self.edge, self.settings.resample)
        step = self.crop or self.edge
        tiles = crops_of(canvas, step, step)
        pixels = self.settings.numbers(np.stack([np.asarray(self.squared(each)) for each in (whole, *tiles)]))
        return PromptImage(
            length=num_tokens(size, self._pinpoints, self._tile, self._patches, self._max_patches),
            digest=digest_of(size, pixels=pixels),
            pixels=pixels,
            size=size,
        )
