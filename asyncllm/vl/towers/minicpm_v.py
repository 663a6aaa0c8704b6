"""The tower of MiniCPM-V 2.5 to 4.5 (Yao et al., 2024): SigLIP over pictures of any ratio, and a resampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import TowerConfig, VisionTower
from asyncllm.vl.towers.clip import ClipConfig, ClipEncoder, clip_weights
from asyncllm.vl.towers.parts import Table
from asyncllm.vl.towers.resampler import Resampler, plane_waves, resampler_weights
from asyncllm.vl.towers.uploads import upload_pixels

__all__ = ["MiniCPMVConfig", "MiniCPMVTower"]

EPS = 1e-6
HEAD_SIZE = 128
"""Size of the resampler's heads."""


class MiniCPMVConfig(TowerConfig, frozen=True, kw_only=True):
    """An encoder and a resampler."""

    encoder: ClipConfig
    num_queries: int
    """Number of features of a picture."""
    plane: bool
    """Whether patches have positions by row and column, rather than by their number (2.5)."""

    def build(self, hidden_size: int) -> MiniCPMVTower:
        return MiniCPMVTower(self, hidden_size)

    @property
    def weights(self) -> Mapping[str, str]:
        return {
            **clip_weights("vpm", "vision.encoder"),
            **resampler_weights("resampler", "vision.resampler"),
            "resampler.ln_post": "vision.norm",
            "resampler.proj": "vision.projector:weight",
        }

    @property
    def unused(self) -> Sequence[str]:
        return ("resampler.pos_embed",)

    @property
    def decoder_source(self) -> str:
        return "llm"


class MiniCPMVTower(VisionTower):
    def __init__(self, config: MiniCPMVConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.encoder = ClipEncoder(config.encoder)
        self.resampler = Resampler(
            config.num_queries, config.encoder.hidden_size, hidden_size, hidden_size // HEAD_SIZE, EPS
        )
        self.norm = LayerNorm(hidden_size, EPS)
        self.projector = Table(hidden_size, hidden_size)

    def encode(self, images: Sequence[PromptImage]) -> list[Tensor]:
        weight = self.projector.weight
        shapes = [shape for image in images for shape in image.pictures]
        patches = upload_pixels(images, weight)
        pictures = torch.split(patches, [rows * columns for rows, columns in shapes])
        features = patches.new_empty(len(shapes), self.config.num_queries, weight.shape[1])
        for shape in dict.fromkeys(shapes):
            alike = [number for number, each in enumerate(shapes) if each == shape]
            features[alike] = self._features(torch.stack([pictures[number] for number in alike]), shape)
        return [part.flatten(0, 1) for part in torch.split(features, [len(image.pictures) for image in images])]

    def _features(self, patches: Tensor, shape: tuple[int, int]) -> Tensor:
        """Encode patches [N, rows * columns, numbers] of pictures of this shape as [N, queries, hidden]."""
        config, projector = self.config.encoder, self.projector.weight
        places = self._places(*shape) if self.config.plane else self._places(1, shape[0] * shape[1])
        x = self.encoder.of_patches(patches, config.num_layers, places.to(patches.device))
        waves = plane_waves(*shape, projector.shape[0], patches.device).to(x.dtype)
        features: Tensor = self.norm(self.resampler(x, waves)) @ projector
        return features

    def _places(self, rows: int, columns: int) -> Tensor:
        """Return the index of each patch's learned position, that at its share of the picture's sides. The shares are
        float32, so that they round as in training."""
        side = self.config.encoder.side
        edges = torch.arange(1 / side, 1.0, 1 / side)
        row, column = (
            torch.bucketize(torch.arange(0, 1 - 1e-6, 1 / count), edges, right=True) for count in (rows, columns)
        )
        return (row[:, None] * side + column).flatten()
