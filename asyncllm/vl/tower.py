"""VisionTower: what turns images into rows of embeddings, as a decoder has one. A family's own is in `towers/`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import msgspec
from torch import Tensor

from asyncllm.layers.images import ImageMerge
from asyncllm.layers.layer import Layer
from asyncllm.protocol import PromptImage

__all__ = ["TowerConfig", "VisionTower"]


class VisionTower(Layer):
    """Encodes images. `merge` puts their features among the embeddings of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.merge = ImageMerge()

    @abstractmethod
    def encode(self, images: Sequence[PromptImage]) -> list[Tensor]:
        """Return the features of each image, [length, hidden] of the model's type, on its device.

        Where they are wider, what follows is added to the outputs of the decoder's first layers, one after the other,
        but not of its last."""


class TowerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a tower is, read from config.json by `models.vision_language`."""

    @abstractmethod
    def build(self, hidden_size: int) -> VisionTower:
        """Return the tower, unfilled, for a decoder of this width."""

    @property
    @abstractmethod
    def weights(self) -> Mapping[str, str]:
        """Rows of a weight table, from the checkpoint's modules to the tower's."""

    @property
    def decoder_source(self) -> str:
        """The checkpoint's module of the decoder, where the tower's modules do not lie beside the decoder's own."""
        return "language_model"

    @property
    def unused(self) -> Sequence[str]:
        """Modules of the checkpoint's tower that nothing is read of."""
        return ()
