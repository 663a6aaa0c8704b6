"""Sizes of LLaVA-NeXT's tiled images: the best of a few shapes, and the part of it that is not padding (Liu et al.,
2024)."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["best_resolution", "fitted", "grid_of", "num_tokens", "shrunk", "unpadded"]

Size = tuple[int, int]
"""Height and width."""


def best_resolution(size: Size, pinpoints: Sequence[Size]) -> Size:
    """Return the shape that keeps most of an image's pixels and, among equal ones, has the least padding."""

    def kept_and_wasted(shape: Size) -> tuple[int, int]:
        scale = min(shape[1] / size[1], shape[0] / size[0])
        pixels = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
        return pixels, pixels - shape[0] * shape[1]

    return max(pinpoints, key=kept_and_wasted)


def fitted(size: Size, shape: Size) -> Size:
    """Return the size of an image that is scaled to fit a shape, with its ratio kept."""
    scale_h, scale_w = shape[0] / size[0], shape[1] / size[1]
    if scale_w < scale_h:
        return min(math.ceil(size[0] * scale_w), shape[0]), shape[1]
    return shape[0], min(math.ceil(size[1] * scale_h), shape[1])


def grid_of(size: Size, pinpoints: Sequence[Size], tile: int) -> Size:
    """Return the rows and columns of tiles that an image is cut into."""
    height, width = best_resolution(size, pinpoints)
    return height // tile, width // tile


def unpadded(size: Size, grid: Size) -> tuple[int, int, int, int]:
    """Return the part of a grid of patches that is not padding: its first row and column, then its numbers of rows and
    columns."""
    (height, width), (rows, columns) = size, grid
    if width / height > columns / rows:
        padding = (rows - int(round(height * (columns / width), 7))) // 2
        return padding, 0, rows - 2 * padding, columns
    padding = (columns - int(round(width * (rows / height), 7))) // 2
    return 0, padding, rows, columns - 2 * padding


def shrunk(grid: Size, max_patches: int | None) -> Size:
    """Return the rows and columns to which a grid of patches is reduced if it has more than about `max_patches`
    (LLaVA-OneVision)."""
    ratio = 0.0 if max_patches is None else math.sqrt(grid[0] * grid[1] / max_patches)
    return (int(grid[0] // ratio), int(grid[1] // ratio)) if ratio > 1.1 else grid


def num_tokens(size: Size, pinpoints: Sequence[Size], tile: int, side: int, max_patches: int | None = None) -> int:
    """Return the number of tokens of an image: those of the downscaled whole, and those of the tiles with a newline
    for each row. `side`: patches along a side of a tile. `max_patches`: as in `shrunk`."""
    rows, columns = grid_of(size, pinpoints, tile)
    height, width = shrunk(unpadded(size, (rows * side, columns * side))[2:], max_patches)
    return side * side + height * (width + 1)
