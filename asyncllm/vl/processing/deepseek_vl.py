"""Square pictures for DeepSeek-VL: all of an image, and of the 7B in two sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from asyncllm.protocol import PromptImage
from asyncllm.vl.loading import load_image
from asyncllm.vl.processing.clip import CenterProcessor
from asyncllm.vl.processing.settings import PictureSettings, digest_of, refuse_options, resized

__all__ = ["SquareProcessor", "TwoSizesProcessor"]


class SquareProcessor(CenterProcessor):
    """All of an image, with bars of the mean colour where it is no square."""

    def squared(self, image: Image.Image) -> Image.Image:
        edge, least, longest = self.edge, self.settings.integer("min_size", 14), max(image.size)
        scale = edge / longest
        width, height = (max(round(each * scale), least) for each in image.size)
        side = max(width, height)
        canvas = Image.new("RGB", (side, side), self.settings.background)
        canvas.paste(resized(image, height, width, self.settings.resample), ((side - width) // 2, (side - height) // 2))
        return canvas


class TwoSizesProcessor(SquareProcessor):
    """All of an image in two sizes, the smaller one made of the larger one; the larger one's numbers come first
    (DeepSeek-VL 7B)."""

    def __init__(
        self,
        settings: PictureSettings,
        *,
        large: SquareProcessor,
        token_id: int,
        placeholder: str,
        length: int,
        side: int,
    ) -> None:
        super().__init__(settings, token_id=token_id, placeholder=placeholder, length=length, side=side)
        self.large = large

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        refuse_options(options)
        loaded = load_image(image)
        whole = self.large.squared(loaded)
        pictures = (
            self.large.settings.numbers(np.asarray(whole)),
            self.settings.numbers(np.asarray(self.squared(whole))),
        )
        pixels = np.concatenate([each.ravel() for each in pictures])
        return PromptImage(
            length=self.length,
            digest=digest_of(pixels=pixels),
            pixels=pixels,
            size=(loaded.height, loaded.width),
        )
