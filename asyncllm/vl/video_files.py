"""Frames of videos, from a file or a list of images.

Files are read by PyAV, an optional dependency (`pip install asyncllm[video]`). A file may be untrusted. Therefore the
container format is determined here and limited to a few, since some formats refer to other addresses, and the amount of
decoding is bounded before it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import Any, NamedTuple

from PIL import Image

from asyncllm.errors import InvalidMessage, UnsupportedFeature
from asyncllm.vl.loading import MAX_IMAGE_BYTES, load_image, media_bytes

__all__ = ["MAX_VIDEO_PIXELS", "Choose", "Clip", "Recording", "open_clip"]

MAX_VIDEO_SECONDS = 3600
MAX_VIDEO_PIXELS = 2**34
"""Maximum number of pixels to decode, which takes half a minute of one core: 8,000 frames of 1920 x 1080, 41,000 of
640 x 640."""

_CONTAINERS = ("AVI", "Matroska", "MP4", "QuickTime", "WebM")


class Recording(NamedTuple):
    """The properties of a video from which frames are chosen."""

    total: int
    """Number of frames."""
    rate: float
    """Frames per second."""


Choose = Callable[[Recording], Sequence[int]]
"""Returns the ascending indices of the frames to show. Raises InvalidParameter."""


class Clip(NamedTuple):
    """The chosen frames of a video, all of one size."""

    height: int
    width: int
    indices: Sequence[int]
    rate: float | None
    """Frames per second of the recording that `indices` refer to; None for a list of frames."""
    total: int
    """Number of frames of the recording."""
    frames: Iterator[Image.Image]
    """RGB frames, in order."""


@contextmanager
def open_clip(video: Any, choose: Choose) -> Iterator[Clip]:
    """Open a list of frames, each an input of `load_image`, or a file: a path, an http(s) or `data:` URL, or bytes.

    All frames of a list are used; `choose` selects those of a file. Raises InvalidMessage, UnsupportedFeature, and the
    errors of `choose`.
    """
    if isinstance(video, list | tuple):
        frames = [load_image(frame) for frame in video]
        if len({frame.size for frame in frames}) != 1:
            raise InvalidMessage("A video is one frame or more, all of one size. Scale them alike.")
        first, count = frames[0], len(frames)
        yield Clip(first.height, first.width, range(count), None, count, iter(frames))
        return
    data = media_bytes(video, "video")
    form = _container_of(data)
    av = _library()
    try:
        with av.open(BytesIO(data), mode="r", format=form) as container:
            yield _clip_of(container, choose)
    except av.FFmpegError as error:
        raise _broken(error) from None


def _library() -> Any:
    try:
        import av
    except ImportError:
        raise UnsupportedFeature(
            "Video files are read by PyAV, which is not installed. Install it with `pip install asyncllm[video]`, "
            "or send some of the video's frames as a list.",
            "messages",
        ) from None
    return av


def _container_of(data: bytes) -> str:
    """Return FFmpeg's name of a file's container format, recognized by the first bytes. Raises InvalidMessage."""
    if len(data) > MAX_IMAGE_BYTES:
        raise InvalidMessage(f"The video has more than {MAX_IMAGE_BYTES} bytes. Send a smaller one.")
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "mov"
    if data.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"
    if data.startswith(b"RIFF") and data[8:12] == b"AVI ":
        return "avi"
    raise InvalidMessage(
        f"The video's {len(data)} bytes are in no container that is supported. Send one of: "
        f"{', '.join(_CONTAINERS)}; or some of its frames as a list."
    )


def _clip_of(container: Any, choose: Choose) -> Clip:
    if not container.streams.video:
        raise InvalidMessage("The file has no video stream. Send a file with one.")
    stream = container.streams.video[0]
    context = stream.codec_context
    # Requests run in parallel, so one decoder need not.
    context.thread_count = 1
    height, width, rate = context.height, context.width, float(stream.average_rate or 0)
    if height < 1 or width < 1 or not 0 < rate <= 1000:
        raise InvalidMessage("The video's size or frame rate is missing or out of range. Save it again.")
    total = sum(packet.size > 0 for packet in container.demux(stream))
    if not total:
        raise InvalidMessage("The video has no frames. Send the whole file.")
    if total > MAX_VIDEO_SECONDS * rate:
        raise InvalidMessage(f"The video is longer than {MAX_VIDEO_SECONDS} seconds. Send a part of it.")
    indices = list(choose(Recording(total, rate)))
    if (indices[-1] + 1) * height * width > MAX_VIDEO_PIXELS:
        raise InvalidMessage(
            f"The video has {total} frames of {width} x {height}, and at most {MAX_VIDEO_PIXELS} pixels are decoded. "
            f"Send a shorter or a smaller one."
        )
    container.seek(0)
    return Clip(height, width, indices, rate, total, _chosen(container, stream, indices))


def _chosen(container: Any, stream: Any, indices: Sequence[int]) -> Iterator[Image.Image]:
    """Yield the frames at these ascending indices. The previous frame replaces a missing one."""
    place, last = 0, None
    size = (stream.codec_context.width, stream.codec_context.height)
    for number, frame in enumerate(container.decode(stream)):
        if place < len(indices) and indices[place] <= number:
            last = frame.to_image()
            if last.size != size:
                raise InvalidMessage("The video's frames change their size. Save it again with one.")
        while place < len(indices) and indices[place] <= number:
            assert last is not None
            yield last
            place += 1
        if place == len(indices):
            return
    if last is None:
        raise InvalidMessage("The video has no frame that can be decoded. Send the whole file.")
    for _ in range(place, len(indices)):
        yield last


def _broken(error: BaseException) -> InvalidMessage:
    return InvalidMessage(f"The video is broken or in an unsupported format ({error}). Save it again as MP4.")
