"""The tower of Ovis2 (Lu et al., 2024): AIMv2 over tiles, whose squares of patches become mixtures of a visual
vocabulary's embeddings; marks from the same vocabulary separate the tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from asyncllm.layers.layer import Layer
from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.layers.norm import RMSNorm
from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import TowerConfig, VisionTower
from asyncllm.vl.towers.block import GATED, Attention, GatedMLP
from asyncllm.vl.towers.parts import Dense, PatchEmbedding, Table, TowerActivation, fold_squares
from asyncllm.vl.towers.uploads import upload_pixels

__all__ = ["Ovis2TowerConfig", "Ovis2VisionTower"]

NUM_MARKS = 5
"""Number of marks, the last words of the vocabulary, which never represent patches."""
START, GRID, COLUMN, ROW, END = range(NUM_MARKS)
"""The marks at the start of an image, before its tiles, between the tiles of a row, between rows, and at the end."""

HEAD_EPS = 1e-5


class Ovis2TowerConfig(TowerConfig, frozen=True, kw_only=True):
    """A transformer over the patches of square pictures and a visual vocabulary."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    side: int
    """Patches along a side of a picture."""
    patch_size: int
    eps: float
    activation: TowerActivation
    qkv_bias: bool
    mlp_bias: bool
    num_words: int
    fold: int
    """Patches along a side of the square that becomes a token."""

    def build(self, hidden_size: int) -> Ovis2VisionTower:
        return Ovis2VisionTower(self, hidden_size)

    @property
    def weights(self) -> Mapping[str, str]:
        source, own = "vision_tower.transformer", "vision.layers.{i}"
        block = f"{source}.encoder.layers.{{i}}"
        return {
            f"{source}.embeddings.patch_embedding": "vision.patches",
            f"{source}.embeddings.position_embedding": "vision.positions",
            f"{source}.embeddings.rms_norm": "vision.first_norm",
            f"{block}.rms_norm1": f"{own}.attn_norm",
            f"{block}.rms_norm2": f"{own}.mlp_norm",
            **{f"{block}.attention.{name}_proj": f"{own}.attn.qkv[{name}]" for name in "qkv"},
            f"{block}.attention.out_proj": f"{own}.attn.out",
            **{f"{block}.ffn.{name}_proj": f"{own}.{target}" for name, target in GATED.items()},
            f"{source}.rms_norm": "vision.last_norm",
            "vision_tower.head_linear": "vision.head",
            "vision_tower.head_norm": "vision.head_norm",
            "visual_embeddings_table": "vision.words",
        }


class Ovis2VisionTower(VisionTower):
    def __init__(self, config: Ovis2TowerConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        size, read = config.hidden_size, config.num_words - NUM_MARKS
        self.patches = PatchEmbedding((config.patch_size, config.patch_size), size, bias=True)
        self.positions = Table(config.side**2, size)
        self.first_norm, self.last_norm = RMSNorm(size, config.eps), RMSNorm(size, config.eps)
        self.layers = nn.ModuleList(_Block(config) for _ in range(config.num_layers))
        self.head, self.head_norm = Dense(size * config.fold**2, read, bias=False), LayerNorm(read, HEAD_EPS)
        self.words = Table(config.num_words, hidden_size)

    def encode(self, images: Sequence[PromptImage]) -> list[Tensor]:
        table = self.words()
        tiles = upload_pixels(images, table)
        x = self.first_norm(self.patches.of_images(tiles)) + self.positions()
        for layer in self.layers:
            x = layer(x)
        squares = fold_squares(self.last_norm(x), self.config.fold)
        shares = self.head_norm(self.head(squares)).softmax(-1)
        features = shares @ table[:-NUM_MARKS]
        parts = torch.split(features, [len(image.pixels) for image in images])
        return [self._joined(part, *image.tiles) for part, image in zip(parts, images, strict=True)]

    def _joined(self, tiles: Tensor, rows: int, columns: int) -> Tensor:
        """Join tiles [1 + rows * columns, tokens, hidden], the whole first, or the whole only, to [length, hidden]."""
        marks = self.words()[-NUM_MARKS:]
        found = [marks[START, None], tiles[0], marks[GRID, None]]
        for number, tile in enumerate(tiles[1:]):
            if number:
                found.append(marks[COLUMN if number % columns else ROW, None])
            found.append(tile)
        return torch.cat([*found, marks[END, None]])


class _Block(Layer):
    """A pre-norm block over x [N, T, hidden]."""

    def __init__(self, config: Ovis2TowerConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.attn_norm, self.mlp_norm = RMSNorm(size, config.eps), RMSNorm(size, config.eps)
        self.attn = Attention(size, config.num_heads, bias=config.qkv_bias, out_bias=config.qkv_bias)
        self.mlp = GatedMLP(size, config.intermediate_size, config.activation, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        h, x = self.mlp_norm.add(self.attn(self.attn_norm(x)), x)
        out: Tensor = x + self.mlp(h)
        return out
