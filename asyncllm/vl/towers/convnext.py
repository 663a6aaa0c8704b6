"""ConvNeXt (Liu et al., 2022), of which MGM reads the output of each stage."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch.nn.functional as F
from torch import Tensor, nn

from asyncllm.layers.layer import Layer, ParameterOwner
from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.vl.towers.parts import Dense, PatchEmbedding, Table, empty

__all__ = ["ConvNextConfig", "ConvNextEncoder", "convnext_weights"]

EPS = 1e-6
KERNEL = 7


class ConvNextConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Stages, each of which halves the picture's sides, except the first."""

    depths: tuple[int, ...]
    """Number of blocks of each stage."""
    sizes: tuple[int, ...]
    """Number of channels of each stage."""
    patch_size: int = 4
    """Pixels along a side of a cell of the first stage."""


class ConvNextEncoder(Layer):
    """Encodes pixels [N, 3, height, width] as [N, channels, rows, columns] for each stage."""

    def __init__(self, config: ConvNextConfig) -> None:
        super().__init__()
        patch, first = config.patch_size, config.sizes[0]
        self.stem = _Shrink(3, first, patch)
        self.stem_norm = LayerNorm(first, EPS)
        self.stages = nn.ModuleList(
            _Stage(config.sizes[max(number - 1, 0)], size, depth, shrinks=number > 0)
            for number, (size, depth) in enumerate(zip(config.sizes, config.depths, strict=True))
        )

    def forward(self, pixels: Tensor) -> list[Tensor]:
        x, stages = self.stem_norm(self.stem(pixels)), []
        for stage in self.stages:
            x = stage(x)
            stages.append(x.permute(0, 3, 1, 2))
        return stages


class _Stage(Layer):
    """Maps x [N, rows, columns, before] to `size` channels, halving its sides if it `shrinks`."""

    def __init__(self, before: int, size: int, depth: int, *, shrinks: bool) -> None:
        super().__init__()
        self.norm = LayerNorm(before, EPS) if shrinks else None
        self.shrink = _Shrink(before, size, 2) if shrinks else None
        self.blocks = nn.ModuleList(_Block(size) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        if self.norm is not None and self.shrink is not None:
            x = self.shrink(self.norm(x).permute(0, 3, 1, 2))
        for block in self.blocks:
            x = block(x)
        return x


class _Block(Layer):
    """A residual block over x [N, rows, columns, channels]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.mix = _Mix(size)
        self.norm = LayerNorm(size, EPS)
        self.up = Dense(size, 4 * size)
        self.down = Dense(4 * size, size)
        self.scale = Table(size)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.mix(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1).contiguous())
        moved: Tensor = self.down(F.gelu(self.up(y))) * self.scale()
        return x + moved


class _Mix(ParameterOwner):
    """A depthwise convolution of x [N, channels, rows, columns]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = empty(size, 1, KERNEL, KERNEL), empty(size)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, padding=KERNEL // 2, groups=len(self.bias))


class _Shrink(PatchEmbedding):
    """Maps x [N, channels, height, width] to [N, rows, columns, out], one cell for each square of this side."""

    def __init__(self, channels: int, out: int, side: int) -> None:
        super().__init__((side, side), out, bias=True, channels=channels)
        self._side = side

    def forward(self, x: Tensor) -> Tensor:
        count, channels, height, width = x.shape
        rows, columns, side = height // self._side, width // self._side, self._side
        squares = x.reshape(count, channels, rows, side, columns, side).permute(0, 2, 4, 1, 3, 5)
        return super().forward(squares.reshape(count, rows, columns, -1))


def convnext_weights(source: str, target: str, num_stages: int) -> Mapping[str, str]:
    """Return the rows of a weight table from the checkpoint's module `source` to the encoder at `target`."""
    rows = {f"{source}.vision_stem.0": f"{target}.stem", f"{source}.vision_stem.1": f"{target}.stem_norm"}
    for number in range(num_stages):
        stage, own = f"{source}.vision_stages.{number}", f"{target}.stages.{number}"
        block, mine = f"{stage}.blocks.{{i}}", f"{own}.blocks.{{i}}"
        if number:
            rows |= {f"{stage}.downsample.0": f"{own}.norm", f"{stage}.downsample.1": f"{own}.shrink"}
        rows |= {
            f"{block}.conv_dw": f"{mine}.mix",
            f"{block}.norm": f"{mine}.norm",
            f"{block}.mlp.fc1": f"{mine}.up",
            f"{block}.mlp.fc2": f"{mine}.down",
            f"{block}.gamma": f"{mine}.scale:weight",
        }
    return rows
