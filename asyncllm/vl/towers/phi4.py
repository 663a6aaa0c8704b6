"""The tower of Phi-4-multimodal (Abouelenin et al., 2025): SigLIP over the tiles and the whole image with padding
masked, means of squares of patches, a learned end of each row, a learned separator, and an MLP over all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import TowerConfig, VisionTower
from asyncllm.vl.towers.clip import ClipConfig, ClipEncoder, clip_weights, share_places
from asyncllm.vl.towers.parts import Dense, Table, fold_squares, join_tiles, with_row_ends
from asyncllm.vl.towers.uploads import upload_pixels

__all__ = ["Phi4VisionConfig", "Phi4VisionTower"]

SOURCE = "embed_tokens_extend.image_embed"
FOLD = 2
"""Patches along a side of the square that becomes a token."""

_NAMES = {
    "vision.row_end:weight": ("sub_img_feature_extensor", "sub_GN"),
    "vision.separator:weight": ("global_img_feature_extensor", "glb_GN"),
    "vision.projector_1": ("img_projection_up", "img_projection.0"),
    "vision.projector_2": ("img_projection_down", "img_projection.2"),
}
"""Target -> the names in transformers' and the authors' checkpoints."""

_LAYER, _OWN = "layers.{i}", "layers.{i}"
_ADAPTED = {
    f"{_LAYER}.self_attn.qkv_proj": f"{_OWN}.attn.qkv[q+k+v]",
    f"{_LAYER}.self_attn.o_proj": f"{_OWN}.attn.out",
    f"{_LAYER}.mlp.gate_up_proj": f"{_OWN}.mlp.gate_up[gate+up]",
    f"{_LAYER}.mlp.down_proj": f"{_OWN}.mlp.down",
}
"""The decoder's linear layers, which are stored next to their adapters in the authors' files."""


class Phi4VisionConfig(TowerConfig, frozen=True, kw_only=True):
    """An encoder and a projector."""

    encoder: ClipConfig
    read_layers: int
    """Number of layers whose output is read."""

    def build(self, hidden_size: int) -> Phi4VisionTower:
        return Phi4VisionTower(self, hidden_size)

    @property
    def weights(self) -> Mapping[str, str]:
        return {
            **clip_weights(f"{SOURCE}.img_processor", "vision.encoder"),
            **{f"{SOURCE}.{name}": own for own, names in _NAMES.items() for name in names},
            **{f"{row}.base_layer": own for row, own in _ADAPTED.items()},
        }

    @property
    def unused(self) -> Sequence[str]:
        beside = [f"{row}.{factor}" for row in _ADAPTED for factor in ("lora_A", "lora_B")]
        unread = ("post_layernorm", "head")
        return [*beside, "embed_tokens_extend.audio_embed", *(f"{SOURCE}.img_processor.{name}" for name in unread)]


class Phi4VisionTower(VisionTower):
    def __init__(self, config: Phi4VisionConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        size = config.encoder.hidden_size
        self.encoder = ClipEncoder(config.encoder)
        self.row_end, self.separator = Table(1, 1, 1, size), Table(1, 1, size)
        self.projector_1, self.projector_2 = Dense(size, hidden_size), Dense(hidden_size, hidden_size)

    def encode(self, images: Sequence[PromptImage]) -> list[Tensor]:
        weight = self.projector_1.weight
        tiles = upload_pixels(images, weight)
        patches = self._patches(tiles, [part for image in images for part in self._filled(image)])
        squares = fold_squares(patches, FOLD)
        means = squares.view(*squares.shape[:2], FOLD**2, -1).mean(-2)
        parts = torch.split(means, [len(image.pixels) for image in images])
        joined = [self._joined(part, image) for part, image in zip(parts, images, strict=True)]
        features = self.projector_2(F.gelu(self.projector_1(torch.cat(joined))))
        return list(torch.split(features, [len(each) for each in joined]))

    def _filled(self, image: PromptImage) -> list[tuple[int, int]]:
        """Return the rows and columns of patches that are not padding, for the whole and for each tile."""
        side, (filled,), (rows, columns) = self.config.encoder.side, image.pictures, image.tiles
        down, across = (
            [max(0, min(side, own - side * number)) for number in range(count)]
            for own, count in zip(filled, (rows, columns), strict=True)
        )
        return [(side, side), *((row, column) for row in down for column in across)]

    def _patches(self, tiles: Tensor, filled: Sequence[tuple[int, int]]) -> Tensor:
        """Return the hidden states [N, patches, hidden] of tiles [N, 3, size, size]. `filled`: as `_filled`."""
        side, count = self.config.encoder.side, self.config.read_layers
        places = torch.zeros(len(tiles), side, side, dtype=torch.long)
        mask = torch.zeros(len(tiles), side, side, dtype=torch.bool)
        for own_places, own_mask, (rows, columns) in zip(places, mask, filled, strict=True):
            row, column = share_places(max(rows, 1), side), share_places(max(columns, 1), side)
            own_places[:rows, :columns] = row[:rows, None] * side + column[:columns]
            own_mask[:rows, :columns] = True
        places, mask = places.flatten(1).to(tiles.device), mask.flatten(1)
        # The output of a tile that is all padding is dropped, so its mask may be full, which avoids an empty softmax.
        mask |= ~mask.any(1, keepdim=True)
        whole = mask.all(1)
        hidden = torch.empty(len(tiles), side**2, self.config.encoder.hidden_size, dtype=tiles.dtype).to(tiles.device)
        for index in (whole.nonzero()[:, 0], (~whole).nonzero()[:, 0]):
            if len(index):
                masks, rows_of = mask[index], index.to(tiles.device)
                attended = None if masks.all() else masks.to(tiles.device)
                hidden[rows_of] = self.encoder(tiles[rows_of], count, places[rows_of], attended)
        return hidden

    def _joined(self, tokens: Tensor, image: PromptImage) -> Tensor:
        """Join tokens [1 + rows * columns, tokens, hidden], the whole first, to the rows of the tiles, a separator and
        the rows of the whole [length, hidden]."""
        side, (rows, columns) = self.config.encoder.side // FOLD, image.tiles
        down, across = (-(-each // FOLD) for each in image.pictures[0])
        tiles, whole = join_tiles(tokens[1:], rows, columns)[:down, :across], tokens[0].view(side, side, -1)
        row_end = self.row_end().flatten()
        return torch.cat([with_row_ends(tiles, row_end), self.separator()[0], with_row_ends(whole, row_end)])
