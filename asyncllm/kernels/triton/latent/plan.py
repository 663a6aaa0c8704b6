"""Plans of latent attention: those of paged attention, with tiles of query heads instead of KV heads."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from asyncllm.kernels.latent import LatentKV
from asyncllm.kernels.triton.attention.plan import divide_keys, key_tile, list_tiles, processors
from asyncllm.kernels.triton.device import is_hopper

__all__ = [
    "DECODE_CONFIGS",
    "HOPPER_CONFIG",
    "PREFILL_CONFIGS",
    "HopperDecodeConfig",
    "LatentDecodeConfig",
    "LatentDecodeWork",
    "LatentPrefillConfig",
    "LatentPrefillTiles",
    "LatentShape",
    "constexprs",
    "decode_config",
    "fits_hopper",
    "plan_latent_decode",
    "plan_latent_prefill",
    "prefill_config",
]


class LatentDecodeConfig(NamedTuple):
    heads: int
    """Maximum number of query heads of a block, for which the cache is read once."""
    tile: int
    """Maximum number of keys per step of the inner loop."""
    num_warps: int
    num_stages: int
    blocks_per_processor: int
    """Determines the size of the grid."""
    min_tiles: int
    """A row is not split into parts of fewer tiles than this."""


DECODE_CONFIGS: dict[tuple[int, int], LatentDecodeConfig] = {
    (256, 2): LatentDecodeConfig(16, 32, 4, 3, 4, 4),
    (512, 2): LatentDecodeConfig(16, 32, 4, 3, 2, 4),
    (256, 4): LatentDecodeConfig(16, 16, 4, 2, 1, 8),
    (512, 4): LatentDecodeConfig(16, 16, 8, 2, 1, 8),
}
"""By padded rank (at least 256) and bytes per number. Not timed: chosen to compile for sm_90 without spilled registers
and to keep the most bytes in flight."""


class HopperDecodeConfig(NamedTuple):
    """`LatentDecodeConfig` for `latent.hopper`."""

    heads: int
    tile: int
    blocks_per_processor: int
    min_tiles: int


HOPPER_CONFIG = HopperDecodeConfig(16, 64, 1, 5)
"""For 16-bit dtypes, if a block of the cache is a multiple of a tile.

On an H200 (Triton 3.6) at 16 heads and rank 512, with (512, 2) above in parentheses: 1 row of 150 tokens 6.4 us (15.1),
16 of 300 9.9 (18.4), 64 of 300 11.3 (25.0), 256 of 300 29.8 (33.2), 64 of 4,096 78.6 (98.6; 3,842 GB/s here), 16 of
16,384 81.7 (121.9). Rows of 300 tokens were timed with parts of 6 tiles; parts of 5 or 6 leave such a row whole, and
parts of 3 take 10.3, 12.7 and 29.8. 1 row of 1,000 takes 13.5 with parts of 6 and 11.7 with 4; 256 rows of 150 take
28.2 with parts of 8 and 19.7 with shorter ones."""


class LatentPrefillConfig(NamedTuple):
    rows: int
    """Rows of the score matrix: queries times heads."""
    tile: int
    """Maximum number of keys per step of the inner loop."""
    num_warps: int
    num_stages: int


PREFILL_CONFIGS: dict[tuple[int, int], LatentPrefillConfig] = {
    (256, 2): LatentPrefillConfig(128, 64, 8, 2),
    (512, 2): LatentPrefillConfig(64, 64, 8, 2),
    (256, 4): LatentPrefillConfig(16, 16, 4, 2),
    (512, 4): LatentPrefillConfig(16, 16, 8, 2),
}
"""By padded rank (at least 256) and bytes per number. Not timed, as above."""

MAX_RANK, MAX_ROPE = 512, 128


class LatentShape(NamedTuple):
    """The compile-time parameters that all layers sharing a plan have in common."""

    num_heads: int
    rank: int
    rope: int
    block_size: int


class LatentDecodeWork(NamedTuple):
    """The plan of decode attention on a GPU, as `attention.plan.DecodeWork`."""

    work: Tensor
    partials: Tensor
    """float32: the values of two parts for each block of the grid [2 * grid, heads, C], then their states."""
    block_tables: Tensor
    table_stride: int
    shape: LatentShape
    config: LatentDecodeConfig | HopperDecodeConfig
    grid: int


class LatentPrefillTiles(NamedTuple):
    """The plan of prefill attention on a GPU, as `attention.plan.PrefillTiles`."""

    entries: Tensor
    block_tables: Tensor
    table_stride: int
    shape: LatentShape
    config: LatentPrefillConfig
    heads: int
    """Number of query heads of a tile."""
    tokens: int
    """Number of queries of a tile."""
    num_rows: int
    capacity: int


def decode_config(cache: LatentKV, num_heads: int) -> LatentDecodeConfig | HopperDecodeConfig:
    if is_hopper(cache.pages.device) and fits_hopper(cache):
        return HOPPER_CONFIG
    config = DECODE_CONFIGS[max(256, triton.next_power_of_2(cache.rank)), cache.pages.element_size()]
    return config._replace(heads=min(config.heads, max(8, triton.next_power_of_2(num_heads))))


def fits_hopper(cache: LatentKV) -> bool:
    """Return whether `latent.hopper` supports the cache's dtype, sizes and alignment."""
    _, block_size, width = cache.pages.shape
    return (
        cache.pages.element_size() == 2
        and cache.rank == 512
        and width - cache.rank == 64
        and block_size % HOPPER_CONFIG.tile == 0
        and cache.pages.data_ptr() % 16 == 0
    )


def prefill_config(cache: LatentKV) -> LatentPrefillConfig:
    return PREFILL_CONFIGS[max(256, triton.next_power_of_2(cache.rank)), cache.pages.element_size()]


def constexprs(shape: LatentShape, strides: tuple[int, ...]) -> dict[str, Any]:
    """Return the constants that both kernels share."""
    names = ("LATENT_STRIDE", "LATENT_HEAD", "ROPE_STRIDE", "ROPE_HEAD", "OUT_STRIDE")
    return {
        **dict(zip(names, strides, strict=True)),
        "NUM_HEADS": shape.num_heads,
        "RANK": shape.rank,
        "RANK_BLOCK": max(16, triton.next_power_of_2(shape.rank)),
        "ROPE": shape.rope,
        "ROPE_BLOCK": max(16, triton.next_power_of_2(shape.rope)),
        "PAGE": shape.block_size,
    }


def _shape(num_heads: int, cache: LatentKV) -> LatentShape:
    """Return the shape. Raises ValueError if no kernel supports it."""
    _, block_size, width = cache.pages.shape
    rope = width - cache.rank
    if cache.rank % 8 or rope % 8 or cache.rank > MAX_RANK or rope > MAX_ROPE:
        raise ValueError(
            f"Latent attention on a GPU takes a kv_lora_rank up to {MAX_RANK} and a qk_rope_head_dim up to {MAX_ROPE}, "
            f"both multiples of 8, not {cache.rank} and {rope}. Run this model on the CPU."
        )
    return LatentShape(num_heads, cache.rank, rope, block_size)


def plan_latent_decode(block_tables: Tensor, kv_lens: Tensor, cache: LatentKV, *, num_heads: int) -> LatentDecodeWork:
    """See `asyncllm.kernels.latent.plan_latent_decode`."""
    shape, config = _shape(num_heads, cache), decode_config(cache, num_heads)
    grid = processors(kv_lens.device) * config.blocks_per_processor
    numbers = 2 * grid * config.heads * (shape.rank + 2)
    partials = torch.empty(numbers, dtype=torch.float32, device=kv_lens.device)
    work = divide_keys(
        block_tables,
        kv_lens,
        grid,
        num_kv_heads=-(-num_heads // config.heads),
        block_size=shape.block_size,
        tile=config.tile,
        min_tiles=config.min_tiles,
    )
    return LatentDecodeWork(work, partials, block_tables, block_tables.stride(0), shape, config, grid)


def plan_latent_prefill(
    block_tables: Tensor,
    q_offsets: Tensor,
    kv_lens: Tensor,
    cache: LatentKV,
    *,
    num_heads: int,
    max_q_len: int,
    invariant: bool = False,
) -> LatentPrefillTiles:
    """See `asyncllm.kernels.latent.plan_latent_prefill`. There is one config, so all plans are invariant."""
    num_rows = kv_lens.shape[0]
    shape, config = _shape(num_heads, cache), prefill_config(cache)
    key_tile(shape.block_size, config.tile)
    heads = min(config.rows, triton.next_power_of_2(num_heads))
    tokens = config.rows // heads
    capacity = num_rows * -(-max_q_len // tokens)
    entries = list_tiles(q_offsets, kv_lens, capacity, tokens)
    return LatentPrefillTiles(
        entries, block_tables, block_tables.stride(0), shape, config, heads, tokens, num_rows, capacity
    )
