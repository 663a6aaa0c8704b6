"""ImageFeatures: which images are encoded together, and that towers may be shown what others have been shown."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from asyncllm.agent import image_features
from asyncllm.agent.device.tower_graphs import TowerGraphs
from asyncllm.agent.image_features import MAX_BATCH_VALUES, ImageFeatures
from asyncllm.models.build import open_model
from asyncllm.prompt_image import PromptImage
from asyncllm.protocol import Batch, PrefillRow
from asyncllm.vl.processor import open_processor
from asyncllm.vl.tower import CapturableTower
from tests.vl.checkpoints import folder_of, picture


def opened(tower: Any, most: int) -> ImageFeatures:
    return ImageFeatures(tower, most, torch.float32, torch.device("cpu"))


def batches_of(most: int, *sizes: int) -> list[list[int]]:
    """Return the sizes of images that are encoded together."""
    tower: Any = SimpleNamespace(encode=None, num_deep=0)
    images: Any = [SimpleNamespace(pixels=SimpleNamespace(size=size)) for size in sizes]
    return [[image.pixels.size for image in batch] for batch in opened(tower, most)._batches(images)]


def test_batches_have_so_many_images_and_pixels() -> None:
    half = MAX_BATCH_VALUES // 2
    assert batches_of(2, 1, 2, 3) == [[1, 2], [3]]
    assert batches_of(8, half, half, half) == [[half, half], [half]]
    assert batches_of(8, 3 * half, 1, 9 * half, 1) == [[3 * half], [1], [9 * half], [1]]
    assert batches_of(8) == []


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The images that were used last are kept, and those of a step are given even if they are too many to keep."""
    encoded: list[bytes] = []

    def encode(images: Any) -> list[torch.Tensor]:
        encoded.extend(image.digest for image in images)
        return [torch.full((4, 8), float(image.digest[0])) for image in images]

    def step_of(*numbers: int) -> Batch:
        images = [
            PromptImage(position=4 * at, length=4, digest=bytes([number]), pixels=np.zeros(1, np.float32))
            for at, number in enumerate(numbers)
        ]
        row = PrefillRow(slot=0, tokens=[5] * 4 * len(images), position=0, sample=False, images=images)
        return Batch(step=0, starts=[], new_blocks=[], copies=[], decode=[], prefill=[row])

    size = 4 * 8 * 4
    monkeypatch.setattr(image_features, "MAX_CACHED_BYTES", 3 * size)
    tower: Any = SimpleNamespace(encode=encode, num_deep=0)
    features = opened(tower, 2)
    for number in (1, 2, 3, 1, 4):
        features.of_step(step_of(number))
    assert encoded == [b"\1", b"\2", b"\3", b"\4"]
    assert list(features._cached) == [b"\3", b"\1", b"\4"]
    assert features._num_bytes == 3 * size
    joined = features.of_step(step_of(1, 2, 5, 6, 7))
    assert joined is not None
    assert joined[::4, 0].tolist() == [1, 2, 5, 6, 7]
    assert features._num_bytes == sum(each.nbytes for each in features._cached.values()) == 3 * size
    features.clear()
    assert features._num_bytes == 0


def test_embeddings_from_callers_are_neither_encoded_nor_kept() -> None:
    """A chunk gets its own rows. Beside features for several layers they add nothing to the later ones."""

    def encode(images: Any) -> list[torch.Tensor]:
        return [torch.full((2, 12), 7.0) for _ in images]

    values = np.arange(20, dtype=np.float32).reshape(5, 4)
    given = PromptImage(position=1, length=5, digest=b"given", pixels=values, given=True)
    image = PromptImage(position=0, length=2, digest=b"image", pixels=np.zeros(1, np.float32))
    rows = [
        PrefillRow(slot=0, tokens=[5] * 3, position=3, sample=False, images=[given]),
        PrefillRow(slot=1, tokens=[5] * 2, position=0, sample=False, images=[image]),
    ]
    tower: Any = SimpleNamespace(encode=encode, num_deep=2)
    features = opened(tower, 2)
    joined = features.of_step(Batch(step=0, starts=[], new_blocks=[], copies=[], decode=[], prefill=rows))
    assert joined is not None
    assert joined[:3, :4].tolist() == values[2:5].tolist()
    assert not joined[:3, 4:].any()
    assert (joined[3:] == 7).all()
    assert list(features._cached) == [b"image"]
    assert not list(given.encodings())


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "internvl", "glm4v", "gemma3", "idefics3", "llama4"])
@torch.inference_mode()
def test_images_may_be_encoded_one_by_one(kind: str) -> None:
    """What images of several sizes are in one launch, they are alone; so no segment sees another."""
    folder = folder_of(kind)
    processor = open_processor(folder)
    tower = open_model(folder, dtype=torch.float32, device=torch.device("cpu")).vision
    assert isinstance(tower, CapturableTower)
    assert processor is not None
    images = [processor.prepare(picture(seed, *size), {}) for seed, size in enumerate([(40, 30), (90, 31), (16, 24)])]
    for together, image in zip(TowerGraphs(tower).encode(images), images, strict=True):
        (alone,) = tower.encode([image])
        assert len(alone) == image.num_features
        torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
