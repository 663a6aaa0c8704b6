"""LLaVA-OneVision: images as LLaVA-NeXT has them, and videos whose frames have a quarter of the tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from asyncllm.prompt_image import PromptImage
from asyncllm.vl.loading import load_image
from asyncllm.vl.processing.clip import AnyresProcessor
from asyncllm.vl.processing.sampling import Asked, asked_of, check_numbers, check_taken
from asyncllm.vl.processing.settings import PictureSettings, digest_of, is_low, padded_square, refuse_options, resized
from asyncllm.vl.video_files import Recording, open_clip

__all__ = ["OneVisionImages", "OneVisionProcessor"]

FRAMES = 32
"""Frames shown of a video file by default."""


class OneVisionImages(AnyresProcessor):
    """Each of several images is made a square by bars of the mean colour and not tiled, and has one more token behind
    it."""

    most_cut = 1

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
    """Pixels of a video are [1, frames, 3, side, side], and its tokens have one more behind them."""

    def __init__(self, settings: PictureSettings, *, video_token_id: int, **given: Any) -> None:
        """`given`: as `AnyresProcessor` takes it."""
        super().__init__(settings, **given)
        self.video_token_id = video_token_id

    def prepare_video(self, video: Any, options: Mapping[str, Any]) -> PromptImage:
        """Show a list of frames as it is; of a file `fps` frames a second, or `num_frames` (32), from the beginning on.

        Raises InvalidMessage, InvalidParameter, UnsupportedFeature as `prepare`.
        """
        asked = asked_of(options)
        with open_clip(video, lambda recording: _chosen(recording, asked)) as clip:
            if clip.rate is None:
                asked.check_list()
            count, side = len(clip.indices), self._tile
            check_numbers(count, side, side)
            frames = [np.asarray(resized(frame, side, side, self.settings.resample)) for frame in clip.frames]
        pixels = self.settings.numbers(np.stack(frames))[None]
        return PromptImage(
            length=count * (-(-self._patches // 2)) ** 2 + 1,
            digest=digest_of("video", pixels=pixels),
            pixels=pixels,
            size=(clip.height, clip.width),
            text="<video>\n",
        )


def _chosen(recording: Recording, asked: Asked) -> list[int]:
    total = recording.total
    count = asked.num_frames or min(FRAMES, total)
    if asked.fps is not None:
        count = max(int(total / recording.rate * asked.fps), 1)
    check_taken(count, total)
    return [int(number * (total / count)) for number in range(count)]
