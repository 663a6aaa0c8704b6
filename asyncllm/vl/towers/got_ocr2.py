"""The tower of GOT-OCR 2.0 (Wei et al., 2024): SAM, two convolutions that leave a sixteenth of the patches, and a
projection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import TowerConfig, VisionTower
from asyncllm.vl.towers.parts import Dense
from asyncllm.vl.towers.sam import Convolution, SamConfig, SamEncoder, sam_weights
from asyncllm.vl.towers.uploads import upload_pixels

__all__ = ["GotOcr2Config", "GotOcr2Tower"]


class GotOcr2Config(TowerConfig, frozen=True, kw_only=True):
    encoder: SamConfig

    def build(self, hidden_size: int) -> GotOcr2Tower:
        return GotOcr2Tower(self, hidden_size)

    @property
    def weights(self) -> Mapping[str, str]:
        return {
            **sam_weights("vision_tower", "vision.encoder"),
            "multi_modal_projector.conv_upsampler1": "vision.shrink_1",
            "multi_modal_projector.conv_upsampler2": "vision.shrink_2",
            "multi_modal_projector.multimodal_projector": "vision.projector",
        }


class GotOcr2Tower(VisionTower):
    def __init__(self, config: GotOcr2Config, hidden_size: int) -> None:
        super().__init__()
        channels = config.encoder.output_channels
        self.encoder = SamEncoder(config.encoder)
        self.shrink_1 = Convolution(channels, 2 * channels, 3, stride=2)
        self.shrink_2 = Convolution(2 * channels, hidden_size, 3, stride=2)
        self.projector = Dense(hidden_size, hidden_size)

    def encode(self, images: Sequence[PromptImage]) -> list[Tensor]:
        weight = self.projector.weight
        tiles = upload_pixels(images, weight)
        # One at a time, since attention scores cover all pairs of a picture's patches.
        features = torch.cat([self._features(each[None]) for each in tiles])
        return [part.flatten(0, 1) for part in torch.split(features, [len(image.pixels) for image in images])]

    def _features(self, pixels: Tensor) -> Tensor:
        """Encode pixels [N, 3, size, size] as [N, tokens, hidden]."""
        _, last = self.encoder(pixels)
        features: Tensor = self.projector(self.shrink_2(self.shrink_1(last)).flatten(2).transpose(1, 2))
        return features
