"""Attention within segments of tokens, without a cache, such as the patches of an image or of a window of it.

Exact softmax attention, computed in float32, over all keys of a query's segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.dispatch import op
from asyncllm.kernels.rotary import Rotation, apply_rotary

__all__ = ["Segments", "rotate_heads", "segment_attention", "split_segments"]

FEW_QUERIES = 64
"""Segments up to this length use tiles of as many queries, such as Qwen2.5-VL's windows of 8 x 8 patches."""

MANY_QUERIES = 128


class Segments(NamedTuple):
    """The layout of consecutive segments."""

    length: int
    """Length of every segment; 0 if lengths differ."""
    rows: int
    """Queries per tile."""
    tiles: Tensor | None
    """[N, 3] int32, if lengths differ: the first query of each tile, its segment's first token, and its segment's
    end."""


def split_segments(lengths: Sequence[int], device: torch.device) -> Segments:
    """Return the plan for segments of these lengths, each at least 1, shared by all layers with them.

    Segments of equal length need nothing on the device.
    """
    rows = FEW_QUERIES if max(lengths, default=0) <= FEW_QUERIES else MANY_QUERIES
    if len(set(lengths)) <= 1:
        return Segments(lengths[0] if lengths else 1, rows, None)
    tiles, start = [], 0
    for length in lengths:
        tiles += [(first, start, start + length) for first in range(start, start + length, rows)]
        start += length
    return Segments(0, rows, torch.tensor(tiles, dtype=torch.int32).to(device, non_blocking=True))


@op("attention.segments:segment_attention")
def segment_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
    """Attend with each token to all tokens of its segment.

    q, k, v [T, H, D] of one dtype, with any strides between tokens and heads -> [T, H, D], contiguous. Products are
    scaled by D ** -0.5.
    """
    if segments.tiles is None:
        q, k, v = (each.view(-1, segments.length, *each.shape[1:]).transpose(1, 2) for each in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1).contiguous()
    bounds = dict.fromkeys((start, end) for _, start, end in segments.tiles.tolist())
    q, k, v = (each.transpose(0, 1) for each in (q, k, v))
    attended = [
        F.scaled_dot_product_attention(q[:, first:last], k[:, first:last], v[:, first:last]) for first, last in bounds
    ]
    return torch.cat(attended, 1).transpose(0, 1).contiguous()


@op("rotary:rotate_heads")
def rotate_heads(x: Tensor, rotation: Rotation, *, interleaved: bool = False) -> None:
    """Rotate heads in place, like `apply_rotary`: x [T, heads, D] with any stride between tokens, and contiguous heads
    and features."""
    x.copy_(apply_rotary(x, rotation, interleaved=interleaved))
