"""CacheLayout: the tensors of a pool, derived from the cache specs of all layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from asyncllm.agent.cache.block_groups import add_parts, bytes_of, group_layers
from asyncllm.layers.cache_spec import BlockPart, CacheSpec, StateSpec

__all__ = ["CacheLayout"]


class CacheLayout:
    """Parts of equal shape and dtype share a tensor, whichever layers they belong to, so that one copy moves a block of
    all of them. A model with equal layers has one such tensor.

    A block belongs to one block group at a time, and holds keys and values of that group's layers.
    """

    def __init__(
        self, specs: Sequence[CacheSpec], block_size: int, dtype: torch.dtype, *, longest: int | None = None
    ) -> None:
        """`specs`: specs of the layers with a cache, in order. `dtype`: the model's. `longest`: tokens of the longest
        sequence."""
        self._specs = specs
        self.block_size = block_size
        groups = group_layers(specs, block_size, dtype, longest)
        self.windows = tuple(window for window, _ in groups)
        """Window of each block group."""
        self.layer_groups: list[int] = [0] * len(specs) if len(groups) > 1 else []
        """Block group of each layer; empty if there is only one group."""
        self.keeps_state = any(isinstance(spec, StateSpec) for spec in specs)
        """See `Limits.keeps_state`."""
        self.state_bytes = sum(bytes_of(spec.parts(block_size, dtype)) for spec in specs if isinstance(spec, StateSpec))
        """Bytes of one block's states, for any block size."""
        self.parts: list[BlockPart] = []
        """Tensors of a pool. Each has as many planes as the largest group has layers."""
        self._places: list[list[tuple[int, slice]]] = [[] for _ in specs]
        """For each part of each layer: the tensor, and the layer's planes in it."""
        for group, (_, layers) in enumerate(groups):
            taken: list[int] = [0] * len(self.parts)
            for layer in layers:
                if self.layer_groups:
                    self.layer_groups[layer] = group
                for planes, shape, part_dtype in specs[layer].parts(block_size, dtype):
                    (index,) = add_parts(self.parts, [BlockPart(0, shape, part_dtype)])
                    taken.extend([0] * (len(self.parts) - len(taken)))
                    first, taken[index] = taken[index], taken[index] + planes
                    self._places[layer].append((index, slice(first, first + planes)))
            for index, planes in enumerate(taken):
                part = self.parts[index]
                self.parts[index] = part._replace(planes=max(part.planes, planes))
        self.block_bytes = bytes_of(self.parts)
        """Bytes of one block, over all layers of a group."""

    def caches(self, pool: Sequence[Tensor]) -> list[Any]:
        """Return each layer's view of a pool: one tensor [planes, blocks, *shape] per part."""
        return [
            spec.cache([pool[index][planes] for index, planes in places], self.block_size)
            for spec, places in zip(self._specs, self._places, strict=True)
        ]
