"""Square pictures for DeepSeek-VL: the whole image, in two sizes for the 7B, and also tiles for DeepSeek-VL2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from asyncllm.prompt_image import ImageProcessor, PromptImage
from asyncllm.vl.loading import load_image
from asyncllm.vl.processing.anyres import best_resolution
from asyncllm.vl.processing.clip import CenterProcessor
from asyncllm.vl.processing.options import is_low, refuse_options
from asyncllm.vl.processing.pictures import crops_of, digest_of, resized
from asyncllm.vl.processing.settings import PictureSettings

__all__ = ["DeepseekVl2Processor", "DeepseekVlHybridProcessor", "DeepseekVlProcessor"]


class DeepseekVlProcessor(CenterProcessor):
    """The whole image, padded to a square with the mean colour."""

    def squared(self, image: Image.Image) -> Image.Image:
        edge, min_side, longest = self.edge, self.settings.integer("min_size", 14), max(image.size)
        if self.settings.fields.get("image_processor_type") == "VLMImageProcessor":
            # The authors' processor rounds down.
            width, height = (max(int(each / longest * edge), min_side) for each in image.size)
        else:
            width, height = (max(round(each * (edge / longest)), min_side) for each in image.size)
        side = max(width, height)
        canvas = Image.new("RGB", (side, side), self.settings.background)
        canvas.paste(resized(image, height, width, self.settings.resample), ((side - width) // 2, (side - height) // 2))
        return canvas


class DeepseekVlHybridProcessor(DeepseekVlProcessor):
    """The whole image in two sizes, the smaller one scaled from the larger one. Pixels are flat: the larger picture,
    then the smaller one (DeepSeek-VL 7B)."""

    def __init__(
        self,
        settings: PictureSettings,
        *,
        large: DeepseekVlProcessor,
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


class DeepseekVl2Processor(ImageProcessor):
    """Pixels [1 + rows * columns, 3, side, side]: the downscaled whole image, and its tiles in the best candidate
    shape, all padded with the mean colour. In a conversation of many images each has a single tile."""

    max_cut_images = 2

    def __init__(
        self,
        settings: PictureSettings,
        *,
        token_id: int,
        placeholder: str,
        tokens: int,
        shapes: Sequence[tuple[int, int]],
    ) -> None:
        """`tokens`: tokens along a side of a tile. `shapes`: the candidate heights and widths, that of a single tile
        first."""
        self.settings, self.token_id, self.placeholder = settings, token_id, placeholder
        self._tokens, self._shapes, self._side = tokens, shapes, shapes[0][0]

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        refuse_options(options, "detail")
        loaded, side = load_image(image), self._side
        size = (loaded.height, loaded.width)
        height, width = (side, side) if is_low(options) else best_resolution(size, self._shapes)
        pictures = [self._padded(loaded, side, side), *crops_of(self._padded(loaded, height, width), side, side)]
        pixels = self.settings.numbers(np.stack([np.asarray(each) for each in pictures]))
        rows, columns, tokens = height // side, width // side, self._tokens
        return PromptImage(
            length=tokens * (tokens + 1) + 1 + rows * tokens * (columns * tokens + 1),
            digest=digest_of(rows, pixels=pixels),
            pixels=pixels,
            size=size,
            tiles=(rows, columns),
        )

    def _padded(self, image: Image.Image, height: int, width: int) -> Image.Image:
        return ImageOps.pad(image, (width, height), self.settings.resample, self.settings.background)
