"""Parts of towers: linear layers, patch embeddings and learned tensors, in plain torch.

They are neither sharded nor quantized nor adapted. A tower runs once per image, so torch's own products suffice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isqrt
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asyncllm.layers.layer import ParameterOwner

__all__ = [
    "ACTIVATIONS",
    "Dense",
    "PatchEmbedding",
    "Table",
    "TowerActivation",
    "cut",
    "empty",
    "fold_squares",
    "join_tiles",
    "with_row_ends",
]

TowerActivation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu"]

ACTIVATIONS: Mapping[TowerActivation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
}


def cut(pixels: Tensor, size: int) -> Tensor:
    """Cut pixels [N, channels, height, width] into square patches of this size, row by row,
    [N, patches, channels * size * size]. Incomplete patches at the right and the bottom are dropped."""
    count, channels, height, width = pixels.shape
    rows, columns = height // size, width // size
    whole = pixels[..., : rows * size, : columns * size]
    squares = whole.reshape(count, channels, rows, size, columns, size).permute(0, 2, 4, 1, 3, 5)
    return squares.reshape(count, -1, channels * size * size)


def fold_squares(x: Tensor, fold: int) -> Tensor:
    """Concatenate each square of fold x fold patches of square pictures [N, side * side, hidden], row by row,
    [N, (side / fold)^2, fold * fold * hidden]."""
    count, side = len(x), isqrt(x.shape[1]) // fold
    squares = x.reshape(count, side, fold, side, fold, -1).permute(0, 1, 3, 2, 4, 5)
    return squares.reshape(count, side * side, -1)


def join_tiles(x: Tensor, rows: int, columns: int) -> Tensor:
    """Join the tokens of square tiles [rows * columns, side * side, hidden] to a picture [rows * side, columns * side,
    hidden]."""
    side = isqrt(x.shape[1])
    tiles = x.view(rows, columns, side, side, -1).transpose(1, 2)
    return tiles.reshape(rows * side, columns * side, -1)


def with_row_ends(picture: Tensor, row_end: Tensor) -> Tensor:
    """Append `row_end` [hidden] to each row of picture [rows, columns, hidden], giving [rows * (columns + 1),
    hidden]."""
    return torch.cat([picture, row_end.expand(len(picture), 1, -1)], 1).flatten(0, 1)


def empty(*shape: int) -> nn.Parameter:
    """Return an uninitialized parameter."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)


class Dense(ParameterOwner):
    """A linear layer from [..., in] to [..., out]."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = empty(out_features, in_features)
        self.bias = empty(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class PatchEmbedding(ParameterOwner):
    """A convolution without overlap, as a linear layer from patches [..., channels * window] to [..., out]. `window`:
    the kernel's sizes, the last ones height and width."""

    def __init__(self, window: tuple[int, ...], out_features: int, *, bias: bool, channels: int = 3) -> None:
        super().__init__()
        self.weight = empty(out_features, channels, *window)
        self.bias = empty(out_features) if bias else None

    def forward(self, patches: Tensor) -> Tensor:
        return F.linear(patches.to(self.weight.dtype), self.weight.flatten(1), self.bias)

    def of_images(self, pixels: Tensor) -> Tensor:
        """Embed pixels [N, 3, height, width] as [N, patches, out], row by row."""
        embedded: Tensor = self(cut(pixels, self.weight.shape[-1]))
        return embedded


class Table(ParameterOwner):
    """A learned tensor."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = empty(*shape)

    def forward(self) -> Tensor:
        return self.weight
