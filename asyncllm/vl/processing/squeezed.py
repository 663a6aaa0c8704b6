"""Images stretched to a square (Qwen-VL, InternLM-XComposer2), whose tokens may share a position (GLM-4V, CogVLM)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from asyncllm.prompt_image import ImageProcessor, PromptImage
from asyncllm.vl.loading import load_image
from asyncllm.vl.processing.options import refuse_options
from asyncllm.vl.processing.pictures import digest_of, resized
from asyncllm.vl.processing.settings import PictureSettings

__all__ = ["SqueezedProcessor"]


class SqueezedProcessor(ImageProcessor):
    """Pixels [1, 3, side, side]; the image's ratio is not kept."""

    def __init__(
        self,
        settings: PictureSettings,
        *,
        token_id: int,
        placeholder: str,
        length: int,
        side: int,
        shares_position: bool = False,
    ) -> None:
        """`length`: tokens of an image. `side`: the side of the tower's pictures in pixels. `shares_position`: as in
        PromptImage."""
        self.settings, self.token_id, self.placeholder, self.length = settings, token_id, placeholder, length
        self._side, self._shares_position = side, shares_position

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        refuse_options(options, one_picture=True)
        loaded = load_image(image)
        picture = resized(loaded, self._side, self._side, self.settings.resample)
        pixels = self.settings.numbers(np.asarray(picture)[None])
        return PromptImage(
            length=self.length,
            digest=digest_of(pixels=pixels),
            pixels=pixels,
            size=(loaded.height, loaded.width),
            text=self.placeholder,
            shares_position=self._shares_position,
        )
