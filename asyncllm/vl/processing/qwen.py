"""Images of any size for Qwen's towers (Wang et al., 2024): scaled to whole squares of patches, within bounds of
pixels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from asyncllm.errors import InvalidMessage, InvalidParameter, short
from asyncllm.prompt_image import ImageProcessor, PromptImage
from asyncllm.vl.loading import load_image
from asyncllm.vl.processing.options import refuse_options
from asyncllm.vl.processing.pictures import cut_squares, digest_of, resized
from asyncllm.vl.processing.settings import PictureSettings

__all__ = ["FlatProcessor", "Glm4vProcessor", "PaddleOcrVlProcessor", "QwenProcessor", "whole_squares"]

MAX_RATIO = 200


def whole_squares(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int, *, frames: int = 1, whole: int | None = None
) -> tuple[int, int]:
    """Return the height and width nearest to an image's that are multiples of `factor` and within the bounds, which
    apply to `frames` frames together. `whole`: the number of frames in whole steps, by which it is decided whether they
    are scaled.

    Raises InvalidMessage if the image is more than 200 times as long as wide.
    """
    if max(height, width) > MAX_RATIO * min(height, width):
        raise InvalidMessage(
            f"The image of {width} x {height} is more than {MAX_RATIO} times as long as wide. Cut it into several."
        )
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    pixels = (frames if whole is None else whole) * rows * columns
    if pixels > max_pixels:
        scale = math.sqrt(frames * height * width / max_pixels)
        rows = max(factor, math.floor(height / scale / factor) * factor)
        columns = max(factor, math.floor(width / scale / factor) * factor)
    elif pixels < min_pixels:
        scale = math.sqrt(min_pixels / (frames * height * width))
        rows, columns = math.ceil(height * scale / factor) * factor, math.ceil(width * scale / factor) * factor
    return rows, columns


class QwenProcessor(ImageProcessor):
    """Pixels [patches, 3, patch * patch], ordered by the squares of patches that become a token each."""

    def __init__(self, settings: PictureSettings, *, token_id: int, placeholder: str) -> None:
        self.settings, self.token_id, self.placeholder = settings, token_id, placeholder
        self.patch = settings.integer("patch_size", 14, maximum=1024)
        self.merge = settings.integer("merge_size", 2, maximum=64)
        size = settings.fields.get("size") or {}
        min_pixels = size.get("shortest_edge") or size.get("min_pixels") or 56 * 56
        max_pixels = size.get("longest_edge") or size.get("max_pixels") or 28 * 28 * 1280
        self._min_pixels = settings.integer("min_pixels", min_pixels)
        self._max_pixels = settings.integer("max_pixels", max_pixels)

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        refuse_options(options, "min_pixels", "max_pixels")
        min_pixels, max_pixels = self.bounds(options)
        loaded = load_image(image)
        patch, merge = self.patch, self.merge
        height, width = self._size(loaded.height, loaded.width, min_pixels, max_pixels)
        patches = cut_squares(resized(loaded, height, width, self.settings.resample), patch, merge)
        rows, columns = height // patch // merge, width // patch // merge
        return PromptImage(
            length=rows * columns,
            digest=digest_of(rows, columns, pixels=patches),
            pixels=self.settings.numbers(patches).reshape(-1, 3, patch * patch),
            grid=(rows, columns),
            size=(loaded.height, loaded.width),
        )

    def bounds(self, options: Mapping[str, Any]) -> tuple[int, int]:
        """Return the minimum and maximum number of pixels for the options of an image. Raises InvalidParameter."""
        return (
            self._bound(options, "min_pixels", self._min_pixels),
            self._bound(options, "max_pixels", self._max_pixels),
        )

    def _size(self, height: int, width: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
        """Return the height and width to which an image is scaled, within these bounds of pixels."""
        return whole_squares(height, width, self.patch * self.merge, min_pixels, max_pixels)

    def _bound(self, options: Mapping[str, Any], name: str, usual: int) -> int:
        """Return a bound, which an image's options may narrow. Raises InvalidParameter."""
        value = options.get(name, usual)
        if type(value) is not int or not self._min_pixels <= value <= self._max_pixels:
            raise InvalidParameter(
                f"{name}={short(value)} is not between {self._min_pixels} and {self._max_pixels} pixels, the model's "
                f"own bounds.",
                "messages",
            )
        return value


class FlatProcessor(QwenProcessor):
    """For decoders that give an image's tokens consecutive positions, without rows and columns (EXAONE 4.5,
    dots.ocr)."""

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        squares = super().prepare(image, options)
        assert squares.grid is not None
        rows, columns = squares.grid
        return msgspec.structs.replace(squares, grid=None, pictures=((rows * self.merge, columns * self.merge),))


class Glm4vProcessor(QwenProcessor):
    """Bounds of pixels apply to all of the equal frames as which the tower receives an image, and a small image is
    first enlarged to a square of patches (GLM-4.1V)."""

    def __init__(self, settings: PictureSettings, *, token_id: int, placeholder: str) -> None:
        super().__init__(settings, token_id=token_id, placeholder=placeholder)
        self._frames = settings.integer("temporal_patch_size", 2, maximum=64)

    def _size(self, height: int, width: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
        factor, short = self.patch * self.merge, min(height, width)
        if short < factor:
            height, width = int(height * (factor / short)), int(width * (factor / short))
        return whole_squares(height, width, factor, min_pixels, max_pixels, frames=self._frames)


class PaddleOcrVlProcessor(QwenProcessor):
    """A small image is first enlarged to a square of patches along each side (PaddleOCR-VL)."""

    def _size(self, height: int, width: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
        factor = self.patch * self.merge
        if height < factor:
            height, width = factor, round(width * factor / height)
        if width < factor:
            height, width = round(height * factor / width), factor
        return whole_squares(height, width, factor, min_pixels, max_pixels)
