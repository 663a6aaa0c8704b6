"""Videos for the towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: frames of one size, several of which form a step in
time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from asyncllm.prompt_image import PromptImage
from asyncllm.vl.processing.frames import MAX_FRAMES, check_frame_count, check_frame_sizes, frame_options
from asyncllm.vl.processing.pictures import Pixels, digest_of, resized
from asyncllm.vl.processing.qwen import QwenProcessor, whole_squares
from asyncllm.vl.processing.settings import PictureSettings
from asyncllm.vl.video_files import Clip, Recording, open_clip

__all__ = ["Qwen3VideoProcessor", "QwenVideoProcessor"]

FRAMES_PER_SECOND = 2.0
"""Default frames per second: the rate of a list of frames, and the number taken from a file."""
LEAST_FRAMES = 4
"""Minimum number of frames taken from a file that has them."""
MAX_TOKENS = 115_200
"""Number of squares of patches of a whole video above which its frames are downscaled."""


class QwenVideoProcessor(QwenProcessor):
    """Also prepares videos, with pixels [patches, 3, frames, patch * patch]: a patch spans several frames."""

    def __init__(
        self,
        settings: PictureSettings,
        *,
        token_id: int,
        placeholder: str,
        video_settings: PictureSettings,
        video_token_id: int,
        video_placeholder: str,
        tokens_per_second: float | None,
    ) -> None:
        """`video_settings`: the settings of videos, whose bounds may differ. `tokens_per_second`: positions per second,
        or None for one position per step."""
        super().__init__(settings, token_id=token_id, placeholder=placeholder)
        self.video_token_id = video_token_id
        self._video = QwenProcessor(video_settings, token_id=video_token_id, placeholder=video_placeholder)
        self._frames = video_settings.integer("temporal_patch_size", 2, maximum=64)
        self._tokens_per_second = tokens_per_second

    def prepare_video(self, video: Any, options: Mapping[str, Any]) -> PromptImage:
        """Use all frames of a list, whose rate is `fps`, but of a file `fps` frames per second or `num_frames`. The
        last frame is repeated to complete a step.

        Raises InvalidMessage, InvalidParameter, UnsupportedFeature.
        """
        wanted = frame_options(options, "min_pixels", "max_pixels")
        min_pixels, max_pixels = self._video.bounds(options)
        with open_clip(video, lambda recording: self._chosen(recording, wanted.fps, wanted.num_frames)) as clip:
            if clip.rate is None:
                wanted.check_list()
            count = len(clip.indices) + -len(clip.indices) % self._frames
            height, width = self._shown_size(len(clip.indices), clip.height, clip.width, min_pixels, max_pixels)
            check_frame_sizes(count, height, width)
            pixels = self._cut(clip, count, height, width)
        factor = self._video.patch * self._video.merge
        grid = height // factor, width // factor
        rate = wanted.fps or FRAMES_PER_SECOND
        if clip.rate is None:
            seconds = [index / rate for index in clip.indices]
        else:
            seconds = [index / clip.rate for index in clip.indices]
            rate = len(clip.indices) / clip.total * clip.rate
        return self._image(pixels, grid, (clip.height, clip.width), seconds, rate)

    def _chosen(self, recording: Recording, fps: float | None, num_frames: int | None) -> Sequence[int]:
        """Return the indices of the frames to take from a recording. Raises InvalidParameter."""
        step, total = self._frames, recording.total
        if num_frames is None:
            whole = max(min(MAX_FRAMES, total) // step * step, 1)
            wanted = total / recording.rate * (fps or FRAMES_PER_SECOND)
            count = max(math.floor(min(max(wanted, LEAST_FRAMES), whole) / step) * step, 1)
        else:
            count = max(round(num_frames / step) * step, 1)
        check_frame_count(count, total)
        return [int(number * (total / count)) for number in range(count)]

    def _shown_size(self, count: int, height: int, width: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
        """Return the height and width to which `count` frames are scaled."""
        factor = self._video.patch * self._video.merge
        share = MAX_TOKENS * factor**2 * self._frames // count
        return whole_squares(height, width, factor, min_pixels, max(min(max_pixels, share), int(min_pixels * 1.05)))

    def _image(
        self,
        pixels: Pixels,
        grid: tuple[int, int],
        size: tuple[int, int],
        seconds: Sequence[float],
        rate: float,
    ) -> PromptImage:
        """Return the prepared video. `grid`: rows and columns of squares. `size`: height and width before scaling.
        `seconds`: the time of each frame. `rate`: frames per second."""
        rows, columns = grid
        steps = len(pixels) // (rows * columns * self._video.merge**2)
        interval = 1.0 if self._tokens_per_second is None else self._tokens_per_second * self._frames / rate
        return PromptImage(
            length=steps * rows * columns,
            digest=digest_of("video", steps, rows, columns, interval, pixels=pixels),
            pixels=pixels,
            grid=grid,
            steps=steps,
            interval=interval,
            size=size,
            text=self._video.placeholder,
        )

    def _cut(self, clip: Clip, count: int, height: int, width: int) -> Pixels:
        """Return the patches of a clip, scaled to this size, with the last frame repeated up to `count` frames."""
        settings, patch, merge, depth = self._video.settings, self._video.patch, self._video.merge, self._frames
        rows, columns = height // patch // merge, width // patch // merge
        pixels = np.empty((count // depth, rows * columns * merge**2, 3, depth, patch**2), np.float32)
        frames = [np.asarray(resized(frame, height, width, settings.resample)) for frame in clip.frames]
        frames += [frames[-1]] * (count - len(frames))
        for step, cut in enumerate(pixels):
            numbers = settings.numbers(np.stack(frames[step * depth : (step + 1) * depth]))
            squares = numbers.reshape(depth, 3, rows, merge, patch, columns, merge, patch)
            cut[:] = squares.transpose(2, 5, 3, 6, 1, 0, 4, 7).reshape(cut.shape)
        return pixels.reshape(-1, 3, depth, patch**2)


class Qwen3VideoProcessor(QwenVideoProcessor):
    """Each step has a placeholder of its own in the prompt, after its time in seconds, and bounds of pixels apply to
    all frames together."""

    def _chosen(self, recording: Recording, fps: float | None, num_frames: int | None) -> Sequence[int]:
        total = recording.total
        if num_frames is None:
            wanted = int(total / recording.rate * (fps or FRAMES_PER_SECOND))
            num_frames = min(max(wanted, LEAST_FRAMES), MAX_FRAMES, total)
        check_frame_count(num_frames, total)
        return [int(each) for each in np.linspace(0, total - 1, num_frames).round()]

    def _shown_size(self, count: int, height: int, width: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
        factor = self._video.patch * self._video.merge
        short = min(height, width)
        if short < factor:
            height, width = int(height * (factor / short)), int(width * (factor / short))
        # transformers rounds half a step to an even number of them.
        whole = max(round(count / self._frames), 1) * self._frames
        return whole_squares(height, width, factor, min_pixels, max_pixels, frames=count, whole=whole)

    def _image(
        self,
        pixels: Pixels,
        grid: tuple[int, int],
        size: tuple[int, int],
        seconds: Sequence[float],
        rate: float,
    ) -> PromptImage:
        rows, columns = grid
        steps = len(pixels) // (rows * columns * self._video.merge**2)
        whole = [*seconds, *[seconds[-1]] * (steps * self._frames - len(seconds))]
        ends = zip(whole[:: self._frames], whole[self._frames - 1 :: self._frames], strict=True)
        return PromptImage(
            length=steps * rows * columns,
            digest=digest_of("video", steps, rows, columns, pixels=pixels),
            pixels=pixels,
            grid=grid,
            steps=steps,
            size=size,
            placeholder_rows=(rows * columns,) * steps,
            separate=True,
            text="".join(f"<{(first + last) / 2:.1f} seconds>{self._video.placeholder}" for first, last in ends),
        )
