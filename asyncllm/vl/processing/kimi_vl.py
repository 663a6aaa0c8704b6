"""Images in about their native size for Kimi-VL's MoonViT: downscaled if they have too many patches, and padded with
black to whole squares of patches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from asyncllm.errors import InvalidMessage
from asyncllm.prompt_image import ImageProcessor, PromptImage
from asyncllm.vl.loading import load_image
from asyncllm.vl.processing.options import refuse_options
from asyncllm.vl.processing.pictures import canvas_of, digest_of, resized
from asyncllm.vl.processing.settings import PictureSettings

__all__ = ["KimiK25Processor", "KimiVlProcessor"]

MAX_SIDE = 511
"""Maximum number of patches along a side of an image for Kimi-VL."""


class KimiVlProcessor(ImageProcessor):
    """Pixels [patches, 3, patch * patch], ordered by the squares of patches that become a token each."""

    placeholder = "<|media_start|>image<|media_content|><|media_pad|><|media_end|>"
    max_side = MAX_SIDE
    """Maximum number of patches along a side of an image."""

    def __init__(self, settings: PictureSettings, *, token_id: int, patch: int, merge: int, max_patches: int) -> None:
        """`merge`: patches along a side of a square. `max_patches`: maximum number of patches of an image."""
        self.settings, self.token_id, self._patch, self._merge = settings, token_id, patch, merge
        self._max_patches = max_patches

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        refuse_options(options)
        loaded, patch, merge = load_image(image), self._patch, self._merge
        canvas = self._canvas(loaded)
        rows, columns = (each // (patch * merge) for each in (canvas.height, canvas.width))
        if max(rows, columns) * merge > self.max_side:
            raise InvalidMessage(
                f"The image of {loaded.width} x {loaded.height} has more than {self.max_side} patches along a side. "
                f"Cut it into several."
            )
        numbers = self.settings.numbers(np.asarray(canvas))
        cut = numbers.reshape(3, rows, merge, patch, columns, merge, patch).transpose(1, 4, 2, 5, 0, 3, 6)
        pixels = np.ascontiguousarray(cut).reshape(-1, 3, patch * patch)
        return PromptImage(
            length=rows * columns,
            digest=digest_of(rows, columns, pixels=pixels),
            pixels=pixels,
            pictures=((rows * merge, columns * merge),),
            size=(loaded.height, loaded.width),
        )

    def _canvas(self, image: Image.Image) -> Image.Image:
        patches = (image.width // self._patch) * (image.height // self._patch)
        if patches > self._max_patches:
            scale = math.sqrt(self._max_patches / patches)
            width, height = max(1, int(image.width * scale)), max(1, int(image.height * scale))
            image = resized(image, height, width, self.settings.resample)
        return self._filled(image)

    def _filled(self, image: Image.Image) -> Image.Image:
        square = self._patch * self._merge
        canvas = canvas_of(-(-image.width // square) * square, -(-image.height // square) * square)
        canvas.paste(image)
        return canvas


class KimiK25Processor(KimiVlProcessor):
    """Also downscales images with too many patches along a side (Kimi-K2.5)."""

    placeholder = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"

    def __init__(
        self, settings: PictureSettings, *, token_id: int, patch: int, merge: int, max_patches: int, longest: int
    ) -> None:
        """`longest`: maximum number of patches along a side."""
        super().__init__(settings, token_id=token_id, patch=patch, merge=merge, max_patches=max_patches)
        self._longest, self.max_side = longest, -(-longest // merge) * merge

    def _canvas(self, image: Image.Image) -> Image.Image:
        patch, side = self._patch, self._longest * self._patch
        patches = max(1, image.width // patch) * max(1, image.height // patch)
        scale = min(1.0, math.sqrt(self._max_patches / patches), side / image.height, side / image.width)
        width, height = (min(max(1, int(each * scale)), side) for each in image.size)
        return self._filled(resized(image, height, width, self.settings.resample))
