"""Pictures for Pixtral, Mistral 3 and LightOnOCR: downscaled to a maximum side, then scaled to whole patches. Each row
of the first two ends with a token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from asyncllm.prompt_image import ImageProcessor, PromptImage
from asyncllm.vl.loading import load_image
from asyncllm.vl.processing.options import refuse_options
from asyncllm.vl.processing.pictures import digest_of, resized
from asyncllm.vl.processing.settings import PictureSettings

__all__ = ["PixtralProcessor"]


class PixtralProcessor(ImageProcessor):
    """Pixels [1, 3, height, width]. Each row of tokens has a placeholder of its own in the prompt if rows end with a
    token."""

    def __init__(
        self, settings: PictureSettings, *, token_id: int, patch: int, merge: int, placeholder: str = "[IMG]"
    ) -> None:
        """`patch`: the side of a patch in pixels. `merge`: patches along a side of the square that becomes a token. A
        `placeholder` other than [IMG] stands for all rows together."""
        self.settings, self.token_id, self.placeholder = settings, token_id, placeholder
        self._merge, self._step = merge, patch * merge
        self._longest = settings.longest("size", 1024)

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        refuse_options(options)
        loaded = load_image(image)
        step = self._step
        ratio = max(1.0, max(loaded.size) / self._longest)
        columns, rows = (max(math.ceil(math.floor(each / ratio) / step), 1) for each in loaded.size)
        scaled = resized(loaded, rows * step, columns * step, self.settings.resample)
        pixels = self.settings.numbers(np.asarray(scaled)[None])
        parted = self.placeholder == "[IMG]"
        return PromptImage(
            length=rows * columns,
            pictures=((rows * self._merge, columns * self._merge),),
            digest=digest_of(pixels=pixels),
            pixels=pixels,
            size=(loaded.height, loaded.width),
            text="[IMG][IMG_BREAK]" * (rows - 1) + "[IMG][IMG_END]" if parted else "",
            placeholder_rows=(columns,) * rows if parted else (),
        )
