"""The tower of DeepSeek-VL2 (Wu et al., 2024): SigLIP over the whole of an image and tiles of it, squares of patches
folded into one, an MLP, a learned end of each row and a separator between the two pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import TowerConfig, VisionTower
from asyncllm.vl.towers.clip import ClipConfig, ClipEncoder, timm_weights
from asyncllm.vl.towers.parts import Dense, Table
from asyncllm.vl.towers.uploads import upload

__all__ = ["DeepseekVL2Config", "DeepseekVL2Tower"]


class DeepseekVL2Config(TowerConfig, frozen=True, kw_only=True):
    """An encoder, and how its patches become tokens."""

    encoder: ClipConfig
    """Of pictures cropped to whole patches."""
    fold: int
    """Patches along a side of the square that becomes a token; squares at the edge are filled with zeros."""
    inner_size: int
    """Of the projector."""
    whole_first: bool

    def build(self, hidden_size: int) -> DeepseekVL2Tower:
        return DeepseekVL2Tower(self, hidden_size)

    @property
    def weights(self) -> Mapping[str, str]:
        return {
            **timm_weights("vision", "vision.encoder"),
            "projector.layers.0": "vision.projector_1",
            "projector.layers.2": "vision.projector_2",
            "image_newline": "vision.row_end:weight",
            "view_seperator": "vision.separator:weight",
        }

    @property
    def unused(self) -> Sequence[str]:
        return ("vision.attn_pool",)

    @property
    def decoder_source(self) -> str:
        return "language"


class DeepseekVL2Tower(VisionTower):
    def __init__(self, config: DeepseekVL2Config, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.encoder = ClipEncoder(config.encoder)
        self.projector_1 = Dense(config.encoder.hidden_size * config.fold**2, config.inner_size)
        self.projector_2 = Dense(config.inner_size, hidden_size)
        self.row_end, self.separator = Table(hidden_size), Table(hidden_size)

    def encode(self, images: Sequence[PromptImage]) -> list[Tensor]:
        weight, encoder = self.projector_1.weight, self.config.encoder
        tiles = [torch.from_numpy(image.pixels) for image in images]
        pixels = upload(torch.cat(tiles).to(weight.dtype), weight.device)
        squares = self._folded(self.encoder(pixels, encoder.num_layers))
        tokens = self.projector_2(F.gelu(self.projector_1(squares)))
        parts = torch.split(tokens, [len(each) for each in tiles])
        return [self._joined(part, image.tiles) for part, image in zip(parts, images, strict=True)]

    def _folded(self, x: Tensor) -> Tensor:
        """Return patches [N, side * side, hidden] as squares, each feature's patches side by side
        [N, tokens, hidden * fold * fold]."""
        fold, side = self.config.fold, self.config.encoder.side
        picture = x.view(len(x), side, side, -1).permute(0, 3, 1, 2)
        missing = -side % fold
        return F.unfold(F.pad(picture, (0, missing, 0, missing)), fold, stride=fold).transpose(1, 2)

    def _joined(self, tokens: Tensor, shape: tuple[int, int]) -> Tensor:
        """tokens [1 + rows * columns, tokens, hidden] of an image, the whole first -> [length, hidden]."""
        whole, tiles = self._lines(tokens[:1], 1, 1), self._lines(tokens[1:], *shape)
        first, last = (whole, tiles) if self.config.whole_first else (tiles, whole)
        return torch.cat([first, self.separator()[None], last])

    def _lines(self, tokens: Tensor, rows: int, columns: int) -> Tensor:
        """tokens [rows * columns, tokens, hidden] -> row by row of the whole picture, each with its end."""
        side = -(-self.config.encoder.side // self.config.fold)
        picture = tokens.view(rows, columns, side, side, -1).transpose(1, 2).reshape(rows * side, columns * side, -1)
        return torch.cat([picture, self.row_end().expand(len(picture), 1, -1)], 1).flatten(0, 1)
