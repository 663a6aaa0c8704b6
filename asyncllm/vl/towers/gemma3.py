"""The tower of Gemma 3 (Gemma Team, 2025): SigLIP, average pooling of squares of patches, a norm and a projection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.nn.functional as F
from torch import Tensor

from asyncllm.layers.norm import OffsetRMSNorm
from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import CapturableTower, TowerConfig, TowerInputs
from asyncllm.vl.towers.clip import ClipConfig, ClipEncoder, clip_weights
from asyncllm.vl.towers.parts import Table
from asyncllm.vl.towers.uploads import upload_pixels

__all__ = ["Gemma3TowerConfig", "Gemma3VisionTower"]


class Gemma3TowerConfig(TowerConfig, frozen=True, kw_only=True):
    """An encoder and the pooling of its patches."""

    encoder: ClipConfig
    pool: int
    """Patches along a side of the square that is averaged to a token."""

    def build(self, hidden_size: int) -> Gemma3VisionTower:
        return Gemma3VisionTower(self, hidden_size)

    @property
    def weights(self) -> Mapping[str, str]:
        return {
            **clip_weights("vision_tower", "vision.encoder"),
            **clip_weights("vision_tower.vision_model", "vision.encoder"),
            "multi_modal_projector.mm_soft_emb_norm": "vision.norm",
            "multi_modal_projector.mm_input_projection_weight": "vision.projection:weight",
        }

    @property
    def unused(self) -> Sequence[str]:
        return ("vision_tower.head", "vision_tower.vision_model.head")


class Gemma3VisionTower(CapturableTower):
    def __init__(self, config: Gemma3TowerConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.encoder = ClipEncoder(config.encoder)
        self.norm = OffsetRMSNorm(config.encoder.hidden_size, config.encoder.eps)
        self.projection = Table(config.encoder.hidden_size, hidden_size)

    def upload_inputs(self, images: Sequence[PromptImage]) -> TowerInputs:
        return TowerInputs((upload_pixels(images, self.projection()),))

    def encode_inputs(self, inputs: TowerInputs) -> Tensor:
        table, side = self.projection(), self.config.encoder.side
        x = self.encoder(inputs.tensors[0], self.config.encoder.num_layers)
        x = F.avg_pool2d(x.transpose(1, 2).unflatten(2, (side, side)), self.config.pool).flatten(2).transpose(1, 2)
        features: Tensor = self.norm(x.contiguous()) @ table
        return features.flatten(0, 1)
