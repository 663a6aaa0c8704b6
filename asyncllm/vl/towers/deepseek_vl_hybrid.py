"""The tower of DeepSeek-VL 7B (Lu et al., 2024): SigLIP over a small and SAM over a large version of an image; their
features at each position are joined and projected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import TowerConfig, VisionTower
from asyncllm.vl.towers.clip import ClipConfig, ClipEncoder, clip_weights, timm_weights
from asyncllm.vl.towers.parts import Dense, Table
from asyncllm.vl.towers.sam import (
    Convolution,
    SamConfig,
    SamEncoder,
    SamNeck,
    neck_weights,
    original_sam_weights,
    sam_weights,
)
from asyncllm.vl.towers.uploads import upload_pixels

__all__ = ["HybridConfig", "HybridTower"]

_LOW, _HIGH = (f"vision_model.vision_tower_{size}.vision_tower" for size in ("low", "high"))
"""The encoders' modules in the authors' checkpoints."""


class HybridConfig(TowerConfig, frozen=True, kw_only=True):
    """The two encoders."""

    small: ClipConfig
    large: SamConfig

    def build(self, hidden_size: int) -> HybridTower:
        return HybridTower(self, hidden_size)

    @property
    def weights(self) -> Mapping[str, str]:
        small = [row for source in self._sources for row in clip_weights(source, "vision.small").items()]
        return {
            **dict(small),
            **sam_weights("high_res_vision_model.vision_encoder", "vision.large"),
            **neck_weights("high_res_vision_neck", "vision.early_neck"),
            "high_res_vision_proj.conv1": "vision.shrink_1",
            "high_res_vision_proj.conv2": "vision.shrink_2",
            "high_res_vision_alpha": "vision.early_share:weight",
            **timm_weights(_LOW, "vision.small"),
            **original_sam_weights(_HIGH, "vision.large", "vision.early_neck"),
            f"{_HIGH}.downsamples.0": "vision.shrink_1",
            f"{_HIGH}.downsamples.1": "vision.shrink_2",
            f"{_HIGH}.hd_alpha_downsamples": "vision.early_share:weight",
            "aligner.low_up_proj": "vision.project_small",
            "aligner.high_up_proj": "vision.project_large",
            "aligner.layers.1": "vision.project",
            "aligner.vision_proj": "vision.project_small",
            "aligner.high_res_vision_proj": "vision.project_large",
            "aligner.proj": "vision.project",
        }

    @property
    def unused(self) -> Sequence[str]:
        own = [f"{source}.{name}" for source in self._sources for name in ("head", "embeddings.position_ids")]
        # The authors' checkpoints contain norms that their code does not use.
        return [*own, f"{_LOW}.attn_pool", "vision_model.high_layer_norm", "vision_model.low_layer_norm"]

    @property
    def _sources(self) -> tuple[str, str]:
        return "vision_model", "vision_model.vision_model"


class HybridTower(VisionTower):
    def __init__(self, config: HybridConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        channels, half = config.large.output_channels, hidden_size // 2
        self.small = ClipEncoder(config.small)
        self.large = SamEncoder(config.large)
        self.early_neck = SamNeck(config.large)
        self.early_share = Table(1)
        self.shrink_1 = Convolution(channels, 2 * channels, 3, stride=2)
        self.shrink_2 = Convolution(2 * channels, 4 * channels, 3, stride=2)
        self.project_small = Dense(config.small.hidden_size, half)
        self.project_large = Dense(4 * channels, half)
        self.project = Dense(hidden_size, hidden_size)

    def encode(self, images: Sequence[PromptImage]) -> list[Tensor]:
        weight, small, large = self.project.weight, self.config.small, self.config.large
        numbers = upload_pixels(images, weight).view(len(images), -1)
        high = numbers[:, : 3 * large.image_size**2].view(-1, 3, large.image_size, large.image_size)
        low = numbers[:, 3 * large.image_size**2 :].view(-1, 3, small.image_size, small.image_size)
        seen = self.project_small(self.small(low, small.num_layers))
        # One at a time: a single image fills a device, and attention scores cover all pairs of its patches.
        fine = self.project_large(torch.cat([self._fine(each[None]) for each in high]))
        projected: Tensor = self.project(F.gelu(torch.cat([fine, seen], -1)))
        return list(projected.unbind())

    def _fine(self, pixels: Tensor) -> Tensor:
        """Encode pixels [N, 3, size, size] as [N, tokens, channels], with as many tokens as the small encoder's."""
        early, last = self.large(pixels)
        features: Tensor = self._shrunk(last) + self._shrunk(self.early_neck(early)) * self.early_share()
        return features.flatten(2).transpose(1, 2)

    def _shrunk(self, x: Tensor) -> Tensor:
        """Resize x [N, channels, side, side] to four times the small encoder's side, then convolve it to that side:
        [N, 4 * channels, side, side]."""
        size = 4 * self.config.small.side
        shrunk: Tensor = self.shrink_2(self.shrink_1(F.interpolate(x, (size, size), mode="bilinear")))
        return shrunk
