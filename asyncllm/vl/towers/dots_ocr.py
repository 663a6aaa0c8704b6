"""The tower of dots.ocr (rednote-hilab, 2025): a transformer over patches of images of any size, which are turned by
their row and column; squares of them become a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from asyncllm.kernels import split_segments
from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.layers.norm import RMSNorm
from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import PlannedTower, Shown
from asyncllm.vl.towers.parts import Dense, PatchEmbedding
from asyncllm.vl.towers.patches import PatchesConfig
from asyncllm.vl.towers.qwen_vl import PatchBlock, grids_of, in_time, pixels_of, square_places, square_rotation
from asyncllm.vl.towers.uploads import upload

__all__ = ["DotsConfig", "DotsTower"]

MERGER_EPS = 1e-6


class DotsConfig(PatchesConfig, frozen=True, kw_only=True):
    eps: float
    bias: bool
    """Of the blocks' products."""
    last_norm: bool
    """Whether there is a norm behind the last block."""

    def build(self, hidden_size: int) -> DotsTower:
        return DotsTower(self, hidden_size)

    @property
    def weights(self) -> Mapping[str, str]:
        block, own = "vision_tower.blocks.{i}", "vision.layers.{i}"
        return {
            "vision_tower.patch_embed.patchifier.proj": "vision.patches",
            "vision_tower.patch_embed.patchifier.norm": "vision.first_norm",
            f"{block}.norm1": f"{own}.attn_norm",
            f"{block}.norm2": f"{own}.mlp_norm",
            f"{block}.attn.qkv": f"{own}.qkv[q+k+v]",
            f"{block}.attn.proj": f"{own}.out",
            f"{block}.mlp.fc1": f"{own}.mlp.gate_up[gate]",
            f"{block}.mlp.fc3": f"{own}.mlp.gate_up[up]",
            f"{block}.mlp.fc2": f"{own}.mlp.down",
            "vision_tower.post_trunk_norm": "vision.last_norm",
            "vision_tower.merger.ln_q": "vision.norm",
            "vision_tower.merger.mlp.0": "vision.merger_1",
            "vision_tower.merger.mlp.2": "vision.merger_2",
        }


class DotsTower(PlannedTower):
    def __init__(self, config: DotsConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        size, square = config.hidden_size, config.hidden_size * config.merge**2
        self.patches = PatchEmbedding((config.patch_size, config.patch_size), size, bias=True)
        self.first_norm = RMSNorm(size, config.eps)
        self.layers = nn.ModuleList(
            PatchBlock(
                size,
                config.intermediate_size,
                config.num_heads,
                norm=RMSNorm,
                activation=config.activation,
                gated=True,
                bias=config.bias,
                eps=config.eps,
            )
            for _ in range(config.num_layers)
        )
        self.last_norm = RMSNorm(size, config.eps) if config.last_norm else None
        self.norm = LayerNorm(size, MERGER_EPS)
        self.merger_1, self.merger_2 = Dense(square, square), Dense(square, hidden_size)

    def show(self, images: Sequence[PromptImage]) -> Shown:
        device, merge = self.merger_1.weight.device, self.config.merge
        grids = grids_of(images, merge)
        lengths = [rows * columns * merge**2 for rows, columns in grids]
        tensors = pixels_of(images, self.config.frames), square_places(grids, merge)
        return Shown(tuple(upload(each, device) for each in tensors), (split_segments(lengths, device),))

    def look(self, shown: Shown) -> Tensor:
        config = self.config
        (pixels, places), (whole,) = shown
        x = self.first_norm(self.patches(in_time(pixels, config.frames)))
        rotation = square_rotation(places, config.hidden_size // config.num_heads)
        for layer in self.layers:
            x = layer(x, rotation, whole)
        if self.last_norm is not None:
            x = self.last_norm(x)
        squares = self.norm(x).view(-1, config.hidden_size * config.merge**2)
        features: Tensor = self.merger_2(F.gelu(self.merger_1(squares)))
        return features
