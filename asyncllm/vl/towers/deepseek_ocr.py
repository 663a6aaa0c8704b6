"""The tower of DeepSeek-OCR (Wei et al., 2025): SAM over the whole image and its tiles, two convolutions that leave a
sixteenth of the patches, and CLIP over these. The features of both are joined and projected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import TowerConfig, VisionTower
from asyncllm.vl.towers.clip import ClipConfig, ClipEncoder, clip_weights
from asyncllm.vl.towers.parts import Dense, Table, join_tiles, with_row_ends
from asyncllm.vl.towers.sam import Convolution, SamConfig, SamEncoder, original_sam_weights
from asyncllm.vl.towers.uploads import upload_pixels

__all__ = ["DeepseekOcrConfig", "DeepseekOcrTower"]

_CLIP, _LAYER = "vision_model", "vision.small.layers.{i}"


class DeepseekOcrConfig(TowerConfig, frozen=True, kw_only=True):
    """Two encoders and the sizes of their pictures."""

    large: SamConfig
    small: ClipConfig
    """Reads the large encoder's features in place of embedded patches."""
    channels: tuple[int, int]
    """Output channels of the two convolutions; the latter are the small encoder's hidden size."""
    tile: int
    """Side of a tile in pixels."""

    def build(self, hidden_size: int) -> DeepseekOcrTower:
        return DeepseekOcrTower(self, hidden_size)

    @property
    def weights(self) -> Mapping[str, str]:
        clip = clip_weights(_CLIP, "vision.small")
        return {
            **original_sam_weights("sam_model", "vision.large"),
            "sam_model.net_2": "vision.shrink_1",
            "sam_model.net_3": "vision.shrink_2",
            **{row.replace(".encoder.", ".transformer."): own for row, own in clip.items()},
            f"{_CLIP}.transformer.layers.{{i}}.self_attn.qkv_proj": f"{_LAYER}.attn.qkv[q+k+v]",
            "projector.layers": "vision.projector",
            "image_newline": "vision.row_end:weight",
            "view_seperator": "vision.separator:weight",
        }

    @property
    def unused(self) -> Sequence[str]:
        return [f"{_CLIP}.embeddings.position_ids"]


class DeepseekOcrTower(VisionTower):
    def __init__(self, config: DeepseekOcrConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        first, last = config.channels
        self.large, self.small = SamEncoder(config.large), ClipEncoder(config.small)
        self.shrink_1 = Convolution(config.large.output_channels, first, 3, stride=2)
        self.shrink_2 = Convolution(first, last, 3, stride=2)
        self.projector = Dense(2 * last, hidden_size)
        self.row_end, self.separator = Table(hidden_size), Table(hidden_size)

    def encode(self, images: Sequence[PromptImage]) -> list[Tensor]:
        weight, side, tile = self.projector.weight, self.config.large.image_size, self.config.tile
        found = []
        for image in images:
            numbers = upload_pixels([image], weight)
            whole, tiles = numbers[: 3 * side**2], numbers[3 * side**2 :]
            parts = [self._lines(self._features(whole.view(1, 3, side, side)), 1, 1), self.separator()[None]]
            if len(tiles):
                # One at a time, since attention scores cover all pairs of a picture's patches.
                seen = torch.cat([self._features(each[None]) for each in tiles.view(-1, 3, tile, tile)])
                parts.insert(0, self._lines(seen, *image.tiles))
            found.append(torch.cat(parts))
        return found

    def _features(self, pixels: Tensor) -> Tensor:
        """Encode pixels [N, 3, size, size] as [N, tokens, hidden]."""
        patches = self.shrink_2(self.shrink_1(self.large(pixels)[1])).flatten(2).transpose(1, 2)
        read = self.small.of_embedded(patches, self.config.small.num_layers, self._positions(patches.shape[1]))
        features: Tensor = self.projector(torch.cat([read[:, 1:], patches], -1))
        return features

    def _positions(self, count: int) -> Tensor:
        """Return the small encoder's positions for `count` patches [1 + count, hidden], by bicubic interpolation."""
        learned: Tensor = self.small.positions()
        side, new = self.config.small.side, round(count**0.5)
        if new == side:
            return learned
        grid = learned[1:].float().view(1, side, side, -1).permute(0, 3, 1, 2)
        stretched = F.interpolate(grid, (new, new), mode="bicubic", antialias=True)
        return torch.cat([learned[:1], stretched.flatten(2)[0].T.to(learned.dtype)])

    def _lines(self, tokens: Tensor, rows: int, columns: int) -> Tensor:
        """Return tokens [rows * columns, tokens, hidden] of tiles as rows of the whole picture [length, hidden], each
        followed by its end."""
        return with_row_ends(join_tiles(tokens, rows, columns), self.row_end())
