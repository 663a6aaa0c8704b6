"""The tower of Molmo (Deitke et al., 2024): CLIP over overlapping crops, two of whose layers are read, squares of
patches pooled by attention, and a gated MLP. The marks of an image's structure have embeddings of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.layers.layer import Layer
from asyncllm.prompt_image import PromptImage
from asyncllm.vl.processing.molmo import POOL, CropGrid
from asyncllm.vl.tower import TowerConfig, VisionTower
from asyncllm.vl.towers.clip import ClipConfig, ClipEncoder, ColoursLast
from asyncllm.vl.towers.parts import Dense, Table, fold_squares, with_row_ends
from asyncllm.vl.towers.uploads import upload_pixels

__all__ = ["MolmoConfig", "MolmoTower"]

_TOWER, _BLOCK = "vision_backbone.image_vit", "vision_backbone.image_vit.transformer.resblocks.{i}"
_ENCODER = "vision.encoder"

WEIGHTS: Mapping[str, str] = {
    f"{_TOWER}.class_embedding": f"{_ENCODER}.class_token:weight",
    f"{_TOWER}.positional_embedding": f"{_ENCODER}.positions:weight",
    f"{_TOWER}.patch_embedding": f"{_ENCODER}.patches",
    f"{_TOWER}.pre_ln": f"{_ENCODER}.first_norm",
    f"{_BLOCK}.attention_norm": f"{_ENCODER}.layers.{{i}}.attn_norm",
    **{f"{_BLOCK}.attention.w{name}": f"{_ENCODER}.layers.{{i}}.attn.qkv[{name}]" for name in "qkv"},
    f"{_BLOCK}.attention.wo": f"{_ENCODER}.layers.{{i}}.attn.out",
    f"{_BLOCK}.ffn_norm": f"{_ENCODER}.layers.{{i}}.mlp_norm",
    f"{_BLOCK}.feed_forward.w1": f"{_ENCODER}.layers.{{i}}.up",
    f"{_BLOCK}.feed_forward.w2": f"{_ENCODER}.layers.{{i}}.down",
    "vision_backbone.pad_embed": "vision.padding:weight",
    **{
        f"vision_backbone.image_pooling_2d.w{name}": f"vision.pool.{own}"
        for name, own in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "out"))
    },
    "vision_backbone.image_projector.w1": "vision.gate",
    "vision_backbone.image_projector.w3": "vision.up",
    "vision_backbone.image_projector.w2": "vision.down",
    "transformer.wte.new_embedding": "vision.marks:weight",
}


class MolmoConfig(TowerConfig, frozen=True, kw_only=True):
    """An encoder, a projector, the marks of an image's structure, and the decoder's weights."""

    encoder: ClipConfig
    read_layers: tuple[int, int]
    """Numbers of layers after which hidden states are read and concatenated."""
    intermediate_size: int
    """Inner features of the projector."""
    grid: CropGrid
    num_marks: int
    """Number of embeddings that occur in images only. The next four are indices of them."""
    start: int
    """The mark that begins a picture."""
    end: int
    """The mark that ends a picture."""
    patch: int
    """The mark that is added to each square of patches."""
    row_end: int
    """The mark that ends a row."""
    decoder: Mapping[str, str]
    """Rows of a weight table for the decoder."""

    def build(self, hidden_size: int) -> MolmoTower:
        return MolmoTower(self, hidden_size)

    @property
    def weights(self) -> Mapping[str, str]:
        return {**WEIGHTS, **self.decoder}


class MolmoTower(VisionTower):
    def __init__(self, config: MolmoConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        size = config.encoder.hidden_size
        self.encoder = ClipEncoder(config.encoder)
        self.encoder.patches = ColoursLast((config.grid.patch, config.grid.patch), size, bias=False)
        self.padding = Table(2, 2 * size)
        self.pool = _Pool(2 * size, size, config.encoder.num_heads)
        self.gate, self.up = (Dense(size, config.intermediate_size, bias=False) for _ in range(2))
        self.down = Dense(config.intermediate_size, hidden_size, bias=False)
        self.marks = Table(config.num_marks, hidden_size)

    def encode(self, images: Sequence[PromptImage]) -> list[Tensor]:
        weight = self.down.weight
        crops = upload_pixels(images, weight)
        x = torch.cat([each[:, 1:] for each in self.encoder.several(crops, self.config.read_layers)], -1)
        x = x + self._padding(images, x)
        squares = fold_squares(x, POOL).view(-1, POOL**2, x.shape[-1])
        pooled = self.pool(squares.mean(1, keepdim=True), squares)[:, 0]
        features = self.down(F.silu(self.gate(pooled)) * self.up(pooled)) + self.marks()[self.config.patch]
        parts = torch.split(features.view(len(crops), -1, features.shape[-1]), [len(each.pixels) for each in images])
        return [self._joined(part, image) for part, image in zip(parts, images, strict=True)]

    def _padding(self, images: Sequence[PromptImage], x: Tensor) -> Tensor:
        """Return the learned terms for patches that are padding, wholly or in part [crops, patches, features].

        As in training, each crop uses the shares of padding of the next one, and all patches of an image's last crop
        count as padding in part."""
        shares = []
        for image in images:
            inside = torch.from_numpy(self.config.grid.inside(image.size, image.tiles))
            shares += [inside, torch.full_like(inside[:1], -1.0)]
        share = torch.cat(shares).to(x.device)[..., None]
        whole, part = self.padding()
        return torch.where(share == 0, whole, torch.where(share < 1, part, torch.zeros_like(part)))

    def _joined(self, features: Tensor, image: PromptImage) -> Tensor:
        """Join features [1 + rows * columns, tokens, hidden], the whole first, to [length, hidden]."""
        grid, side = self.config.grid, self.config.encoder.side // POOL
        squares = features.view(-1, side, side, features.shape[-1])
        (rows, columns), crops = image.tiles, iter(squares[1:])
        across = grid.parts(columns)
        bands = [
            torch.cat([next(crops)[top:bottom, left:right] for left, right in across], 1)
            for top, bottom in grid.parts(rows)
        ]
        return torch.cat([self._framed(squares[0]), self._framed(torch.cat(bands))])

    def _framed(self, picture: Tensor) -> Tensor:
        """Return a picture [rows, columns, hidden] with the marks of its start, its rows and its end
        [tokens, hidden]."""
        marks, config = self.marks(), self.config
        lines = with_row_ends(picture, marks[config.row_end])
        return torch.cat([marks[config.start, None], lines, marks[config.end, None]])


class _Pool(Layer):
    """Attention of queries [N, 1, in] over x [N, T, in], giving [N, 1, out]."""

    def __init__(self, in_features: int, out_features: int, num_heads: int) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.query, self.key, self.value = (Dense(in_features, out_features) for _ in range(3))
        self.out = Dense(out_features, out_features)

    def forward(self, queries: Tensor, x: Tensor) -> Tensor:
        q, k, v = (
            each.unflatten(-1, (self._num_heads, -1)).transpose(1, 2)
            for each in (self.query(queries), self.key(x), self.value(x))
        )
        pooled: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return pooled
