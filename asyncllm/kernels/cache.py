"""The paged KV cache of one layer, and the ops that write and copy its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["PagedKV", "copy_blocks", "fill_kv_cache", "slot_lines"]


class PagedKV(NamedTuple):
    """Keys and values of one layer, in blocks.

    A *slot* is a token's place: block id * block_size + offset in the block. A *line* is one head of one token's key or
    value. Keys and values share their memory, so that a step writes both at once, and reads both at once.
    """

    k: Tensor
    """[blocks, kv_heads, block_size, head_dim]."""
    v: Tensor
    """[blocks, kv_heads, block_size, head_dim]."""
    lines: Tensor
    """[2 * blocks * kv_heads * block_size, head_dim]: the lines of k, then those of v, in the same memory."""

    @staticmethod
    def over(pages: Tensor) -> PagedKV:
        """The cache in `pages` [2, blocks, kv_heads, block_size, head_dim], contiguous: keys, then values."""
        return PagedKV(pages[0], pages[1], pages.view(-1, pages.shape[-1]))


def slot_lines(slot_mapping: Tensor, cache: PagedKV) -> Tensor:
    """The lines of each slot: its keys' heads, then its values'. slot_mapping [T] int64 -> [T * 2 * kv_heads] int64.

    They are the same in all layers of one shape.
    """
    num_blocks, num_kv_heads, block_size, _ = cache.k.shape
    blocks = slot_mapping.div(block_size, rounding_mode="floor")
    first = torch.add(slot_mapping, blocks, alpha=(num_kv_heads - 1) * block_size)
    return (first[:, None] + head_offsets(num_blocks, num_kv_heads, block_size, slot_mapping.device)).view(-1)


@lru_cache(maxsize=64)
def head_offsets(num_blocks: int, num_kv_heads: int, block_size: int, device: torch.device) -> Tensor:
    """[2 * kv_heads] int64: from the line of a token's first key head to those of all its key and value heads."""
    heads = torch.arange(0, num_kv_heads * block_size, block_size, device=device)
    return torch.cat([heads, heads + num_blocks * num_kv_heads * block_size])


def fill_kv_cache(kv: Tensor, cache: PagedKV, lines: Tensor) -> None:
    """Write keys and values kv [T, 2 * kv_heads, head_dim], keys first, at the `slot_lines` of T distinct slots."""
    cache.lines.index_copy_(0, lines, kv.view(-1, kv.shape[-1]))


def copy_blocks(caches: Sequence[PagedKV], source: Tensor, destination: Tensor) -> None:
    """Copy block source[n] over block destination[n], for each n, in every layer.

    source and destination are [N] integers; no block is both a source and a destination, and destinations are distinct.
    """
    source, destination = source.long(), destination.long()
    for cache in caches:
        for blocks in (cache.k, cache.v):
            blocks.index_copy_(0, destination, blocks.index_select(0, source))
