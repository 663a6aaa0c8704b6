"""The paged KV cache of one layer, and the ops that write and copy its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["PagedKV", "copy_blocks", "fill_kv_cache", "slot_lines"]


class PagedKV(NamedTuple):
    """Keys and values of one layer, in blocks.

    A *slot* is a token's place: block id * block_size + offset in the block. A *line* is one KV head of it: a row of
    the pages seen as [blocks * kv_heads * block_size, head_dim].
    """

    k: Tensor
    """[blocks, kv_heads, block_size, head_dim]."""
    v: Tensor
    """[blocks, kv_heads, block_size, head_dim]."""


def slot_lines(slot_mapping: Tensor, *, num_kv_heads: int, block_size: int) -> Tensor:
    """The lines of each slot, one per KV head. slot_mapping [T] int64 -> [T * kv_heads] int64, alike in all layers."""
    blocks = slot_mapping.div(block_size, rounding_mode="floor")
    first = blocks * ((num_kv_heads - 1) * block_size) + slot_mapping
    heads = torch.arange(0, num_kv_heads * block_size, block_size, device=slot_mapping.device)
    return (first[:, None] + heads).view(-1)


def fill_kv_cache(k: Tensor, v: Tensor, cache: PagedKV, lines: Tensor) -> None:
    """Write k and v [T, kv_heads, head_dim] into the pages, at the `slot_lines` of T distinct slots."""
    for tokens, pages in ((k, cache.k), (v, cache.v)):
        head_dim = pages.shape[-1]
        pages.view(-1, head_dim).index_copy_(0, lines, tokens.reshape(-1, head_dim))


def copy_blocks(caches: Sequence[PagedKV], source: Tensor, destination: Tensor) -> None:
    """Copy block source[n] over block destination[n], for each n, in every layer.

    source and destination are [N] integers; no block is both a source and a destination, and destinations are distinct.
    """
    source, destination = source.long(), destination.long()
    for cache in caches:
        for blocks in cache:
            blocks.index_copy_(0, destination, blocks.index_select(0, source))
