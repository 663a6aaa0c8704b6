"""Pictures for Gemma 3: the whole image stretched to a square, and crops of long images ("pan and scan")."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from asyncllm.prompt_image import ImageProcessor, PromptImage
from asyncllm.vl.loading import load_image
from asyncllm.vl.processing.options import refuse_options
from asyncllm.vl.processing.pictures import digest_of, resized
from asyncllm.vl.processing.settings import PictureSettings

__all__ = ["Gemma3Processor"]

PLACE = "\n\n<start_of_image><image_soft_token><end_of_image>\n\n"
WITH_CROPS = "Here is the original image {} and here are some crops to help you see better {}"


class Gemma3Processor(ImageProcessor):
    """Each picture has the same number of tokens, which attend to each other in both directions."""

    placeholder = PLACE

    def __init__(self, settings: PictureSettings, *, token_id: int, tokens: int, side: int) -> None:
        """`tokens`: tokens of a picture. `side`: the side of the tower's pictures in pixels."""
        self.settings, self.token_id, self.joint = settings, token_id, tokens
        self._edge = settings.tower_side(side)
        self._crops = settings.fields.get("do_pan_and_scan") is True
        self._min_side = settings.integer("pan_and_scan_min_crop_size", 256)
        self._max_crops = settings.integer("pan_and_scan_max_num_crops", 4, maximum=64)
        self._min_ratio = settings.number("pan_and_scan_min_ratio_to_activate", 1.2)

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        refuse_options(options, one_picture=not self._crops)
        loaded = load_image(image)
        crops = self._cropped(loaded) if self._crops else []
        pictures = [resized(each, self._edge, self._edge, self.settings.resample) for each in (loaded, *crops)]
        pixels = self.settings.numbers(np.stack([np.asarray(each) for each in pictures]))
        return PromptImage(
            length=self.joint,
            digest=digest_of(pixels=pixels),
            pixels=pixels,
            size=(loaded.height, loaded.width),
            text=WITH_CROPS.format(PLACE, " ".join([PLACE] * len(crops))) if crops else "",
            placeholder_rows=(self.joint,) * len(pictures),
            joint=True,
        )

    def _cropped(self, image: Image.Image) -> list[Image.Image]:
        """Return crops along the longer side of an image, or none if it is nearly square or too small."""
        long, short = max(image.size), min(image.size)
        if long / short < self._min_ratio:
            return []
        count = min(max(2, min(long // self._min_side, math.floor(long / short + 0.5))), self._max_crops)
        step = math.ceil(long / count)
        if min(step, short) < self._min_side:
            return []
        starts = [step * index for index in range(count)]
        if image.width >= image.height:
            return [image.crop((at, 0, min(at + step, image.width), image.height)) for at in starts]
        return [image.crop((0, at, image.width, min(at + step, image.height))) for at in starts]
