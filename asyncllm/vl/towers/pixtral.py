"""The tower of Pixtral (Agrawal et al., 2024), Mistral 3 and LightOnOCR: a transformer over images of any size with
two-dimensional rotary positions. The last two merge squares of patches into tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from asyncllm.kernels import Rotation, split_segments
from asyncllm.layers.norm import RMSNorm
from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import VisionTower
from asyncllm.vl.towers.block import GATED
from asyncllm.vl.towers.parts import ACTIVATIONS, Dense, PatchEmbedding, TowerActivation
from asyncllm.vl.towers.patches import BlocksConfig
from asyncllm.vl.towers.squares import PatchBlocks, rotation_by
from asyncllm.vl.towers.uploads import upload_pixels

__all__ = ["PixtralConfig", "PixtralTower"]

EPS = 1e-5


class PixtralConfig(BlocksConfig, frozen=True, kw_only=True):
    """A transformer over patches and a projector."""

    read_layers: int
    """Number of layers whose output is read."""
    theta: float
    activation: TowerActivation
    merge: int = 1
    """Patches along a side of the square that becomes a token."""
    merge_eps: float | None = None
    """Epsilon of the norm before the merger, or None without both."""
    bias: bool
    projector_activation: TowerActivation
    names: tuple[str, str] = ("vision_tower", "multi_modal_projector")
    """The checkpoint's modules of the transformer and of the projector."""

    def build(self, hidden_size: int) -> PixtralTower:
        return PixtralTower(self, hidden_size)

    @property
    def weights(self) -> Mapping[str, str]:
        tower, projector = self.names
        layer, own = f"{tower}.transformer.layers.{{i}}", "vision.layers.{i}"
        return {
            f"{tower}.patch_conv": "vision.patches",
            f"{tower}.ln_pre": "vision.first_norm",
            f"{layer}.attention_norm": f"{own}.attn_norm",
            **{f"{layer}.attention.{name}_proj": f"{own}.qkv[{name}]" for name in ("q", "k", "v")},
            f"{layer}.attention.o_proj": f"{own}.out",
            f"{layer}.ffn_norm": f"{own}.mlp_norm",
            **{f"{layer}.feed_forward.{name}_proj": f"{own}.{target}" for name, target in GATED.items()},
            f"{projector}.norm": "vision.norm",
            f"{projector}.patch_merger.merging_layer": "vision.merger",
            **{f"{projector}.linear_{n}": f"vision.projector_{n}" for n in (1, 2)},
        }


class PixtralTower(VisionTower):
    def __init__(self, config: PixtralConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        size, merges = config.hidden_size, config.merge_eps is not None
        self.patches = PatchEmbedding((config.patch_size, config.patch_size), size, bias=False)
        self.first_norm = RMSNorm(size, EPS)
        self.layers = PatchBlocks(config, norm=RMSNorm, activation=config.activation, gated=True, bias=False, eps=EPS)
        self.norm = RMSNorm(size, config.merge_eps) if config.merge_eps is not None else None
        self.merger = Dense(size * config.merge**2, size, bias=False) if merges else None
        self.projector_1 = Dense(size, hidden_size, bias=config.bias)
        self.projector_2 = Dense(hidden_size, hidden_size, bias=config.bias)

    def encode(self, images: Sequence[PromptImage]) -> list[Tensor]:
        config, device = self.config, self.projector_1.weight.device
        grids = [grid for image in images for grid in image.pictures]
        pictures = [upload_pixels([image], self.projector_1.weight) for image in images]
        x = self.first_norm(torch.cat([self.patches.of_images(each)[0] for each in pictures]))
        lengths = [rows * columns for rows, columns in grids]
        x = self.layers(x, self._rotation(grids, device), split_segments(lengths, device), config.read_layers)
        if self.norm is not None and self.merger is not None:
            x = self.merger(self._squares(self.norm(x), grids, lengths))
        x = self.projector_2(ACTIVATIONS[config.projector_activation](self.projector_1(x)))
        return list(torch.split(x, [image.num_features for image in images]))

    def _squares(self, x: Tensor, grids: Sequence[tuple[int, int]], lengths: Sequence[int]) -> Tensor:
        """Return x [T, hidden] as squares [T / merge^2, hidden * merge^2], ordered by feature, then by patch."""
        merge = self.config.merge
        parts = [
            part.view(rows // merge, merge, columns // merge, merge, -1).permute(0, 2, 4, 1, 3).flatten(0, 1).flatten(1)
            for part, (rows, columns) in zip(torch.split(x, list(lengths)), grids, strict=True)
        ]
        return torch.cat(parts)

    def _rotation(self, grids: Sequence[tuple[int, int]], device: torch.device) -> Rotation:
        """Return the rotation of each patch: even frequencies by the row, odd ones by the column."""
        size = self.config.hidden_size // self.config.num_heads
        exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
        frequencies = 1.0 / self.config.theta**exponents
        angles = []
        for rows, columns in grids:
            row = torch.arange(rows, dtype=torch.float32, device=device)[:, None] * frequencies[0::2]
            column = torch.arange(columns, dtype=torch.float32, device=device)[:, None] * frequencies[1::2]
            angles.append(torch.cat([row.repeat_interleave(columns, 0), column.repeat(rows, 1)], -1))
        return rotation_by(torch.cat(angles))
