"""ImageFeatures: which images are encoded together, and that towers may be shown what others have been shown."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncllm.agent.device.tower_graphs import LARGEST, TowerGraphs
from asyncllm.agent.image_features import ImageFeatures
from asyncllm.models.registry import open_model
from asyncllm.vl.processor import open_processor
from asyncllm.vl.tower import PlannedTower
from tests.vl.checkpoints import folder_of, picture


def batches_of(most: int, *sizes: int) -> list[list[int]]:
    """Return the sizes of images that are encoded together."""
    tower: Any = SimpleNamespace(encode=None)
    images: Any = [SimpleNamespace(pixels=SimpleNamespace(size=size)) for size in sizes]
    return [[image.pixels.size for image in batch] for batch in ImageFeatures(tower, most)._batches(images)]


def test_batches_have_so_many_images_and_pixels() -> None:
    half = LARGEST // 2
    assert batches_of(2, 1, 2, 3) == [[1, 2], [3]]
    assert batches_of(8, half, half, half) == [[half, half], [half]]
    assert batches_of(8, 3 * half, 1, 9 * half, 1) == [[3 * half], [1], [9 * half], [1]]
    assert batches_of(8) == []


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "internvl", "glm4v", "gemma3", "idefics3", "llama4"])
@torch.inference_mode()
def test_images_may_be_encoded_one_by_one(kind: str) -> None:
    """What images of several sizes are in one launch, they are alone; so no segment sees another."""
    folder = folder_of(kind)
    processor = open_processor(folder)
    tower = open_model(folder, dtype=torch.float32, device=torch.device("cpu")).vision
    assert isinstance(tower, PlannedTower)
    assert processor is not None
    images = [processor.prepare(picture(seed, *size), {}) for seed, size in enumerate([(40, 30), (90, 31), (16, 24)])]
    for together, image in zip(TowerGraphs(tower).encode(images), images, strict=True):
        (alone,) = tower.encode([image])
        assert len(alone) == image.num_features
        torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
