"""VisionTower turns images into rows of embeddings for a decoder. The families' towers are in `towers/`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from asyncllm.kernels import Segments
from asyncllm.layers.image_rows import ImageRowsConfig
from asyncllm.layers.images import ImageMerge
from asyncllm.layers.layer import Layer
from asyncllm.prompt_image import PromptImage

__all__ = ["PlannedTower", "Shown", "TowerConfig", "VisionTower"]


class VisionTower(Layer):
    """Encodes images. `merge` puts their features into the embeddings of a step."""

    num_deep = 0
    """How many of the decoder's first layers its features go on for."""

    def __init__(self) -> None:
        super().__init__()
        self.merge = ImageMerge()

    @abstractmethod
    def encode(self, images: Sequence[PromptImage]) -> list[Tensor]:
        """Return the features of each image, [length, hidden] of the model's type, on its device.

        They are 1 + `num_deep` times as wide: what follows is added to the outputs of the decoder's first layers, one
        after the other, but not of its last."""


class Shown(NamedTuple):
    """Images in the form that a tower reads."""

    tensors: tuple[Tensor, ...]
    """Tensors on the tower's device, pixels first."""
    segments: tuple[Segments, ...] = ()
    """Which patches see each other, if the tensors' shapes do not say so."""


class PlannedTower(VisionTower):
    """A tower that needs nothing from the host once its inputs are on the device, so that graphs can capture it."""

    @abstractmethod
    def show(self, images: Sequence[PromptImage]) -> Shown:
        """Upload the inputs of `look` for images."""

    @abstractmethod
    def look(self, shown: Shown) -> Tensor:
        """Return the features of all images, concatenated."""

    def encode(self, images: Sequence[PromptImage]) -> list[Tensor]:
        return list(torch.split(self.look(self.show(images)), [image.num_features for image in images]))


class TowerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A tower's config, read from config.json by `models.vision_language`."""

    image_rows: ImageRowsConfig | None = None
    """Weights of their own that images' tokens have in the decoder's layers, if any."""

    @abstractmethod
    def build(self, hidden_size: int) -> VisionTower:
        """Return the tower, unfilled, for a decoder of this width."""

    @property
    @abstractmethod
    def weights(self) -> Mapping[str, str]:
        """Rows of a weight table, from the checkpoint's modules to the tower's."""

    @property
    def decoder_source(self) -> str:
        """The checkpoint's module of the decoder, if the tower's modules are not beside the decoder's own."""
        return "language_model"

    @property
    def unused(self) -> Sequence[str]:
        """Modules of the checkpoint's tower that are not used."""
        return ()
