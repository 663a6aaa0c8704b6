"""MoonViT, the tower of Kimi-VL (Kimi Team, 2025): a transformer over images of any size with interpolated learned and
two-dimensional rotary positions; squares of patches become a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels import Rotation, split_segments
from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import VisionTower
from asyncllm.vl.towers.parts import PatchEmbedding, Table
from asyncllm.vl.towers.patches import BlocksConfig
from asyncllm.vl.towers.squares import PatchBlocks, SquareMerger, rotation_by, square_places
from asyncllm.vl.towers.uploads import upload, upload_pixels

__all__ = ["MoonViTConfig", "MoonViTTower"]

EPS = 1e-5
THETA = 10000.0


class MoonViTConfig(BlocksConfig, frozen=True, kw_only=True):
    """A transformer over patches and the merger of squares of them."""

    merge: int
    """Patches along a side of the square that becomes a token."""
    grid: tuple[int, int]
    """Rows and columns of the learned positions, which are interpolated over an image."""
    projector: tuple[str, str, str] = (
        "multi_modal_projector.pre_norm",
        "multi_modal_projector.linear_1",
        "multi_modal_projector.linear_2",
    )
    """The checkpoint's modules of the projector: its norm and its two linear layers."""

    def build(self, hidden_size: int) -> MoonViTTower:
        return MoonViTTower(self, hidden_size)

    @property
    def weights(self) -> Mapping[str, str]:
        block, own = "vision_tower.encoder.blocks.{i}", "vision.layers.{i}"
        return {
            "vision_tower.patch_embed.proj": "vision.patches",
            "vision_tower.patch_embed.pos_emb": "vision.positions",
            f"{block}.norm0": f"{own}.attn_norm",
            f"{block}.norm1": f"{own}.mlp_norm",
            f"{block}.wqkv": f"{own}.qkv[q+k+v]",
            f"{block}.wo": f"{own}.out",
            f"{block}.mlp.fc0": f"{own}.up",
            f"{block}.mlp.fc1": f"{own}.down",
            "vision_tower.encoder.final_layernorm": "vision.last_norm",
            **{
                theirs: f"vision.merger.{name}"
                for theirs, name in zip(self.projector, ("norm", "first", "second"), strict=True)
            },
        }


class MoonViTTower(VisionTower):
    def __init__(self, config: MoonViTConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.patches = PatchEmbedding((config.patch_size, config.patch_size), size, bias=True)
        self.positions = Table(*config.grid, size)
        self.layers = PatchBlocks(
            config, norm=LayerNorm, activation="gelu_tanh", gated=False, eps=EPS, interleaved=True
        )
        self.last_norm = LayerNorm(size, EPS)
        self.merger = SquareMerger(size, config.merge**2, hidden_size, eps=EPS)

    def encode(self, images: Sequence[PromptImage]) -> list[Tensor]:
        config, weight = self.config, self.merger.first.weight
        device, grids = weight.device, [shape for image in images for shape in image.pictures]
        squares = [(rows // config.merge, columns // config.merge) for rows, columns in grids]
        places = upload(square_places(squares, config.merge).flatten(0, 1), device)
        pixels = upload_pixels(images, weight)
        x = self.patches(pixels.flatten(1)) + self._positions(places, grids)
        whole = split_segments([rows * columns for rows, columns in grids], device)
        features = self.merger(self.last_norm(self.layers(x, self._rotation(places), whole)))
        return list(torch.split(features, [image.length for image in images]))

    def _positions(self, places: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        """Return positions of the patches [T, hidden], by bicubic interpolation of the learned grid."""
        table = self.positions()
        stretched = {
            grid: F.interpolate(table.float().permute(2, 0, 1)[None], grid, mode="bicubic")[0].permute(1, 2, 0)
            for grid in dict.fromkeys(grids)
        }
        parts = torch.split(places, [rows * columns for rows, columns in grids])
        found = [stretched[grid][part[:, 0], part[:, 1]] for grid, part in zip(grids, parts, strict=True)]
        return torch.cat(found).to(table.dtype)

    def _rotation(self, places: Tensor) -> Rotation:
        """Return the rotation of patches at these rows and columns [T, 2]: pairs alternate between column and row."""
        size = self.config.hidden_size // self.config.num_heads
        frequencies = 1.0 / THETA ** (torch.arange(0, size, 4, dtype=torch.float32, device=places.device) / size)
        return rotation_by((places.flip(-1)[:, None, :].float() * frequencies[:, None]).flatten(1))
