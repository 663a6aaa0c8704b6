"""The common parts of towers with plain blocks over patches, of which squares become tokens: Qwen3-VL's and
PaddleOCR-VL's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asyncllm.kernels import split_segments
from asyncllm.layers.layer import Layer
from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import Shown
from asyncllm.vl.towers.parts import Dense
from asyncllm.vl.towers.patches import PatchesConfig
from asyncllm.vl.towers.qwen_vl import PatchBlock, grids_of, pixels_of, square_places
from asyncllm.vl.towers.uploads import upload

__all__ = ["SquareMerger", "plain_blocks", "show_squares"]


def plain_blocks(config: PatchesConfig, eps: float) -> nn.ModuleList:
    """Make a tower's blocks, with layer norms and plain MLPs."""
    return nn.ModuleList(
        PatchBlock(
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            norm=LayerNorm,
            activation=config.activation,
            gated=False,
            eps=eps,
        )
        for _ in range(config.num_layers)
    )


def show_squares(images: Sequence[PromptImage], config: PatchesConfig, device: torch.device) -> Shown:
    """Upload the pixels of all images, their patches' rows and columns [squares, merge * merge, 2], and how many
    patches a patch's image has along them [T, 2]. The patches of an image see each other."""
    grids, merge = grids_of(images), config.merge
    lengths = [rows * columns * merge**2 for rows, columns in grids]
    sizes = torch.tensor(grids).repeat_interleave(torch.tensor(lengths), 0) * merge
    tensors = (pixels_of(images, config.frames), square_places(grids, merge), sizes)
    return Shown(tuple(upload(each, device) for each in tensors), (split_segments(lengths, device),))


class SquareMerger(Layer):
    """x [T, hidden] -> a token for each square [T / square, out]. `joined`: the norm is of whole squares."""

    def __init__(self, size: int, square: int, out_features: int, *, eps: float, joined: bool = False) -> None:
        super().__init__()
        self._width, self._joined = size * square, joined
        self.norm = LayerNorm(self._width if joined else size, eps)
        self.first, self.second = Dense(self._width, self._width), Dense(self._width, out_features)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.view(-1, self._width)) if self._joined else self.norm(x).view(-1, self._width)
        merged: Tensor = self.second(F.gelu(self.first(x)))
        return merged
