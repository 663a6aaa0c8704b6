"""MoonViT, the tower of Kimi-VL (Kimi Team, 2025): images of any size, whose patches have stretched learned positions
and are turned by their row and column; squares of them become a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asyncllm.kernels import Rotation, split_segments
from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import TowerConfig, VisionTower
from asyncllm.vl.towers.parts import Dense, PatchEmbedding, Table
from asyncllm.vl.towers.qwen_vl import PatchBlock, square_places
from asyncllm.vl.towers.uploads import upload, upload_pixels

__all__ = ["MoonViTConfig", "MoonViTTower"]

EPS = 1e-5
THETA = 10000.0


class MoonViTConfig(TowerConfig, frozen=True, kw_only=True):
    """A transformer over patches, and the merger of squares of them."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    merge: int
    """Patches along a side of the square that becomes a token."""
    grid: tuple[int, int]
    """Rows and columns of the learned positions, which are stretched over an image."""

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
            "multi_modal_projector.pre_norm": "vision.norm",
            **{f"multi_modal_projector.linear_{n}": f"vision.projector_{n}" for n in (1, 2)},
        }


class MoonViTTower(VisionTower):
    def __init__(self, config: MoonViTConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        size, width = config.hidden_size, config.hidden_size * config.merge**2
        self.patches = PatchEmbedding((config.patch_size, config.patch_size), size, bias=True)
        self.positions = Table(*config.grid, size)
        self.layers = nn.ModuleList(
            PatchBlock(
                size,
                config.intermediate_size,
                config.num_heads,
                norm=LayerNorm,
                activation="gelu_tanh",
                gated=False,
                eps=EPS,
                interleaved=True,
            )
            for _ in range(config.num_layers)
        )
        self.last_norm, self.norm = LayerNorm(size, EPS), LayerNorm(size, EPS)
        self.projector_1, self.projector_2 = Dense(width, width), Dense(width, hidden_size)

    def encode(self, images: Sequence[PromptImage]) -> list[Tensor]:
        config, device = self.config, self.projector_1.weight.device
        square, grids = config.merge**2, [shape for image in images for shape in image.pictures]
        squares = [(rows // config.merge, columns // config.merge) for rows, columns in grids]
        places = upload(square_places(squares, config.merge).flatten(0, 1), device)
        pixels = upload_pixels(images, self.projector_1.weight)
        x = self.patches(pixels.flatten(1)) + self._positions(places, grids)
        rotation = self._rotation(places)
        whole = split_segments([rows * columns for rows, columns in grids], device)
        for layer in self.layers:
            x = layer(x, rotation, whole)
        merged = self.norm(self.last_norm(x)).view(-1, square * config.hidden_size)
        features = self.projector_2(F.gelu(self.projector_1(merged)))
        return list(torch.split(features, [image.length for image in images]))

    def _positions(self, places: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        """Return learned positions of the patches [T, hidden], by cubic interpolation in the stretched grid."""
        table = self.positions()
        stretched = {
            grid: F.interpolate(table.float().permute(2, 0, 1)[None], grid, mode="bicubic")[0].permute(1, 2, 0)
            for grid in dict.fromkeys(grids)
        }
        parts = torch.split(places, [rows * columns for rows, columns in grids])
        found = [stretched[grid][part[:, 0], part[:, 1]] for grid, part in zip(grids, parts, strict=True)]
        return torch.cat(found).to(table.dtype)

    def _rotation(self, places: Tensor) -> Rotation:
        """Return how far patches at these places [T, 2] are turned: the pairs by column and row in turn."""
        size = self.config.hidden_size // self.config.num_heads
        frequencies = 1.0 / THETA ** (torch.arange(0, size, 4, dtype=torch.float32, device=places.device) / size)
        angles = (places.flip(-1)[:, None, :].float() * frequencies[:, None]).flatten(1)[:, None]
        return Rotation(torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1))
