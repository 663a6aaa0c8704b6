"""VisionTower encodes images as embeddings for a decoder. The towers of the families are in `towers/`."""

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

__all__ = ["CapturableTower", "TowerConfig", "TowerInputs", "VisionTower"]


class VisionTower(Layer):
    """Encodes images. `merge` writes their features into the embeddings of a step."""

    num_deep = 0
    """The number of decoder layers, from the first, to whose outputs further features are added (DeepStack)."""

    def __init__(self) -> None:
        super().__init__()
        self.merge = ImageMerge()

    @abstractmethod
    def encode(self, images: Sequence[PromptImage]) -> list[Tensor]:
        """Return the features of each image, [length, (1 + num_deep) * hidden], of the model's dtype and on its device.

        The first `hidden` columns are the embeddings; each further `hidden` columns are added to the output of one of
        the decoder's first layers, in order, but never to that of its last."""


class TowerInputs(NamedTuple):
    """The inputs of a tower for some images."""

    tensors: tuple[Tensor, ...]
    """Tensors on the tower's device, pixels first."""
    segments: tuple[Segments, ...] = ()
    """Which patches attend to each other, if the tensors' shapes do not determine it."""


class CapturableTower(VisionTower):
    """A tower that CUDA graphs can capture, since it needs nothing from the host once its inputs are on the device."""

    @abstractmethod
    def upload_inputs(self, images: Sequence[PromptImage]) -> TowerInputs:
        """Upload the inputs of `encode_inputs` for some images."""

    @abstractmethod
    def encode_inputs(self, inputs: TowerInputs) -> Tensor:
        """Return the features of all images as `encode`, concatenated."""

    def encode(self, images: Sequence[PromptImage]) -> list[Tensor]:
        return list(
            torch.split(self.encode_inputs(self.upload_inputs(images)), [image.num_features for image in images])
        )


class TowerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A tower's config, read from config.json by `models.vision_language`."""

    image_rows: ImageRowsConfig | None = None
    """The decoder's separate weights for tokens of images, if it has any (CogVLM, InternLM-XComposer2)."""

    @abstractmethod
    def build(self, hidden_size: int) -> VisionTower:
        """Return the tower, without its weights, for a decoder of this hidden size."""

    @property
    @abstractmethod
    def weights(self) -> Mapping[str, str]:
        """The checkpoint's modules -> the tower's, as a weight table."""

    @property
    def decoder_source(self) -> str:
        """The checkpoint's module that holds the decoder; empty if the tower's modules are beside the decoder's."""
        return "language_model"

    @property
    def unused(self) -> Sequence[str]:
        """The checkpoint's modules whose weights are left out."""
        return ()
