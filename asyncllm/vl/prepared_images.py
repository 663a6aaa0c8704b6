"""PreparedImages: a cache of prepared images, which saves decoding and scaling an image that is sent again."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncllm.prompt_image import ImageProcessor, PromptImage, VideoProcessor
from asyncllm.text.image_marks import is_data_url
from asyncllm.vl.loading import load_image, media_bytes

__all__ = ["PreparedImages"]

MAX_KEPT_BYTES = 2**28
"""Maximum number of bytes of pixels: 8 images of 13 tiles of 448 x 448 pixels, or 200 of one tile."""


class PreparedImages:
    """Keeps the most recently used images that fit. Thread-safe."""

    def __init__(self, processor: ImageProcessor, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self.processor = processor
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        """Held for the two fields below."""
        self._kept: OrderedDict[bytes, PromptImage] = OrderedDict()
        """Key -> image, the most recently used last."""
        self._num_bytes = 0

    def prepare(
        self, image: Any, options: Mapping[str, Any], cache_salt: str | None = None, *, is_video: bool = False
    ) -> PromptImage:
        """Return the result of the processor's `prepare` or `prepare_video`, with a digest that depends on the salt.

        Files and addresses are read each time, since they may change. Raises the processor's errors.
        """
        source, parts = _read(image, is_video)
        hashed = hashlib.sha256(repr((cache_salt, is_video, sorted(options.items()), len(parts))).encode(*_ANY))
        for part in parts:
            hashed.update(hashlib.sha256(part).digest())
        key = hashed.digest()
        with self._lock:
            known = self._kept.get(key)
            if known is not None:
                self._kept.move_to_end(key)
                return known
        if is_video:
            assert isinstance(self.processor, VideoProcessor)
            prepared = self.processor.prepare_video(source, options)
        else:
            prepared = self.processor.prepare(source, options)
        if cache_salt is not None:
            salted = hashlib.sha256(prepared.digest + cache_salt.encode(*_ANY)).digest()
            prepared = msgspec.structs.replace(prepared, digest=salted)
        self._keep(key, prepared)
        return prepared

    def _keep(self, key: bytes, image: PromptImage) -> None:
        with self._lock:
            if key in self._kept:
                return  # kept by another thread in the meantime
            self._kept[key] = image
            self._num_bytes += image.pixels.nbytes
            while self._num_bytes > self._max_bytes:
                _, oldest = self._kept.popitem(last=False)
                self._num_bytes -= oldest.pixels.nbytes


_ANY = ("utf-8", "surrogatepass")


def _read(image: Any, is_video: bool = False) -> tuple[Any, list[bytes]]:
    """Return an image or a video for the processor, and the parts of its key. Raises InvalidMessage."""
    if is_video and isinstance(image, list | tuple):
        frames = [_read(frame) for frame in image]
        return [frame for frame, _ in frames], [part for _, parts in frames for part in parts]
    if is_data_url(image):
        return image, [b"url", image.encode(*_ANY)]
    if is_video or isinstance(image, str | bytes | Path):
        data = media_bytes(image, "video" if is_video else "image")
        return data, [b"file", data]
    loaded = load_image(image)
    return loaded, [b"pixels", repr(loaded.size).encode(), loaded.tobytes()]
