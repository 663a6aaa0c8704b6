"""Common parts of towers over images of any size: blocks with two-dimensional rotary positions, and the merging of
squares of patches into tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asyncllm import kernels
from asyncllm.kernels import Rotation, Segments, split_segments
from asyncllm.layers.layer import Layer
from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.layers.norm import Norm
from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import TowerInputs
from asyncllm.vl.towers.block import GatedMLP, JoinedQKV
from asyncllm.vl.towers.parts import ACTIVATIONS, Dense, TowerActivation
from asyncllm.vl.towers.patches import BlocksConfig, PatchesConfig
from asyncllm.vl.towers.uploads import upload

__all__ = [
    "EPS",
    "PatchBlocks",
    "SquareMerger",
    "grids_of",
    "in_time",
    "pixels_of",
    "rotation_by",
    "square_inputs",
    "square_places",
    "square_rotation",
]

EPS = 1e-6
THETA = 10000.0


def square_inputs(images: Sequence[PromptImage], config: PatchesConfig, device: torch.device) -> TowerInputs:
    """Upload the pixels of all images, the row and column of each patch [squares, merge * merge, 2], and the rows and
    columns of each patch's image [T, 2]. The patches of an image attend to each other."""
    merge = config.merge
    grids = grids_of(images, merge)
    lengths = [rows * columns * merge**2 for rows, columns in grids]
    sizes = torch.tensor(grids).repeat_interleave(torch.tensor(lengths), 0) * merge
    tensors = (pixels_of(images, config.frames), square_places(grids, merge), sizes)
    return TowerInputs(tuple(upload(each, device) for each in tensors), (split_segments(lengths, device),))


def grids_of(images: Sequence[PromptImage], merge: int = 1) -> list[tuple[int, int]]:
    """Return the rows and columns of the tokens of all images. Each step of a video counts as an image, since steps do
    not attend to each other. `merge`: patches along a side of a token's square, for images with consecutive
    positions."""
    flat = {id(image): [(rows // merge, columns // merge) for rows, columns in image.pictures] for image in images}
    return [
        each for image in images for each in ([image.grid] * image.steps if image.grid is not None else flat[id(image)])
    ]


def pixels_of(images: Sequence[PromptImage], frames: int) -> Tensor:
    """Return the patches of all images [T, 3, patch * patch], or [T, 3, frames, patch * patch] if a video is among
    them; an image's patches are then repeated over the frames."""
    pixels = [torch.from_numpy(image.pixels) for image in images]
    if any(each.ndim == 4 for each in pixels):
        pixels = [in_time(each, frames).view(len(each), 3, frames, -1) for each in pixels]
    return torch.cat(pixels)


def in_time(pixels: Tensor, frames: int) -> Tensor:
    """Return the result of `pixels_of` as flat patches over all frames [T, 3 * frames * patch * patch]."""
    return (pixels if pixels.ndim == 4 else pixels[:, :, None].expand(-1, -1, frames, -1)).flatten(1)


def square_places(grids: Sequence[tuple[int, int]], merge: int) -> Tensor:
    """Return the row and column of each patch, ordered by the squares that are merged, [squares, merge * merge, 2].
    `grids`: rows and columns of squares of each image."""
    inner = torch.arange(merge)
    inner_row, inner_column = inner.repeat_interleave(merge), inner.repeat(merge)
    places = []
    for rows, columns in grids:
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        of_row = row.flatten()[:, None] * merge + inner_row
        of_column = column.flatten()[:, None] * merge + inner_column
        places.append(torch.stack([of_row, of_column], -1))
    return torch.cat(places)


def square_rotation(places: Tensor, head_dim: int) -> Rotation:
    """Return the rotation of patches at these rows and columns [..., 2]: half of the pairs by the row, half by the
    column."""
    exponents = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=places.device) / (head_dim // 2)
    return rotation_by((places.flatten(0, -2)[..., None].float() / THETA**exponents).flatten(1))


def rotation_by(angles: Tensor) -> Rotation:
    """Return the rotation by these angles [T, pairs]."""
    cos, sin = angles[:, None].cos(), angles[:, None].sin()
    return Rotation(torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1))


class PatchBlock(Layer):
    """A pre-norm block over patches with rotary positions. `gated`: whether its MLP is gated. `interleaved`: whether
    adjacent features of a head are rotated together, rather than those half a head apart. `head_norms`: whether queries
    and keys are normalized per head before they are rotated. `num_kv_heads`: number of key and value heads, if
    fewer."""

    def __init__(
        self,
        size: int,
        inner: int,
        num_heads: int,
        *,
        norm: type[Norm],
        activation: TowerActivation,
        gated: bool,
        bias: bool = True,
        eps: float = EPS,
        interleaved: bool = False,
        head_norms: bool = False,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self._interleaved = num_heads, num_kv_heads or num_heads, interleaved
        self.q_norm = norm(size // num_heads, eps) if head_norms else None
        self.k_norm = norm(size // num_heads, eps) if head_norms else None
        self.attn_norm, self.mlp_norm = norm(size, eps), norm(size, eps)
        rows = size + 2 * self.num_kv_heads * (size // num_heads)
        self.qkv, self.out = JoinedQKV(size, rows, bias=bias, queries=size), Dense(size, size, bias=bias)
        self.mlp = GatedMLP(size, inner, activation, bias=bias) if gated else None
        self.up = None if gated else Dense(size, inner, bias=bias)
        self.down = None if gated else Dense(inner, size, bias=bias)
        self._activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor, rotation: Rotation, segments: Segments) -> Tensor:
        """Compute the block for x [T, hidden], whose segments attend to themselves."""
        heads, shared = self.num_heads, self.num_kv_heads
        qkv = self.qkv(self.attn_norm(x)).view(len(x), heads + 2 * shared, -1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = qkv.split([heads, shared, shared], 1)
            qkv = torch.cat([self.q_norm(q.contiguous()), self.k_norm(k.contiguous()), v], 1)
        kernels.rotate_heads(qkv[:, : heads + shared], rotation, interleaved=self._interleaved)
        q, k, v = qkv.split([heads, shared, shared], 1)
        if shared != heads:
            k, v = (each.repeat_interleave(heads // shared, 1) for each in (k, v))
        attended = kernels.segment_attention(q, k, v, segments)
        h, x = self.mlp_norm.add(self.out(attended.flatten(1)), x)
        if self.mlp is not None:
            out: Tensor = x + self.mlp(h)
        else:
            assert self.up is not None
            assert self.down is not None
            out = x + self.down(self._activation(self.up(h)))
        return out


class PatchBlocks(nn.ModuleList):
    """The blocks of a tower in sequence."""

    def __init__(self, config: BlocksConfig, **options: Any) -> None:
        """`options`: the keyword arguments of `PatchBlock`."""
        size, inner, heads = config.hidden_size, config.intermediate_size, config.num_heads
        super().__init__(PatchBlock(size, inner, heads, **options) for _ in range(config.num_layers))

    def forward(self, x: Tensor, rotation: Rotation, segments: Segments, count: int | None = None) -> Tensor:
        """Apply the first `count` blocks, or all."""
        for block in islice(self, count):
            x = block(x, rotation, segments)
        return x


class SquareMerger(Layer):
    """Merges each square of patches x [T, hidden] into a token [T / square, out]. `joined`: whether the norm is over
    whole squares rather than patches."""

    def __init__(
        self,
        size: int,
        square: int,
        out_features: int,
        *,
        eps: float,
        norm: type[Norm] = LayerNorm,
        joined: bool = False,
    ) -> None:
        super().__init__()
        self._width, self._joined = size * square, joined
        self.norm = norm(self._width if joined else size, eps)
        self.first, self.second = Dense(self._width, self._width), Dense(self._width, out_features)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.view(-1, self._width)) if self._joined else self.norm(x).view(-1, self._width)
        merged: Tensor = self.second(F.gelu(self.first(x)))
        return merged
