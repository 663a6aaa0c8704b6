"""The towers of Qwen2-VL (Wang et al., 2024) and Qwen2.5-VL (Bai et al., 2025): images of any size.

Patches are ordered by squares, have two-dimensional rotary positions, and attend within their image, or in most layers
of Qwen2.5-VL within windows of it. A square of patches becomes one token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from asyncllm.kernels import split_segments
from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.layers.norm import Norm, RMSNorm
from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import CapturableTower, TowerInputs
from asyncllm.vl.towers.block import GATED
from asyncllm.vl.towers.parts import PatchEmbedding
from asyncllm.vl.towers.patches import PatchesConfig
from asyncllm.vl.towers.squares import (
    EPS,
    PatchBlocks,
    SquareMerger,
    grids_of,
    in_time,
    pixels_of,
    square_places,
    square_rotation,
)
from asyncllm.vl.towers.uploads import upload

__all__ = ["QwenVLConfig", "QwenVLTower"]


class QwenVLConfig(PatchesConfig, frozen=True, kw_only=True):
    gated: bool
    """Whether MLPs are gated and norms are RMS norms, as in Qwen2.5-VL, rather than plain MLPs and layer norms."""
    window: int | None = None
    """Squares of patches along a side of a window, or None without windows."""
    full_layers: frozenset[int] = frozenset()
    """Layers that attend to the whole image although others have windows."""
    num_kv_heads: int | None = None
    """Number of key and value heads, if fewer than query heads (EXAONE 4.5)."""

    def build(self, hidden_size: int) -> QwenVLTower:
        return QwenVLTower(self, hidden_size)

    @property
    def weights(self) -> Mapping[str, str]:
        gated = {f"{name}_proj": target for name, target in GATED.items()}
        rows = {
            **self.trunk_weights(gated if self.gated else {"fc1": "up", "fc2": "down"}),
            "visual.merger.ln_q": "vision.merger.norm",
            "visual.merger.mlp.0": "vision.merger.first",
            "visual.merger.mlp.2": "vision.merger.second",
        }
        return self.placed(rows)

    @property
    def unused(self) -> Sequence[str]:
        # The layers for multi-token prediction.
        return [*super().unused, *(() if self.num_kv_heads is None else ("mtp",))]


class QwenVLTower(CapturableTower):
    def __init__(self, config: QwenVLConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        norm: type[Norm] = RMSNorm if config.gated else LayerNorm
        self.patches = PatchEmbedding((config.frames, config.patch_size, config.patch_size), size, bias=False)
        self.layers = PatchBlocks(
            config, norm=norm, activation=config.activation, gated=config.gated, num_kv_heads=config.num_kv_heads
        )
        self.merger = SquareMerger(size, config.merge**2, hidden_size, eps=EPS, norm=norm)

    def upload_inputs(self, images: Sequence[PromptImage]) -> TowerInputs:
        device, merge = self.merger.first.weight.device, self.config.merge
        grids, square = grids_of(images, merge), merge**2
        order, windows = _windows(grids, self.config.window)
        places = square_places(grids, merge)[order]
        whole = split_segments([rows * columns * square for rows, columns in grids], device)
        parts = split_segments([count * square for count in windows], device)
        pixels = pixels_of(images, self.config.frames)
        return TowerInputs(tuple(upload(each, device) for each in (pixels, order, places)), (whole, parts))

    def encode_inputs(self, inputs: TowerInputs) -> Tensor:
        config, size, square = self.config, self.config.hidden_size, self.config.merge**2
        (pixels, order, places), (whole, parts) = inputs
        x = self.patches(in_time(pixels, config.frames)).view(-1, square, size)[order].flatten(0, 1)
        rotation = square_rotation(places, size // config.num_heads)
        for number, layer in enumerate(self.layers):
            within = whole if config.window is None or number in config.full_layers else parts
            x = layer(x, rotation, within)
        merged = self.merger(x)
        ordered = torch.empty_like(merged)
        ordered[order] = merged
        return ordered


def _windows(grids: Sequence[tuple[int, int]], window: int | None) -> tuple[Tensor, list[int]]:
    """Return the indices of the squares of all images in the order of their windows, and each window's number of
    squares."""
    order: list[Tensor] = []
    counts: list[int] = []
    start = 0
    for rows, columns in grids:
        index = torch.arange(rows * columns).view(rows, columns) + start
        start += rows * columns
        for band in torch.split(index, window or rows, 0):
            for part in torch.split(band, window or columns, 1):
                order.append(part.flatten())
                counts.append(part.numel())
    return torch.cat(order), counts
