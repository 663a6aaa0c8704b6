"""The paged KV cache of one layer, and the ops that write and copy its blocks."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.dispatch import op
from asyncllm.kernels.quantized_kv import QuantizedKV

__all__ = ["GPU_BLOCK_MULTIPLE", "KVCache", "PagedKV", "copy_blocks", "fill_kv_cache", "plan_cache_write"]

GPU_BLOCK_MULTIPLE = 16
"""On a GPU the block size is a multiple of this: attention reads tiles of at least as many keys, the K of a tensor core
instruction."""


class PagedKV(NamedTuple):
    """Keys and values of one layer, in blocks.

    A token's *place* is its block's id * block_size + its offset in the block: what other projects call its entry in
    the slot mapping. A *line* is one head of one token's key or value. Keys and values share their memory, so that a
    step writes both at once and reads both at once.
    """

    k: Tensor
    """[blocks, kv_heads, block_size, head_dim]."""
    v: Tensor
    """[blocks, kv_heads, block_size, head_dim]."""
    lines: Tensor
    """[2 * blocks * kv_heads * block_size, head_dim]: the lines of k, then those of v, in the same memory."""

    @staticmethod
    def over(pages: Tensor) -> PagedKV:
        """Return the cache over contiguous `pages` [2, blocks, kv_heads, block_size, head_dim]: keys, then values."""
        return PagedKV(pages[0], pages[1], pages.view(-1, pages.shape[-1]))

    @property
    def head_dim(self) -> int:
        return self.k.shape[-1]

    def write(self, lines: Tensor, kv: Tensor) -> None:
        """Write kv [N, head_dim] to lines [N]: for each token its key heads, then its value heads."""
        self.lines.index_copy_(0, lines, kv)

    def read(self, lines: Tensor, dtype: torch.dtype) -> Tensor:
        """Return lines [N] -> [N, head_dim] in the cache's own dtype: of keys, or of keys followed by as many
        values."""
        return self.lines.index_select(0, lines)

    def read_pages(self, pages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values of whole pages [N], numbered head by head -> [N, block_size, head_dim] each."""
        return self.k.flatten(0, 1).index_select(0, pages), self.v.flatten(0, 1).index_select(0, pages)

    def weigh(self, lines: Tensor, weights: Tensor) -> Tensor:
        """Return the sums of lines [L, G, S], equal for all G, weighted by weights [L, G, S] -> [L * G, head_dim]."""
        # A bag is a weighted sum of lines: it reads them in place, whereas a matmul needs them gathered first.
        width = lines.shape[2]
        bags = lines.reshape(-1, width)
        return F.embedding_bag(bags, self.lines, mode="sum", per_sample_weights=weights.view(-1, width))


KVCache: TypeAlias = PagedKV | QuantizedKV
"""Keys and values of one layer in blocks, in any format."""


@op("cache:plan_cache_write")
def plan_cache_write(places: Tensor, cache: KVCache) -> Tensor:
    """Return the plan by which `rope_fill_kv` and `fill_kv_cache` find the places of a step's tokens. places [T] int64.

    The plan serves all layers of one shape. On a CPU it holds the lines of each place: its key heads, then its value
    heads, [T * 2 * kv_heads] int64. On CUDA it is the places themselves, where -1 (padding of a captured step) marks
    tokens that are not written.
    """
    num_blocks, num_kv_heads, block_size, _ = cache.k.shape
    blocks = places.div(block_size, rounding_mode="floor")
    first = torch.add(places, blocks, alpha=(num_kv_heads - 1) * block_size)
    return (first[:, None] + head_offsets(num_blocks, num_kv_heads, block_size, places.device)).view(-1)


@lru_cache(maxsize=64)
def head_offsets(num_blocks: int, num_kv_heads: int, block_size: int, device: torch.device) -> Tensor:
    """[2 * kv_heads] int64: offsets from the line of a token's first key head to all its key and value heads."""
    heads = torch.arange(0, num_kv_heads * block_size, block_size, device=device)
    return torch.cat([heads, heads + num_blocks * num_kv_heads * block_size])


@op("cache:fill_kv_cache")
def fill_kv_cache(kv: Tensor, cache: KVCache, plan: Tensor) -> None:
    """Write keys and values kv [T, 2 * kv_heads, head_dim], keys first, to T distinct places (`plan_cache_write`)."""
    cache.write(plan, kv.reshape(-1, kv.shape[-1]))


@op("cache:copy_blocks")
def copy_blocks(pool: Tensor, source: Tensor, destination: Tensor) -> None:
    """Copy block source[n] to block destination[n], for each n, in every plane.

    pool [planes, blocks, ...], contiguous; source and destination [N] integers. No block is both a source and a
    destination, and destinations are distinct.
    """
    source, destination = source.long(), destination.long()
    for blocks in pool:
        blocks.index_copy_(0, destination, blocks.index_select(0, source))
