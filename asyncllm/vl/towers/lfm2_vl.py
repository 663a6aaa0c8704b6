"""The tower of LFM2-VL (Liquid AI, 2025): SigLIP 2 (Tschannen et al., 2025) over pictures of any size with interpolated
positions; a norm and an MLP turn each square of patches into a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import TowerConfig, VisionTower
from asyncllm.vl.towers.clip import ClipConfig, ClipEncoder, ColoursLast, clip_weights
from asyncllm.vl.towers.parts import ACTIVATIONS, Dense, TowerActivation
from asyncllm.vl.towers.uploads import upload_pixels

__all__ = ["Lfm2VLConfig", "Lfm2VLTower"]

EPS = 1e-5

_SOURCES = ("vision_tower", "vision_tower.vision_model")
"""The checkpoint's module of the encoder, in current and earlier files."""


class Lfm2VLConfig(TowerConfig, frozen=True, kw_only=True):
    """An encoder, whose image_size is that of its learned positions, and a projector."""

    encoder: ClipConfig
    fold: int
    """Patches along a side of the square that becomes a token."""
    inner_size: int
    """Inner features of the projector."""
    activation: TowerActivation
    bias: bool
    normed: bool
    """Whether a norm precedes the projector."""

    def build(self, hidden_size: int) -> Lfm2VLTower:
        return Lfm2VLTower(self, hidden_size)

    @property
    def weights(self) -> Mapping[str, str]:
        projector = {"layer_norm": "norm", "linear_1": "projector_1", "linear_2": "projector_2"}
        return {
            **{row: own for source in _SOURCES for row, own in clip_weights(source, "vision.encoder").items()},
            **{f"multi_modal_projector.{name}": f"vision.{own}" for name, own in projector.items()},
        }

    @property
    def unused(self) -> Sequence[str]:
        return [f"{source}.head" for source in _SOURCES]


class Lfm2VLTower(VisionTower):
    def __init__(self, config: Lfm2VLConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        encoder, width = config.encoder, config.encoder.hidden_size * config.fold**2
        self.encoder = ClipEncoder(encoder)
        self.encoder.patches = ColoursLast((encoder.patch_size, encoder.patch_size), encoder.hidden_size, bias=True)
        self.norm = LayerNorm(width, EPS) if config.normed else None
        self.projector_1 = Dense(width, config.inner_size, bias=config.bias)
        self.projector_2 = Dense(config.inner_size, hidden_size, bias=config.bias)

    def encode(self, images: Sequence[PromptImage]) -> list[Tensor]:
        weight, config = self.projector_1.weight, self.config
        shapes = [shape for image in images for shape in image.pictures]
        patches = upload_pixels(images, weight).flatten(1)
        pictures = torch.split(patches, [rows * columns for rows, columns in shapes])
        found: list[Tensor] = [weight] * len(shapes)
        # Pictures of equal shape, such as tiles, are encoded together.
        for shape in dict.fromkeys(shapes):
            alike = [index for index, each in enumerate(shapes) if each == shape]
            stacked = torch.stack([pictures[index] for index in alike])
            hidden = self.encoder.of_patches(stacked, config.encoder.num_layers, positions=self._positions(*shape))
            for index, each in zip(alike, hidden, strict=True):
                found[index] = each
        squares = torch.cat(found).view(-1, config.fold**2 * config.encoder.hidden_size)
        inner = self.projector_1(squares if self.norm is None else self.norm(squares))
        features = self.projector_2(ACTIVATIONS[config.activation](inner))
        return list(torch.split(features, [image.num_features for image in images]))

    def _positions(self, rows: int, columns: int) -> Tensor:
        """Return positions of the patches of a picture [rows * columns, hidden], interpolated from the learned ones and
        ordered by squares."""
        learned, fold = self.encoder.positions(), self.config.fold
        side = self.config.encoder.side
        table = learned.float().view(side, side, -1).permute(2, 0, 1)[None]
        stretched = F.interpolate(table, (rows, columns), mode="bilinear", antialias=True)[0]
        squares = stretched.view(-1, rows // fold, fold, columns // fold, fold).permute(1, 3, 2, 4, 0)
        positions: Tensor = squares.reshape(rows * columns, -1).to(learned.dtype)
        return positions
