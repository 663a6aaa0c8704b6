"""Selection of a video's frames: options of a request, bounds, and frames of square pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from asyncllm.errors import InvalidMessage, InvalidParameter, short
from asyncllm.text.image_marks import MAX_FRAMES
from asyncllm.vl.processing.options import refuse_options
from asyncllm.vl.processing.pictures import resized
from asyncllm.vl.video_files import Recording, open_clip

__all__ = ["MAX_FRAMES", "FrameOptions", "check_frame_count", "check_frame_sizes", "frame_options", "read_frames"]

MAX_FRAMES_PER_SECOND = 1000.0
MAX_NUMBERS = 2**28
"""Maximum number of values of all frames together, three per pixel: a GiB in float32."""


class FrameOptions(NamedTuple):
    """The options of a request that select frames."""

    fps: float | None
    num_frames: int | None

    def check_list(self) -> None:
        """Raise InvalidParameter if options for files are set for a list of frames."""
        if self.num_frames is not None:
            raise InvalidParameter(
                "num_frames says how many frames of a file are shown, and a list of frames is shown as it is. Leave "
                "it out.",
                "messages",
            )


def frame_options(options: Mapping[str, Any], *known: str) -> FrameOptions:
    """Read the options that select frames. Raises InvalidParameter, also for options that are neither these nor
    `known`."""
    refuse_options(options, "fps", "num_frames", *known)
    fps, num_frames = options.get("fps"), options.get("num_frames")
    if fps is not None and (
        isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= MAX_FRAMES_PER_SECOND
    ):
        raise InvalidParameter(
            f"fps={short(fps)} is not a number of frames a second above 0 and up to {MAX_FRAMES_PER_SECOND:g}.",
            "messages",
        )
    if num_frames is not None and (type(num_frames) is not int or not 1 <= num_frames <= MAX_FRAMES):
        raise InvalidParameter(f"num_frames={short(num_frames)} is not from 1 to {MAX_FRAMES} frames.", "messages")
    if fps is not None and num_frames is not None:
        raise InvalidParameter("fps and num_frames both say which frames are shown. Send one of them.", "messages")
    return FrameOptions(fps, num_frames)


def check_frame_count(count: int, total: int) -> None:
    """Raise InvalidParameter if more frames are requested than the file has, or than any video may have."""
    if count > total:
        raise InvalidParameter(f"{count} frames are asked for, and the video has {total}. Ask for fewer.", "messages")
    if count > MAX_FRAMES:
        raise InvalidParameter(f"{count} frames are asked for, more than {MAX_FRAMES}. Ask for fewer.", "messages")


def check_frame_sizes(count: int, height: int, width: int) -> None:
    """Raise InvalidMessage if the selected frames are too large together."""
    if 3 * count * height * width > MAX_NUMBERS:
        raise InvalidMessage(
            f"The video is shown as {count} frames of {width} x {height}, more than {MAX_NUMBERS // 3} pixels. Ask for "
            f"a lower fps, num_frames or max_pixels."
        )


def read_frames(
    video: Any,
    options: Mapping[str, Any],
    side: int,
    resample: Image.Resampling,
    *,
    usual: int,
    offset: float = 0.0,
) -> tuple[NDArray[np.uint8], tuple[int, int]]:
    """Return the selected frames, resized to squares [frames, side, side, 3], and the video's height and width.

    All frames of a list are used, but of a file `fps` frames per second or `num_frames` (default `usual`): one of each
    equal part of the duration, at `offset` of the part. Raises InvalidMessage, InvalidParameter, UnsupportedFeature.
    """
    wanted = frame_options(options)

    def choose(recording: Recording) -> list[int]:
        total = recording.total
        count = wanted.num_frames or min(usual, total)
        if wanted.fps is not None:
            count = max(int(total / recording.rate * wanted.fps), 1)
        check_frame_count(count, total)
        return [int((number + offset) * (total / count)) for number in range(count)]

    with open_clip(video, choose) as clip:
        if clip.rate is None:
            wanted.check_list()
        check_frame_sizes(len(clip.indices), side, side)
        frames = [np.asarray(resized(frame, side, side, resample)) for frame in clip.frames]
        return np.stack(frames), (clip.height, clip.width)
