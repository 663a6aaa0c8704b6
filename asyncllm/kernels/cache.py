"""The paged KV cache of one layer, and the ops that write and copy its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

__all__ = ["PagedKV", "copy_blocks", "fill_kv_cache"]


class PagedKV(NamedTuple):
    """Keys and values of one layer, in blocks. A *slot* is block id * block_size + offset in the block."""

    k: Tensor
    """[blocks, kv_heads, block_size, head_dim]."""
    v: Tensor
    """[blocks, kv_heads, block_size, head_dim]."""


def fill_kv_cache(k: Tensor, v: Tensor, cache: PagedKV, slot_mapping: Tensor) -> None:
    """Write k and v [T, kv_heads, head_dim] into the slots slot_mapping [T] (int64, distinct)."""
    block_size = cache.k.shape[2]
    blocks = slot_mapping.div(block_size, rounding_mode="floor")
    offsets = slot_mapping.remainder(block_size)
    cache.k[blocks, :, offsets] = k
    cache.v[blocks, :, offsets] = v


def copy_blocks(caches: Sequence[PagedKV], source: Tensor, destination: Tensor) -> None:
    """Copy block source[n] over block destination[n], for each n, in every layer.

    source and destination are [N] integers; no block is both a source and a destination, and destinations are distinct.
    """
    source, destination = source.long(), destination.long()
    for cache in caches:
        for blocks in cache:
            blocks.index_copy_(0, destination, blocks.index_select(0, source))
