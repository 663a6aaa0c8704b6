"""Block groups: layers that share a block table keep the same tokens.

Layers that see their whole context keep every token; layers with a sliding window keep the tokens that the window still
reaches. Layers without a window are one kind, and layers with the same window are another. A group has layers of one
kind. All groups take their blocks from one pool, so every block is large enough for the largest group. If the kinds
differ in their number of layers, the larger kind is divided into several groups, as long as little memory is wasted.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from asyncllm.layers.cache_spec import BlockPart, CacheSpec

__all__ = ["LayerGroups", "add_parts", "bytes_of", "group_layers"]

MAX_GROUPS = 8
"""Maximum number of groups: each step uploads one block table per group."""

MAX_UNUSED = 0.25
"""Maximum fraction by which the blocks of all groups may exceed what their layers need; short sequences pay for it."""

MIN_SAVED = 0.1
"""Minimum fraction of a long sequence's blocks that several groups have to free to be worthwhile."""

LayerGroups = list[tuple[int | None, list[int]]]
"""Window and layers of each group."""


def group_layers(
    specs: Sequence[CacheSpec], block_size: int, dtype: torch.dtype, longest: int | None = None
) -> LayerGroups:
    """Divide layers into groups by their specs. `longest`: tokens of the longest sequence; a window of that width frees
    nothing.

    If every division would waste too much or save too little, one group keeps all tokens.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, spec in enumerate(specs):
        window = spec.window if longest is None or (spec.window or 0) < longest else None
        kinds.setdefault(window, []).append(layer)
    best: LayerGroups = [(next(iter(kinds)) if len(kinds) == 1 else None, list(range(len(specs))))]
    if len(kinds) < 2:
        return best
    lowest_waste = 1 + MAX_UNUSED
    for size in range(max(map(len, kinds.values())), 0, -1):
        divided = [
            (window, layers[first : first + size])
            for window, layers in kinds.items()
            for first in range(0, len(layers), size)
        ]
        if len(divided) > MAX_GROUPS:
            break
        needed, taken = _sizes(divided, specs, block_size, dtype)
        kept = taken * sum(window is None for window, _ in divided)
        waste = len(divided) * taken / needed
        if waste < lowest_waste and kept <= needed * (1 - MIN_SAVED):
            best, lowest_waste = divided, waste
    return best


def _sizes(groups: LayerGroups, specs: Sequence[CacheSpec], block_size: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes that all layers need for a block, and the bytes of a block that is large enough for any
    group."""
    needed, shared = 0, list[BlockPart]()
    for _, layers in groups:
        parts: list[BlockPart] = []
        for layer in layers:
            add_parts(parts, specs[layer].parts(block_size, dtype))
        needed += bytes_of(parts)
        for planes, shape, part_dtype in parts:
            (index,) = add_parts(shared, [BlockPart(0, shape, part_dtype)])
            shared[index] = shared[index]._replace(planes=max(shared[index].planes, planes))
    return needed, bytes_of(shared)


def add_parts(parts: list[BlockPart], more: Sequence[BlockPart]) -> list[int]:
    """Add planes to the parts of equal shape and dtype, or add new parts. Return the index of each."""
    indices = []
    for planes, shape, dtype in more:
        index = next((i for i, part in enumerate(parts) if part[1:] == (shape, dtype)), len(parts))
        if index == len(parts):
            parts.append(BlockPart(0, shape, dtype))
        parts[index] = parts[index]._replace(planes=parts[index].planes + planes)
        indices.append(index)
    return indices


def bytes_of(parts: Sequence[BlockPart]) -> int:
    """Return the bytes of one block."""
    return sum(part.planes * prod(part.shape) * part.dtype.itemsize for part in parts)
