"""The towers of Qwen2-VL (Wang et al., 2024) and Qwen2.5-VL (Bai et al., 2025): images of any size.

Patches come in the order of squares of merged ones, are turned by their row and column, and attend within their image:
in Qwen2.5-VL most layers within windows of it. A square becomes one token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asyncllm import kernels
from asyncllm.kernels import Rotation, Segments, split_segments
from asyncllm.layers.layer import Layer
from asyncllm.layers.layer_norm import LayerNorm
from asyncllm.layers.norm import Norm, RMSNorm
from asyncllm.prompt_image import PromptImage
from asyncllm.vl.tower import PlannedTower, Shown
from asyncllm.vl.towers.block import GATED, GatedMLP, JoinedQKV
from asyncllm.vl.towers.parts import ACTIVATIONS, Dense, PatchEmbedding, TowerActivation
from asyncllm.vl.towers.patches import PatchesConfig
from asyncllm.vl.towers.uploads import upload

__all__ = [
    "EPS",
    "PatchBlock",
    "QwenVLConfig",
    "QwenVLTower",
    "grids_of",
    "in_time",
    "pixels_of",
    "square_places",
    "square_rotation",
]

EPS = 1e-6
THETA = 10000.0


class QwenVLConfig(PatchesConfig, frozen=True, kw_only=True):
    gated: bool
    """Qwen2.5-VL: gated MLPs and root mean square norms, in the place of plain ones and layer norms."""
    window: int | None = None
    """Merged patches along a side of a window."""
    full_layers: frozenset[int] = frozenset()
    """Layers without windows, if others have them."""
    num_kv_heads: int | None = None
    """Heads of keys and values, if several of queries share one (EXAONE 4.5)."""

    def build(self, hidden_size: int) -> QwenVLTower:
        return QwenVLTower(self, hidden_size)

    @property
    def weights(self) -> Mapping[str, str]:
        gated = {f"{name}_proj": target for name, target in GATED.items()}
        rows = {
            **self.trunk_weights(gated if self.gated else {"fc1": "up", "fc2": "down"}),
            "visual.merger.ln_q": "vision.norm",
            "visual.merger.mlp.0": "vision.merger_1",
            "visual.merger.mlp.2": "vision.merger_2",
        }
        return self.placed(rows)

    @property
    def unused(self) -> Sequence[str]:
        # Layers that guess further tokens.
        return [*super().unused, *(() if self.num_kv_heads is None else ("mtp",))]


class QwenVLTower(PlannedTower):
    def __init__(self, config: QwenVLConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        size, square = config.hidden_size, config.hidden_size * config.merge**2
        norm: type[Norm] = RMSNorm if config.gated else LayerNorm
        self.patches = PatchEmbedding((config.frames, config.patch_size, config.patch_size), size, bias=False)
        self.layers = nn.ModuleList(
            PatchBlock(
                size,
                config.intermediate_size,
                config.num_heads,
                norm=norm,
                activation=config.activation,
                gated=config.gated,
                num_kv_heads=config.num_kv_heads,
            )
            for _ in range(config.num_layers)
        )
        self.norm = norm(size, EPS)
        self.merger_1 = Dense(square, square)
        self.merger_2 = Dense(square, hidden_size)

    def show(self, images: Sequence[PromptImage]) -> Shown:
        device, merge = self.merger_1.weight.device, self.config.merge
        grids, square = grids_of(images, merge), merge**2
        order, windows = _windows(grids, self.config.window)
        places = square_places(grids, merge)[order]
        whole = split_segments([rows * columns * square for rows, columns in grids], device)
        parts = split_segments([count * square for count in windows], device)
        pixels = pixels_of(images, self.config.frames)
        return Shown(tuple(upload(each, device) for each in (pixels, order, places)), (whole, parts))

    def look(self, shown: Shown) -> Tensor:
        config, size, square = self.config, self.config.hidden_size, self.config.merge**2
        (pixels, order, places), (whole, parts) = shown
        x = self.patches(in_time(pixels, config.frames)).view(-1, square, size)[order].flatten(0, 1)
        rotation = square_rotation(places, size // config.num_heads)
        for number, layer in enumerate(self.layers):
            within = whole if config.window is None or number in config.full_layers else parts
            x = layer(x, rotation, within)
        merged = self.merger_2(F.gelu(self.merger_1(self.norm(x).view(-1, square * size))))
        ordered = torch.empty_like(merged)
        ordered[order] = merged
        return ordered


def grids_of(images: Sequence[PromptImage], merge: int = 1) -> list[tuple[int, int]]:
    """Return rows and columns of the tokens of all images; a video is as many as it has steps, as these do not see each
    other. `merge`: patches along a side of a token's square, for images whose tokens follow one another."""
    flat = {id(image): [(rows // merge, columns // merge) for rows, columns in image.pictures] for image in images}
    return [
        each for image in images for each in ([image.grid] * image.steps if image.grid is not None else flat[id(image)])
    ]


def pixels_of(images: Sequence[PromptImage], frames: int) -> Tensor:
    """Return the patches of all images, [T, 3, patch * patch], or [T, 3, frames, patch * patch] where a video is among
    them: its patches go through time, and one of an image is as many equal frames."""
    pixels = [torch.from_numpy(image.pixels) for image in images]
    if any(each.ndim == 4 for each in pixels):
        pixels = [in_time(each, frames).view(len(each), 3, frames, -1) for each in pixels]
    return torch.cat(pixels)


def in_time(pixels: Tensor, frames: int) -> Tensor:
    """pixels of `pixels_of` -> whole patches [T, 3 * frames * patch * patch]."""
    return (pixels if pixels.ndim == 4 else pixels[:, :, None].expand(-1, -1, frames, -1)).flatten(1)


def square_places(grids: Sequence[tuple[int, int]], merge: int) -> Tensor:
    """Return the row and column of each patch, in the order of squares of merged ones: [squares, merge * merge, 2]."""
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
    """Return how far patches at these places [..., 2] are turned: half of the pairs by the row, half by the column."""
    exponents = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=places.device) / (head_dim // 2)
    angles = (places.flatten(0, -2)[..., None].float() / THETA**exponents).flatten(1)[:, None]
    return Rotation(torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1))


class PatchBlock(Layer):
    """A block over patches that are turned by their places, norms first. `gated`: of its MLP. `interleaved`: neighbours
    among a head's features are turned together, instead of those half a head apart. `head_norms`: each head's queries
    and keys are normed before they are turned. `num_kv_heads`: heads of keys and values, if fewer."""

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
        """x [T, hidden], of segments that attend to themselves -> the same."""
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


def _windows(grids: Sequence[tuple[int, int]], window: int | None) -> tuple[Tensor, list[int]]:
    """Return the merged patches of all images in the order of their windows, and how many each window has."""
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
