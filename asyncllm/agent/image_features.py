"""ImageFeatures: a cache of the vision tower's features on the device, keyed by the content of images."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from asyncllm.agent.device.streams import upload
from asyncllm.agent.device.tower_graphs import MAX_CAPTURED_VALUES, TowerGraphs
from asyncllm.layers.images import image_parts
from asyncllm.layers.step_inputs import JointTokens
from asyncllm.prompt_image import PromptImage
from asyncllm.protocol import Batch
from asyncllm.vl.processor import open_processor
from asyncllm.vl.tower import CapturableTower, VisionTower

__all__ = ["MAX_BATCH_VALUES", "ImageFeatures", "joint_tokens"]

MAX_CACHED_BYTES = 2**28
"""Maximum size of cached features besides those of the step: 32,000 tokens of 4,096 numbers in 16 bits."""

_SIDES = (((64, 64),), ((336, 336),), ((672, 448),), ((64, 64), (96, 60)), ((336, 336), (620, 440)))
"""Width and height of the images of the warm-up, together and alone: attention has different kernels for few and for
many patches, and for equal and unequal lengths."""
_LARGEST = (1344, 1008)

MAX_BATCH_VALUES = 2 * MAX_CAPTURED_VALUES
"""Maximum pixel values in a batch, which has at least one image. With 4 images of 448 x 448, two fifths of the
multiprocessors have no tile in the second wave of a product of 1,024 features; with 8 images, all have one."""


class ImageFeatures:
    """Encodes images when a chunk first reaches them, as many at once as fill the device, and caches the most recent
    features for further chunks and for requests with the same image. Uploads embeddings from callers chunk by chunk.
    Used by the thread that launches steps."""

    def __init__(self, tower: VisionTower, max_batch_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """`max_batch_size`: maximum number of images that the tower encodes at once. `dtype`: the model's."""
        self._num_deep, self._dtype, self._device = tower.num_deep, dtype, device
        self._graphs = TowerGraphs(tower) if isinstance(tower, CapturableTower) else None
        self._encode = tower.encode if self._graphs is None else self._graphs.encode
        self._max_batch_size = max_batch_size
        self._cached: OrderedDict[bytes, Tensor] = OrderedDict()
        """Digest -> features, most recent last."""
        self._num_bytes = 0

    def of_step(self, batch: Batch) -> Tensor | None:
        """Return the features of all image tokens of a step, in order [F, hidden]; None for a step without images."""
        parts = [part for row in batch.prefill if row.images for part in image_parts(row)]
        if not parts:
            return None
        seen = [part.image.at_placeholder(part.placeholder) for part in parts]
        missing = {image.digest: image for image in seen if not image.given and image.digest not in self._cached}
        encoded = self._encoded(list(missing.values()))
        found = []
        for image, part in zip(seen, parts, strict=True):
            if image.given:
                given = upload(image.pixels[part.first : part.last], self._device).to(self._dtype)
                found.append(F.pad(given, (0, self._num_deep * given.shape[1])))
                continue
            features = encoded.get(image.digest)
            if features is None:
                features = self._cached[image.digest]
                self._cached.move_to_end(image.digest)
            found.append(features[part.first : part.last])
        joined = torch.cat(found)
        for digest, features in encoded.items():
            self._keep(digest, features)
        return joined

    def measure(self, folder: Path, overrides: Mapping[str, Any] | None) -> int:
        """Return the bytes of device memory that images take: cached features, and the peak of the largest batch of the
        tower, made of whole screens as the family prepares them. `folder` is the checkpoint's.

        Compiles the tower's kernels, each of which would otherwise block the event loop for a second.
        """
        processor = open_processor(folder, overrides)
        if processor is None:
            return 0
        for sizes in _SIDES:
            self._encode([processor.prepare(Image.new("RGB", size), {}) for size in sizes])
        largest = processor.prepare(Image.new("RGB", _LARGEST), {})
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self._encode(self._batches([largest] * self._max_batch_size)[0])
        torch.cuda.synchronize()
        # Graphs take at most the same amount again.
        return (1 + (self._graphs is not None)) * (torch.cuda.max_memory_allocated() - before) + MAX_CACHED_BYTES

    def counts(self, batch: Batch) -> dict[int, int]:
        """Return slot -> number of image tokens, for the rows of a step that have images."""
        counts = {row.slot: sum(part.last - part.first for part in image_parts(row)) for row in batch.prefill}
        return {slot: count for slot, count in counts.items() if count}

    def clear(self) -> None:
        """Forget all features, because weights change or memory is freed."""
        self._cached.clear()
        self._num_bytes = 0
        if self._graphs is not None:
            self._graphs.clear()

    def _batches(self, images: Sequence[PromptImage]) -> list[list[PromptImage]]:
        """Return the images in batches to encode together, no larger than allowed and no larger than worthwhile."""
        batches: list[list[PromptImage]] = []
        room = 0
        for image in images:
            size = image.pixels.size
            if not batches or len(batches[-1]) == self._max_batch_size or size > room:
                batches.append([])
                room = MAX_BATCH_VALUES
            batches[-1].append(image)
            room -= size
        return batches

    def _encoded(self, images: Sequence[PromptImage]) -> dict[bytes, Tensor]:
        encoded: dict[bytes, Tensor] = {}
        for some in self._batches(images):
            for image, features in zip(some, self._encode(some), strict=True):
                if len(features) != image.num_features:
                    raise RuntimeError(
                        f"an image of {image.num_features} features was given {len(features)} rows of features"
                    )
                encoded[image.digest] = features.clone()
        return encoded

    def _keep(self, digest: bytes, features: Tensor) -> None:
        self._cached[digest] = features
        self._num_bytes += features.nbytes
        while self._num_bytes > MAX_CACHED_BYTES:
            _, oldest = self._cached.popitem(last=False)
            self._num_bytes -= oldest.nbytes


def joint_tokens(batch: Batch) -> list[JointTokens]:
    """Return the tokens of a step that attend to each other. All tokens of such a place are always in one chunk."""
    joint, start = [], len(batch.decode)
    for number, row in enumerate(batch.prefill, len(batch.decode)):
        for part in image_parts(row):
            if part.image.joint:
                first, count = start + part.position - row.position, part.last - part.first
                joint.append(JointTokens(number, first, first + count, part.position + count))
        start += len(row.tokens)
    return joint
