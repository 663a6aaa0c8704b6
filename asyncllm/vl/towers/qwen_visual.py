"""The tower of Qwen-VL (Bai et al., 2023): OpenCLIP's transformer over square pictures, and a resampler."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import TowerConfig, VisionTower
from asyncllm.vl.towers.block import Attention, Block
from asyncllm.vl.towers.parts import PatchEmbedding, Table
from asyncllm.vl.towers.resampler import Resampler, resampler_weights
from asyncllm.vl.towers.uploads import upload_pixels

__all__ = ["NUM_QUERIES", "QwenVisualConfig", "QwenVisualTower"]

EPS = 1e-6
NUM_QUERIES = 256
"""Number of queries and of learned positions, which are interpolated over the patches."""
HEAD_SIZE = 128
"""Size of the resampler's heads."""


class QwenVisualConfig(TowerConfig, frozen=True, kw_only=True):
    """A transformer over the patches of square pictures."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int

    @property
    def side(self) -> int:
        """Patches along each side of a picture."""
        return self.image_size // self.patch_size

    def build(self, hidden_size: int) -> QwenVisualTower:
        return QwenVisualTower(self, hidden_size)

    @property
    def weights(self) -> Mapping[str, str]:
        source = "transformer.visual"
        layer, own = f"{source}.transformer.resblocks.{{i}}", "vision.layers.{i}"
        return {
            f"{source}.conv1": "vision.patches",
            f"{source}.positional_embedding": "vision.positions:weight",
            f"{source}.ln_pre": "vision.first_norm",
            f"{layer}.ln_1": f"{own}.attn_norm",
            f"{layer}.attn.in_proj": f"{own}.attn.qkv[q+k+v:grouped]",
            f"{layer}.attn.out_proj": f"{own}.attn.out",
            f"{layer}.ln_2": f"{own}.mlp_norm",
            f"{layer}.mlp.c_fc": f"{own}.up",
            f"{layer}.mlp.c_proj": f"{own}.down",
            f"{source}.attn_pool.pos_embed": "vision.places:weight",
            **resampler_weights(f"{source}.attn_pool", "vision.resampler"),
            f"{source}.ln_post": "vision.norm",
            f"{source}.proj": "vision.projector:weight",
        }


class QwenVisualTower(VisionTower):
    def __init__(self, config: QwenVisualConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.patches = PatchEmbedding((config.patch_size, config.patch_size), size, bias=False)
        self.positions = Table(NUM_QUERIES, size)
        self.first_norm = LayerNorm(size, EPS)
        self.layers = nn.ModuleList(self._block() for _ in range(config.num_layers))
        self.places = Table(NUM_QUERIES, hidden_size)
        self.resampler = Resampler(NUM_QUERIES, size, hidden_size, hidden_size // HEAD_SIZE, EPS)
        self.norm = LayerNorm(hidden_size, EPS)
        self.projector = Table(hidden_size, hidden_size)

    def _block(self) -> Block:
        config, attention = self.config, Attention(self.config.hidden_size, self.config.num_heads)
        # The files interleave queries, keys and values by head.
        attention.qkv.stored_kv_heads = config.num_heads
        return Block(attention, config.hidden_size, config.intermediate_size, activation="gelu", eps=EPS)

    def encode(self, images: Sequence[PromptImage]) -> list[Tensor]:
        weight = self.projector.weight
        pixels = upload_pixels(images, weight)
        x = self.first_norm(self.patches.of_images(pixels) + self._stretched(self.positions()))
        for layer in self.layers:
            x = layer(x)
        places = self.places()
        features = self.norm(self.resampler(x, self._stretched(places), places)) @ weight
        return list(features.unbind())

    def _stretched(self, positions: Tensor) -> Tensor:
        """Interpolate positions [queries, size] of a square grid to the patches' [patches, size], bicubically."""
        side, own = self.config.side, math.isqrt(len(positions))
        if side == own:
            return positions
        grid = positions.float().view(1, own, own, -1).permute(0, 3, 1, 2)
        stretched = F.interpolate(grid, (side, side), mode="bicubic", align_corners=False)
        return stretched[0].permute(1, 2, 0).flatten(0, 1).to(positions.dtype)
