"""The layout of a page, known only here and used by all kernels that read or write pages.

A block (page) has, for keys and for values, a line of D numbers for each of its tokens of each KV head, head by head:
[NUM_KV_HEADS, BLOCK_SIZE, D]. A token's *place* is its block's id * BLOCK_SIZE + its offset in the block.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["line_of", "page_entry", "place_of", "tile_start"]


@triton.jit
def place_of(block, position, BLOCK_SIZE: tl.constexpr):
    """Return the place of the token at `position` of a sequence, given the id `block` int64 of its block."""
    return block * BLOCK_SIZE + position % BLOCK_SIZE


@triton.jit
def line_of(place, kv_head, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the line of a KV head of the token at `place` int64, counting from the first line of the first block."""
    return (place // BLOCK_SIZE * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + place % BLOCK_SIZE


@triton.jit
def page_entry(table, tile, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return a pointer to the block table entry of keys tile * TILE to (tile + 1) * TILE. TILE divides BLOCK_SIZE."""
    return table + tile * TILE // BLOCK_SIZE


@triton.jit
def tile_start(page, first_key, kv_head, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr):
    """Return the offset, within the keys or the values, of a KV head's line of key `first_key`, which is in block
    `page`."""
    return (page.to(tl.int64) * NUM_KV_HEADS + kv_head) * (BLOCK_SIZE * D) + first_key % BLOCK_SIZE * D
