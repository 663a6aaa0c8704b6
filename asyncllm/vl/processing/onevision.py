"""LLaVA-OneVision (Li et al., 2024): images as in LLaVA-NeXT, and videos whose frames have a quarter of the tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from asyncllm.prompt_image import PromptImage
from asyncllm.vl.loading import load_image
from asyncllm.vl.processing.clip import AnyresProcessor
from asyncllm.vl.processing.frames import read_frames
from asyncllm.vl.processing.options import is_low, refuse_options
from asyncllm.vl.processing.pictures import digest_of, padded_square, resized
from asyncllm.vl.processing.settings import PictureSettings

__all__ = ["OneVisionImages", "OneVisionProcessor"]

FRAMES = 32
"""Default number of frames taken from a video file."""


class OneVisionImages(AnyresProcessor):
    """In a conversation of several images each is padded to a square with the mean colour and not tiled. A newline
    token follows each image."""

    max_cut_images = 1

    def prepare(self, image: Any, options: Mapping[str, Any]) -> PromptImage:
        refuse_options(options, "detail")
        if not is_low(options):
            return super().prepare(image, {})
        loaded = load_image(image)
        whole = resized(padded_square(loaded, self.settings.background), self.edge, self.edge, self.settings.resample)
        pixels = self.settings.numbers(np.asarray(whole)[None])
        return PromptImage(
            length=self._patches**2 + 1,
            digest=digest_of(pixels=pixels),
            pixels=pixels,
            size=(loaded.height, loaded.width),
        )


class OneVisionProcessor(OneVisionImages):
    """Also prepares videos, with pixels [1, frames, 3, side, side] and a newline token after the last frame."""

    def __init__(self, settings: PictureSettings, *, video_token_id: int, **given: Any) -> None:
        """`given`: the arguments of `AnyresProcessor`."""
        super().__init__(settings, **given)
        self.video_token_id = video_token_id

    def prepare_video(self, video: Any, options: Mapping[str, Any]) -> PromptImage:
        """Use all frames of a list, but of a file `fps` frames per second or `num_frames` (default 32), evenly spaced
        from the first.

        Raises InvalidMessage, InvalidParameter, UnsupportedFeature.
        """
        frames, size = read_frames(video, options, self._tile, self.settings.resample, usual=FRAMES)
        pixels = self.settings.numbers(frames)[None]
        return PromptImage(
            length=len(frames) * (-(-self._patches // 2)) ** 2 + 1,
            digest=digest_of("video", pixels=pixels),
            pixels=pixels,
            size=size,
            text="<video>\n",
        )
