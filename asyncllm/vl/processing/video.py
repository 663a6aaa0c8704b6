"""Videos for the towers of Qwen2-VL and Qwen2.5-VL: frames of one size, of which some become a step in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from asyncllm.errors import InvalidMessage, InvalidParameter, short
from asyncllm.protocol import PromptImage
from asyncllm.vl.loading import load_image
from asyncllm.vl.processing.qwen import DynamicProcessor, whole_squares
from asyncllm.vl.processing.settings import PictureSettings, digest_of, refuse_options, resized

__all__ = ["QwenVideoProcessor"]

FRAMES_PER_SECOND = 2.0
"""Of a list of frames that does not say."""
MAX_FRAMES_PER_SECOND = 1000.0


class QwenVideoProcessor(DynamicProcessor):
    """Images as ever, and videos. Patches of a video [count, 3, frames, patch * patch] go through several frames."""

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
        """`video_settings`: of videos, which may have bounds of their own. `tokens_per_second`: positions along time;
        None: a step is one."""
        super().__init__(settings, token_id=token_id, placeholder=placeholder)
        self.video_token_id = video_token_id
        self._video = DynamicProcessor(video_settings, token_id=video_token_id, placeholder=video_placeholder)
        self._frames = video_settings.integer("temporal_patch_size", 2, maximum=64)
        self._tokens_per_second = tokens_per_second

    def prepare_video(self, frames: Sequence[Any], options: Mapping[str, Any]) -> PromptImage:
        """Frames of other sizes than the first one's are refused; the last one is repeated to a whole step.

        Raises InvalidMessage, InvalidParameter, UnsupportedFeature as `prepare`.
        """
        refuse_options(options, "min_pixels", "max_pixels", "fps")
        interval = self._interval(options.get("fps", FRAMES_PER_SECOND))
        least, most = self._video.bounds(options)
        loaded = [load_image(frame) for frame in frames]
        if len({frame.size for frame in loaded}) != 1:
            raise InvalidMessage("The frames of a video are of one size, and there is at least one. Scale them alike.")
        loaded += [loaded[-1]] * (-len(loaded) % self._frames)
        settings, patch, merge = self._video.settings, self._video.patch, self._video.merge
        size = (loaded[0].height, loaded[0].width)
        height, width = whole_squares(*size, patch * merge, least, most)
        pictures = np.stack([np.asarray(resized(frame, height, width, settings.resample)) for frame in loaded])
        steps, rows, columns = len(loaded) // self._frames, height // patch // merge, width // patch // merge
        numbers = settings.numbers(pictures).reshape(steps, self._frames, 3, rows, merge, patch, columns, merge, patch)
        cut = numbers.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
        pixels = np.ascontiguousarray(cut).reshape(-1, 3, self._frames, patch * patch)
        return PromptImage(
            length=steps * rows * columns,
            digest=digest_of("video", steps, rows, columns, interval, pixels=pixels),
            pixels=pixels,
            grid=(rows, columns),
            steps=steps,
            interval=interval,
            size=size,
            text=self._video.placeholder,
        )

    def _interval(self, fps: object) -> float:
        """Return the positions from one step to the next. Raises InvalidParameter."""
        if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= MAX_FRAMES_PER_SECOND:
            raise InvalidParameter(
                f"fps={short(fps)} is no number of frames a second from above 0 to {MAX_FRAMES_PER_SECOND:g}.",
                "messages",
            )
        return 1.0 if self._tokens_per_second is None else self._tokens_per_second * self._frames / fps
