"""The tower of Phi-3-vision (Abdin et al., 2024) and of InternLM-XComposer2-4KHD and 2.5 (Dong et al., 2024): CLIP over
the tiles and the whole image, squares of patches folded into one, a learned end of each row, a learned separator
between the two pictures, and an MLP over all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import TowerConfig, VisionTower
from asyncllm.vl.towers.clip import ClipConfig, ClipEncoder, clip_weights
from asyncllm.vl.towers.parts import Dense, Table, with_row_ends
from asyncllm.vl.towers.uploads import upload_pixels

__all__ = ["HdConfig", "HdTower"]

FOLD = 2
"""Patches along a side of the square that becomes a token."""


class HdConfig(TowerConfig, frozen=True, kw_only=True):
    """An encoder and its weights' names."""

    encoder: ClipConfig
    read_layers: int
    """Number of layers whose output is read."""
    source: str
    """The checkpoint's module that holds the encoder."""
    names: Mapping[str, str]
    """Rows of a weight table for the row ends, the separator and the projector."""
    whole_first: bool = False
    """Whether the whole image's tokens come before the tiles'."""

    def build(self, hidden_size: int) -> HdTower:
        return HdTower(self, hidden_size)

    @property
    def weights(self) -> Mapping[str, str]:
        return {**clip_weights(self.source, "vision.encoder"), **self.names}

    @property
    def unused(self) -> Sequence[str]:
        return [f"{self.source}.post_layernorm", f"{self.source}.embeddings.position_ids"]


class HdTower(VisionTower):
    def __init__(self, config: HdConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.encoder = ClipEncoder(config.encoder)
        width = config.encoder.hidden_size * FOLD**2
        self.row_end, self.separator = Table(1, 1, 1, width), Table(1, 1, width)
        self.projector_1, self.projector_2 = Dense(width, hidden_size), Dense(hidden_size, hidden_size)

    def encode(self, images: Sequence[PromptImage]) -> list[Tensor]:
        weight = self.projector_1.weight
        patches = self.encoder(upload_pixels(images, weight), self.config.read_layers)[:, 1:]
        parts = torch.split(patches, [len(image.pixels) for image in images])
        joined = [self._joined(part, image.tiles) for part, image in zip(parts, images, strict=True)]
        features = self.projector_2(F.gelu(self.projector_1(torch.cat(joined))))
        return list(torch.split(features, [len(each) for each in joined]))

    def _joined(self, patches: Tensor, shape: tuple[int, int]) -> Tensor:
        """Join patches [1 + rows * columns, patches, hidden], the whole first, to the rows of one picture, a separator
        and the rows of the other [length, width]."""
        tiles, whole = self._lines(patches[1:], *shape), self._lines(patches[:1], 1, 1)
        first, last = (whole, tiles) if self.config.whole_first else (tiles, whole)
        return torch.cat([first, self.separator()[0], last])

    def _lines(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        """Return patches [rows * columns, patches, hidden] of tiles as rows of tokens of the whole picture
        [tokens, width], each followed by its end."""
        side = self.config.encoder.side // FOLD
        squares = patches.view(rows, columns, side, FOLD, side, FOLD, -1).permute(0, 2, 1, 4, 3, 5, 6)
        picture = squares.reshape(rows * side, columns * side, -1)
        return with_row_ends(picture, self.row_end().flatten())
