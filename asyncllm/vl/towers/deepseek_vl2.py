"""The tower of DeepSeek-VL2 (Wu et al., 2024): SigLIP over the whole image and its tiles, squares of patches folded
into one, an MLP, a learned end of each row, and a learned separator between the two pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import TowerConfig, VisionTower
from asyncllm.vl.towers.clip import ClipConfig, ClipEncoder, timm_weights
from asyncllm.vl.towers.parts import Dense, Table, join_tiles, with_row_ends
from asyncllm.vl.towers.uploads import upload

__all__ = ["DeepseekVL2Config", "DeepseekVL2Tower"]


class DeepseekVL2Config(TowerConfig, frozen=True, kw_only=True):
    """An encoder and a projector."""

    encoder: ClipConfig
    """Its image_size is a multiple of the patch size; further pixels are cropped."""
    fold: int
    """Patches along a side of the square that becomes a token; squares at the edge are padded with zeros."""
    inner_size: int
    """Inner features of the projector."""
    whole_first: bool
    """Whether the whole image's tokens come before the tiles'."""

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
        """Return patches [N, side * side, hidden] as squares [N, tokens, hidden * fold * fold], ordered by feature,
        then by patch."""
        fold, side = self.config.fold, self.config.encoder.side
        picture = x.view(len(x), side, side, -1).permute(0, 3, 1, 2)
        missing = -side % fold
        return F.unfold(F.pad(picture, (0, missing, 0, missing)), fold, stride=fold).transpose(1, 2)

    def _joined(self, tokens: Tensor, shape: tuple[int, int]) -> Tensor:
        """Return the features [length, hidden] of an image from tokens [1 + rows * columns, tokens, hidden], the whole
        first."""
        whole, tiles = self._lines(tokens[:1], 1, 1), self._lines(tokens[1:], *shape)
        first, last = (whole, tiles) if self.config.whole_first else (tiles, whole)
        return torch.cat([first, self.separator()[None], last])

    def _lines(self, tokens: Tensor, rows: int, columns: int) -> Tensor:
        """Return tokens [rows * columns, tokens, hidden] of tiles as rows of the whole picture [length, hidden], each
        followed by its end."""
        return with_row_ends(join_tiles(tokens, rows, columns), self.row_end())
