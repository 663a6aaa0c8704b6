"""The tower of Qwen3-VL: Qwen2-VL's patches with learned positions besides, and what several of its layers see.

The decoder's first layers get the features of inner layers added to their outputs (DeepStack: Meng et al., 2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asyncllm.kernels import split_segments
from asyncllm.layers.layer import Layer
from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import PlannedTower, Shown
from asyncllm.vl.towers.parts import Dense, PatchEmbedding, Table
from asyncllm.vl.towers.patches import PatchesConfig
from asyncllm.vl.towers.qwen_vl import EPS, PatchBlock, grids_of, in_time, pixels_of, square_places, square_rotation

__all__ = ["Qwen3VLConfig", "Qwen3VLTower"]


class Qwen3VLConfig(PatchesConfig, frozen=True, kw_only=True):
    side: int
    """Of the square grid of learned positions, which is stretched over an image."""
    deep_layers: tuple[int, ...]
    """Layers whose outputs the decoder's first layers see, in their order."""

    def build(self, hidden_size: int) -> Qwen3VLTower:
        return Qwen3VLTower(self, hidden_size)

    @property
    def weights(self) -> Mapping[str, str]:
        mergers = {"visual.merger": "vision.merger", "visual.deepstack_merger_list.{i}": "vision.deep_mergers.{i}"}
        names = {"norm": "norm", "linear_fc1": "first", "linear_fc2": "second"}
        if self.in_thinker:
            mergers = {"visual.merger": "vision.merger", "visual.merger_list.{i}": "vision.deep_mergers.{i}"}
            names = {"ln_q": "norm", "mlp.0": "first", "mlp.2": "second"}
        rows = {
            **self.trunk_weights({"linear_fc1": "up", "linear_fc2": "down"}),
            "visual.pos_embed": "vision.positions",
            **{f"{row}.{name}": f"{target}.{names[name]}" for row, target in mergers.items() for name in names},
        }
        return self.placed(rows)


class Qwen3VLTower(PlannedTower):
    """Its features have the decoder's width several times: what is merged, and what each first layer adds."""

    def __init__(self, config: Qwen3VLConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.num_deep = len(config.deep_layers)
        size, square = config.hidden_size, config.merge**2
        self.patches = PatchEmbedding((config.frames, config.patch_size, config.patch_size), size, bias=True)
        self.positions = Table(config.side**2, size)
        self.layers = nn.ModuleList(
            PatchBlock(
                size,
                config.intermediate_size,
                config.num_heads,
                norm=LayerNorm,
                activation=config.activation,
                gated=False,
            )
            for _ in range(config.num_layers)
        )
        self.merger = _Merger(size, square, hidden_size, joined=False)
        self.deep_mergers = nn.ModuleList(_Merger(size, square, hidden_size, joined=True) for _ in config.deep_layers)

    def show(self, images: Sequence[PromptImage]) -> Shown:
        device, grids = self.positions.weight.device, grids_of(images)
        lengths = [rows * columns * self.config.merge**2 for rows, columns in grids]
        sizes = torch.tensor(grids).repeat_interleave(torch.tensor(lengths), 0)
        tensors = (pixels_of(images, self.config.frames), square_places(grids, self.config.merge), sizes)
        return Shown(tuple(each.to(device) for each in tensors), (split_segments(lengths, device),))

    def look(self, shown: Shown) -> Tensor:
        config = self.config
        (pixels, places, sizes), (whole,) = shown
        x = self.patches(in_time(pixels, config.frames))
        x = x + self._positions(places.flatten(0, 1), sizes).to(x.dtype)
        rotation = square_rotation(places, config.hidden_size // config.num_heads)
        deep: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            x = layer(x, rotation, whole)
            if number in config.deep_layers:
                deep.append(self.deep_mergers[config.deep_layers.index(number)](x))
        return torch.cat([self.merger(x), *deep], -1)

    def _positions(self, places: Tensor, sizes: Tensor) -> Tensor:
        """Return learned positions of the patches [T, hidden], between the four nearest of the stretched grid. places
        and sizes [T, 2]: a patch's row and column, and how many squares of patches its image has along them."""
        side, merge = self.config.side, self.config.merge
        exact = places.float() * (side - 1) / (sizes * merge - 1).clamp(min=1)
        low = exact.floor()
        share, low = exact - low, low.long()
        high = (low + 1).clamp(max=side - 1)
        table = self.positions()
        total = torch.zeros(len(places), table.shape[1], dtype=torch.float32, device=places.device)
        for row, row_share in ((low[:, 0], 1 - share[:, 0]), (high[:, 0], share[:, 0])):
            for column, column_share in ((low[:, 1], 1 - share[:, 1]), (high[:, 1], share[:, 1])):
                total += table[row * side + column] * (row_share * column_share)[:, None]
        return total


class _Merger(Layer):
    """x [T, hidden] -> a token for each square [T / square, out]. `joined`: the norm is of whole squares."""

    def __init__(self, size: int, square: int, out_features: int, *, joined: bool) -> None:
        super().__init__()
        self._width, self._joined = size * square, joined
        self.norm = LayerNorm(self._width if joined else size, EPS)
        self.first, self.second = Dense(self._width, self._width), Dense(self._width, out_features)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.view(-1, self._width)) if self._joined else self.norm(x).view(-1, self._width)
        merged: Tensor = self.second(F.gelu(self.first(x)))
        return merged
