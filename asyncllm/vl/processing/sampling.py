"""The choice of a video's frames: options of requests, and bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from asyncllm.errors import InvalidMessage, InvalidParameter, short
from asyncllm.text.image_marks import MAX_FRAMES
from asyncllm.vl.processing.settings import refuse_options

__all__ = ["MAX_FRAMES", "Asked", "asked_of", "check_numbers", "check_taken"]

MAX_FRAMES_PER_SECOND = 1000.0
MAX_NUMBERS = 2**28
"""Most numbers of all shown frames, three for a pixel: a GiB in float32."""


class Asked(NamedTuple):
    """The options of a request for its video."""

    fps: float | None
    num_frames: int | None

    def check_list(self) -> None:
        """Raise InvalidParameter for options that apply to files only."""
        if self.num_frames is not None:
            raise InvalidParameter(
                "num_frames says how many frames of a file are shown, and a list of frames is shown as it is. Leave "
                "it out.",
                "messages",
            )


def asked_of(options: Mapping[str, Any], *known: str) -> Asked:
    """Return the choice of frames of a video. Raises InvalidParameter, also for options that are neither about this nor
    `known`."""
    refuse_options(options, "fps", "num_frames", *known)
    fps, num_frames = options.get("fps"), options.get("num_frames")
    if fps is not None and (
        isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= MAX_FRAMES_PER_SECOND
    ):
        raise InvalidParameter(
            f"fps={short(fps)} is no number of frames a second from above 0 to {MAX_FRAMES_PER_SECOND:g}.", "messages"
        )
    if num_frames is not None and (type(num_frames) is not int or not 1 <= num_frames <= MAX_FRAMES):
        raise InvalidParameter(f"num_frames={short(num_frames)} is not from 1 to {MAX_FRAMES} frames.", "messages")
    if fps is not None and num_frames is not None:
        raise InvalidParameter("fps and num_frames both say which frames are shown. Send one of them.", "messages")
    return Asked(fps, num_frames)


def check_taken(count: int, total: int) -> None:
    """Raise InvalidParameter for more frames than a file has, or than any video may have."""
    if count > total:
        raise InvalidParameter(f"{count} frames are asked for, and the video has {total}. Ask for fewer.", "messages")
    if count > MAX_FRAMES:
        raise InvalidParameter(f"{count} frames are asked for, more than {MAX_FRAMES}. Ask for fewer.", "messages")


def check_numbers(count: int, height: int, width: int) -> None:
    """Raise InvalidMessage if the shown frames are too large together."""
    if 3 * count * height * width > MAX_NUMBERS:
        raise InvalidMessage(
            f"The video is shown as {count} frames of {width} x {height}, more than {MAX_NUMBERS // 3} pixels. Ask for "
            f"a lower fps, num_frames or max_pixels."
        )
