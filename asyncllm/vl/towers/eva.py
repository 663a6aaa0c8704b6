"""EVA2-CLIP, the tower of GLM-4V and CogVLM (Sun et al., 2023; Wang et al., 2023): a norm after each branch, squares of
patches folded into one, a gated projector, and learned features before and after those of an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import TowerConfig, VisionTower
from asyncllm.vl.towers.block import Attention, Block
from asyncllm.vl.towers.parts import Dense, PatchEmbedding, Table, TowerActivation
from asyncllm.vl.towers.uploads import upload_pixels

__all__ = ["EvaConfig", "EvaTower"]


class EvaConfig(TowerConfig, frozen=True, kw_only=True):
    """A transformer over the patches of square pictures and a projector."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    eps: float
    activation: TowerActivation
    fold: int
    """Patches along a side of the square that becomes a token."""
    folded_size: int
    """Features of a folded square."""
    projector_size: int
    """Inner features of the projector."""
    divisor: float = 1.0
    """Divides all features."""
    source: str = "vision"
    """The checkpoint's module that holds the tower."""

    @property
    def side(self) -> int:
        """Patches along each side of a picture."""
        return self.image_size // self.patch_size

    def build(self, hidden_size: int) -> EvaTower:
        return EvaTower(self, hidden_size)

    @property
    def weights(self) -> Mapping[str, str]:
        source, own = self.source, "vision.layers.{i}"
        block = f"{source}.transformer.layers.{{i}}"
        return {
            f"{source}.patch_embedding.cls_embedding": "vision.class_token:weight",
            f"{source}.patch_embedding.proj": "vision.patches",
            f"{source}.patch_embedding.position_embedding": "vision.positions",
            f"{block}.attention.query_key_value": f"{own}.attn.qkv[q+k+v]",
            f"{block}.attention.dense": f"{own}.attn.out",
            f"{block}.input_layernorm": f"{own}.attn_norm",
            f"{block}.mlp.fc1": f"{own}.up",
            f"{block}.mlp.fc2": f"{own}.down",
            f"{block}.post_attention_layernorm": f"{own}.mlp_norm",
            f"{source}.conv": "vision.squares",
            f"{source}.linear_proj.linear_proj": "vision.projector",
            f"{source}.linear_proj.norm1": "vision.norm",
            f"{source}.linear_proj.gate_proj": "vision.gate",
            f"{source}.linear_proj.dense_h_to_4h": "vision.up",
            f"{source}.linear_proj.dense_4h_to_h": "vision.down",
            f"{source}.boi": "vision.begin:weight",
            f"{source}.eoi": "vision.end:weight",
        }


class EvaBlock(Block):
    """A block whose branches are normalized before they are added."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn_norm(self.attn(x))
        x = x + self.mlp_norm(self.down(self._activation(self.up(x))))
        return x


class EvaTower(VisionTower):
    def __init__(self, config: EvaConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        size, inner = config.hidden_size, config.projector_size
        self.patches = PatchEmbedding((config.patch_size, config.patch_size), size, bias=True)
        self.class_token = Table(1, size)
        self.positions = Table(config.side**2 + 1, size)
        self.layers = nn.ModuleList(
            EvaBlock(
                Attention(size, config.num_heads),
                size,
                config.intermediate_size,
                activation=config.activation,
                eps=config.eps,
            )
            for _ in range(config.num_layers)
        )
        window = (config.fold, config.fold)
        self.squares = PatchEmbedding(window, config.folded_size, bias=True, channels=size) if config.fold > 1 else None
        self.projector, self.norm = Dense(config.folded_size, hidden_size, bias=False), LayerNorm(hidden_size, 1e-5)
        self.gate, self.up = Dense(hidden_size, inner, bias=False), Dense(hidden_size, inner, bias=False)
        self.down = Dense(inner, hidden_size, bias=False)
        self.begin, self.end = Table(1, 1, hidden_size), Table(1, 1, hidden_size)

    def encode(self, images: Sequence[PromptImage]) -> list[Tensor]:
        weight, side = self.projector.weight, self.config.side
        pixels = upload_pixels(images, weight)
        x = self.patches.of_images(pixels)
        x = torch.cat([self.class_token().expand(len(x), 1, -1), x], 1) + self.positions()
        for layer in self.layers:
            x = layer(x)
        x = x[:, 1:]
        if self.squares is not None:
            x = self.squares.of_images(x.view(len(x), side, side, -1).permute(0, 3, 1, 2).contiguous())
        x = F.gelu(self.norm(self.projector(x)))
        x = self.down(F.silu(self.gate(x)) * self.up(x))
        ends = (each().expand(len(x), -1, -1) for each in (self.begin, self.end))
        return list((torch.cat([next(ends), x, next(ends)], 1) / self.config.divisor).unbind())
