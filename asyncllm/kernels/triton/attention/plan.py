"""Plans of attention: the division of a step's work among programs, computed on the device once per step and window.

Decode: the tiles of keys of all rows and KV heads form one long list, of which each block of a fixed grid processes an
equal share. A row that spans blocks is split, and the block that finishes last merges its parts, as in Stream-K (Osama
et al., 2023) and Lean Attention (Sanovar et al., 2024). The division depends only on the lengths, so results are
reproducible.

Prefill: one entry per tile of queries, those with the most keys first, so that no long one is left for the end.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.cache import GPU_BLOCK_MULTIPLE, KVCache
from asyncllm.kernels.quantized_kv import QuantizedKV
from asyncllm.kernels.triton.language import release_consumers, wait_for_producers
from asyncllm.kernels.triton.launch import launch

__all__ = [
    "DECODE_CONFIGS",
    "FEW_ROWS_CONFIGS",
    "PREFILL_CONFIGS",
    "QUANTIZED_DECODE_CONFIGS",
    "QUANTIZED_PREFILL_CONFIGS",
    "AttentionShape",
    "DecodeConfig",
    "DecodeWork",
    "PrefillConfig",
    "PrefillTiles",
    "decode_config",
    "divide_keys",
    "key_tile",
    "list_tiles",
    "padded_head_dim",
    "plan_decode_attention",
    "plan_prefill_attention",
    "prefill_configs",
    "processors",
]


class DecodeConfig(NamedTuple):
    tile: int
    """Maximum number of keys per step of the inner loop; fewer if the cache's blocks are shorter or no multiple of
    it."""
    num_warps: int
    num_stages: int
    """The pipeline holds num_stages - 1 tiles of K and V."""
    blocks_per_processor: int
    """Determines the size of the grid: the number that fit a multiprocessor at once."""
    min_tiles: int
    """A row is not split into parts of fewer tiles than this, since each part must be written, read and merged."""


DECODE_CONFIGS: dict[tuple[int, int], DecodeConfig] = {
    (64, 2): DecodeConfig(64, 1, 4, 4, 4),
    (128, 2): DecodeConfig(32, 1, 4, 4, 8),
    (256, 2): DecodeConfig(16, 1, 4, 4, 8),
    (512, 2): DecodeConfig(16, 4, 3, 3, 8),
    (64, 4): DecodeConfig(32, 4, 3, 3, 8),
    (128, 4): DecodeConfig(32, 4, 3, 3, 8),
    (256, 4): DecodeConfig(16, 4, 3, 2, 16),
    (512, 4): DecodeConfig(16, 4, 2, 2, 16),
}
"""By padded head_dim (at least 64) and bytes per number. The scores of a few heads are little work for tensor cores, so
one warp is as fast as four and never waits for others. Four small blocks on a multiprocessor keep as many bytes in
flight as two large ones, and balance their shares.

Timed at head_dim 128, 32 query heads over 8, on an H200 (Triton 3.6), after a norm of 4 us: 256 rows of 640 tokens 163
us instead of 176 with (64, 4, 4, 2, 4), 128 rows 88.8 instead of 95.9, 64 rows 45.7 instead of 51.6, 24 rows 24.7
instead of 28.6; 32 rows, which divide evenly among the other's grid, 28.9 instead of 28.2. With two warps 166, 91.7 and
47.3. Head_dim 64, 256 rows, 64 and 16: 85.2, 27.7 and 13.1 us instead of 93.7, 34.8 and 16.1 with (64, 4, 4, 3, 4);
head_dim 256, 16 heads over 8: 313, 87.9 and 29.2 instead of 317, 91.8 and 31.6 with (32, 4, 3, 3, 8). 32-bit numbers
are not timed.

Loading a block's first tiles into the L2 cache before the wait for the preceding kernel gained 0.3 us up to 4 rows and
cost 1 to 3 us from 16 on, with blocks of four warps. These times are for queries as the first operand; with keys a
layer takes 0 to 1 % less, and other configurations are no better either."""

FEW_ROWS = 16

FEW_ROWS_CONFIGS = {(128, 2): DecodeConfig(32, 1, 3, 5, 4)}
"""For up to FEW_ROWS rows, with more blocks and shorter parts. Timed as above, 1 row of 640 tokens, 2, 4, 8 and 16
take 8.2, 8.1, 8.7, 11.8 and 18.0 us; with one block of four warps per multiprocessor, (64, 4, 6, 1, 2), 9.6 to 9.8,
11.5, 16.6 and 20.1. Tiles of 16 keys, (16, 1, 4, 8, 4), are faster by 0.6 us for one row of up to 640 tokens, and
slower for 2,000."""


QUANTIZED_DECODE_CONFIGS = {
    64: DecodeConfig(64, 1, 4, 8, 4),
    128: DecodeConfig(32, 1, 3, 8, 8),
    256: DecodeConfig(16, 2, 4, 4, 8),
    512: DecodeConfig(16, 8, 3, 3, 8),
}
"""By padded head_dim. As many blocks of one warp as there are registers for, since decoding limits them more than
memory does.

Timed at head_dim 128, 32 query heads over 8, on an H200 (Triton 3.6), for int8, 4 bits and e4m3: 256 rows of 640 tokens
91.3, 62.3 and 91.1 us, 64 rows of 640 28.4, 19.7 and 27.6, 256 of 1,024 138, 90.2 and 138, 32 of 8,192 136, 87.9 and
135; bfloat16 takes 160, 42.9, 247 and 243. Half as many blocks, (32, 1, 4, 4, 8), take 92.2, 78.1 and 91.3; 25.7, 20.4
and 24.8; 151, 113 and 151; 150, 107 and 149. Two warps, (64, 2, 3, 4, 4), take 99.1, 88.4 and 97.7 for the first. The
other head sizes are not timed."""


class PrefillConfig(NamedTuple):
    rows: int
    """Rows of the score matrix: queries times the query heads that share a KV head."""
    tile: int
    """Maximum number of keys per step of the inner loop."""
    num_warps: int
    num_stages: int


PREFILL_CONFIGS: dict[tuple[int, int], tuple[PrefillConfig, PrefillConfig]] = {
    (64, 2): (PrefillConfig(128, 64, 8, 3), PrefillConfig(64, 64, 4, 3)),
    (128, 2): (PrefillConfig(64, 64, 4, 3), PrefillConfig(64, 64, 4, 2)),
    (256, 2): (PrefillConfig(128, 32, 8, 3), PrefillConfig(64, 32, 4, 3)),
    (64, 4): (PrefillConfig(32, 32, 4, 2), PrefillConfig(32, 32, 4, 2)),
    (128, 4): (PrefillConfig(16, 16, 4, 2), PrefillConfig(16, 16, 4, 2)),
    (256, 4): (PrefillConfig(16, 16, 4, 2), PrefillConfig(16, 16, 4, 2)),
    (512, 2): (PrefillConfig(32, 32, 8, 2), PrefillConfig(32, 32, 8, 2)),
    (512, 4): (PrefillConfig(16, 16, 8, 2), PrefillConfig(16, 16, 8, 2)),
}
"""By padded head_dim (at least 64) and bytes per number: the configs for long and for short prompts. Batch-invariant
plans use the first. On sm_90 at head_dim 128 it takes 230 registers and 115 KB.

Timed at head_dim 128, 32 query heads over 8, on an H200 (Triton 3.6), in TFLOP/s for 4 prompts of 2,048, one of 8,192,
8 of 256, and 512 tokens after 4,096: rows 64, 4 warps, 3 stages 398, 480, 125, 430; with 2 stages 341, 376, 144,
373; rows 128, 8 warps, 3 stages 377, 474, 124, 425; rows 128 by 128 keys 376, 507, 104, 455, but it spills. torch's own
attention without pages: 524, 581, 169. The other types and sizes are not timed. At head_dim 512, tiles of
64 rows spill 40 bytes."""

QUANTIZED_PREFILL_CONFIGS = {
    64: (PrefillConfig(128, 64, 8, 3), PrefillConfig(64, 64, 4, 3)),
    128: (PrefillConfig(64, 64, 4, 3), PrefillConfig(64, 64, 4, 2)),
    256: (PrefillConfig(64, 16, 4, 3), PrefillConfig(64, 16, 4, 3)),
    512: (PrefillConfig(32, 16, 8, 2), PrefillConfig(32, 16, 8, 2)),
}
"""By padded head_dim, as `PREFILL_CONFIGS`. Not timed."""

SHORT_PROMPT_ROWS = 512
"""Longest prompt, times query heads per KV head, for the second config. The first would leave multiprocessors idle."""

HEADER: tl.constexpr = tl.constexpr(16)
"""Integers before the entries of a decode plan: the number of tiles per block, then padding."""

ENTRY: tl.constexpr = tl.constexpr(16)
"""Integers of an entry of a decode plan, which is one line of 64 bytes."""

ENTRY_PAGE: tl.constexpr = tl.constexpr(8)
"""Index in an entry of the cache block of its first tile, which lets keys be loaded before the block table is read."""

INTERPRETED_PROCESSORS = 4
"""Number of multiprocessors assumed by plans on a CPU, where kernels are interpreted."""


class AttentionShape(NamedTuple):
    """The compile-time parameters that all layers sharing a plan have in common."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    format: str
    """The format of a quantized cache; empty for an unquantized one."""

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


class DecodeWork(NamedTuple):
    """The plan of decode attention on a GPU. Layers use it one after another: each of them writes `work` and
    `partials`."""

    work: Tensor
    """int32: HEADER; per block of the grid an entry: its first row, head, tile and number of tiles, the numbers of that
    row, and the cache's block of its first tile; per block a ticket counter; per row its first tile in the list of all,
    its tiles per head in that list, its first visible tile, its length."""
    partials: Tensor
    """float32: for each block of the grid the values of two parts, [2 * grid, G, D] for G query heads per KV head; then
    their states, [2 * grid, G, 2]."""
    block_tables: Tensor
    table_stride: int
    shape: AttentionShape
    config: DecodeConfig
    grid: int
    window: int


class PrefillTiles(NamedTuple):
    """The plan of prefill attention on a GPU."""

    entries: Tensor
    """[1 + capacity, 4] int32: the number of tiles; then per tile its row, first query, number of queries, and the
    position of the first query."""
    block_tables: Tensor
    table_stride: int
    shape: AttentionShape
    config: PrefillConfig
    tokens: int
    """Queries per tile."""
    num_rows: int
    capacity: int
    window: int


def padded_head_dim(head_dim: int) -> int:
    """Return the power of two that kernels compute with. Raises ValueError if no kernel supports the head_dim."""
    if head_dim % 8 or not 8 <= head_dim <= 512:
        raise ValueError(
            f"Attention on a GPU takes a head_dim that is a multiple of 8 up to 512, not {head_dim}. "
            "Run this model on the CPU."
        )
    return 1 << max(4, (head_dim - 1).bit_length())


def key_tile(block_size: int, max_keys: int) -> int:
    """Return the keys per tile: a power of two that divides block_size. Raises ValueError if it would be less than
    16."""
    if block_size % GPU_BLOCK_MULTIPLE:
        raise ValueError(
            f"Attention on a GPU reads blocks of a multiple of {GPU_BLOCK_MULTIPLE} tokens, not of {block_size}. "
            f"Set block_size to 64, or to another multiple of {GPU_BLOCK_MULTIPLE}."
        )
    return min(max_keys, block_size & -block_size)


def decode_config(cache: KVCache, num_rows: int) -> DecodeConfig:
    padded = max(64, padded_head_dim(cache.head_dim))
    if isinstance(cache, QuantizedKV):
        return QUANTIZED_DECODE_CONFIGS[padded]
    key = padded, cache.k.element_size()
    if num_rows <= FEW_ROWS and key in FEW_ROWS_CONFIGS:
        return FEW_ROWS_CONFIGS[key]
    return DECODE_CONFIGS[key]


def prefill_configs(cache: KVCache) -> tuple[PrefillConfig, PrefillConfig]:
    padded = max(64, padded_head_dim(cache.head_dim))
    return (
        QUANTIZED_PREFILL_CONFIGS[padded]
        if isinstance(cache, QuantizedKV)
        else PREFILL_CONFIGS[padded, cache.k.element_size()]
    )


@lru_cache(maxsize=64)
def processors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit(
    do_not_specialize=["table_stride", "num_rows", "window", "grid"],
    do_not_specialize_on_alignment=["block_tables", "kv_lens"],
)
def plan_decode_kernel(
    block_tables,
    kv_lens,
    work,
    table_stride,
    num_rows,
    window,
    grid,
    NUM_KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_GRID: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    rows = tl.arange(0, BLOCK_ROWS)
    lengths = tl.load(kv_lens + rows, mask=rows < num_rows, other=-1).to(tl.int32)
    # Absent rows, which come last, have no tiles, so no block processes them.
    live = lengths >= 0
    first_tiles = tl.where(window > 0, tl.maximum(lengths - window, 0) // TILE, 0)
    # A row without keys still has one tile, which writes its zeros.
    tiles = tl.maximum(tl.cdiv(lengths, TILE) - first_tiles, 1)
    tiles = tl.where(live, tiles, 0)
    share = tl.maximum(tl.cdiv(tl.sum(tiles, 0) * NUM_KV_HEADS, grid), MIN_TILES)
    # While there are blocks to spare, none takes tiles of two rows or heads.
    padded = tl.cdiv(tiles, share) * share
    spare = tl.sum(padded, 0) * NUM_KV_HEADS <= grid * share
    units = tl.where(spare, padded, tiles)
    ends = tl.cumsum(units, 0) * NUM_KV_HEADS
    starts = ends - units * NUM_KV_HEADS
    total = tl.sum(units, 0) * NUM_KV_HEADS
    if tl.program_id(0) == 0:
        tl.store(work, share)
        info = work + HEADER + (ENTRY + 1) * grid + rows * 4
        tl.store(info, starts, mask=live)
        tl.store(info + 1, units, mask=live)
        tl.store(info + 2, first_tiles, mask=live)
        tl.store(info + 3, lengths, mask=live)
    blocks = tl.program_id(0) * BLOCK_GRID + tl.arange(0, BLOCK_GRID)
    begin = blocks * share
    passed = (ends[None, :] <= begin[:, None]) & live[None, :]
    row = tl.sum(passed.to(tl.int32), 1)
    row_start = tl.max(tl.where(passed, ends[None, :], 0), 1)
    row_end = tl.min(tl.where(passed | (lengths < 0)[None, :], 0x7FFFFFFF, ends[None, :]), 1)
    per_head = tl.maximum((row_end - row_start) // NUM_KV_HEADS, 1)
    inside = begin - row_start
    tile = inside % per_head
    taken = tl.maximum(tl.minimum(total - begin, share), 0)
    kept = blocks < grid
    busy = kept & (taken > 0)
    length = tl.load(kv_lens + row, mask=busy, other=0).to(tl.int32)
    first_tile = tl.where(window > 0, tl.maximum(length - window, 0) // TILE, 0)
    entry = work + HEADER + blocks * ENTRY
    tl.store(entry, row, mask=kept)
    tl.store(entry + 1, inside // per_head, mask=kept)
    tl.store(entry + 2, tile, mask=kept)
    tl.store(entry + 3, taken, mask=kept)
    tl.store(entry + 4, row_start, mask=kept)
    tl.store(entry + 5, per_head, mask=kept)
    tl.store(entry + 6, first_tile, mask=kept)
    tl.store(entry + 7, length, mask=kept)
    table = block_tables + row.to(tl.int64) * table_stride
    page = tl.load(table + (first_tile + tile) * TILE // PAGE, mask=busy & (length > 0), other=0)
    tl.store(entry + ENTRY_PAGE, page, mask=kept)
    tl.store(work + HEADER + ENTRY * grid + blocks, 0, mask=kept)


def plan_decode_attention(
    block_tables: Tensor, kv_lens: Tensor, cache: KVCache, *, num_heads: int, window: int | None = None
) -> DecodeWork:
    """See `asyncllm.kernels.attention.plan_decode_attention`."""
    num_rows = kv_lens.shape[0]
    shape, config = _shape(num_heads, cache), decode_config(cache, num_rows)
    grid = processors(kv_lens.device) * config.blocks_per_processor
    numbers = 2 * grid * shape.group * (shape.head_dim + 2)
    partials = torch.empty(numbers, dtype=torch.float32, device=kv_lens.device)
    work = divide_keys(
        block_tables,
        kv_lens,
        grid,
        num_kv_heads=shape.num_kv_heads,
        block_size=shape.block_size,
        tile=config.tile,
        min_tiles=config.min_tiles,
        window=window,
    )
    return DecodeWork(work, partials, block_tables, block_tables.stride(0), shape, config, grid, window or 0)


def divide_keys(
    block_tables: Tensor,
    kv_lens: Tensor,
    grid: int,
    *,
    num_kv_heads: int,
    block_size: int,
    tile: int,
    min_tiles: int,
    window: int | None = None,
) -> Tensor:
    """Return the assignment of keys to the blocks of the grid, as `DecodeWork.work`. Raises ValueError as
    `key_tile`."""
    num_rows = kv_lens.shape[0]
    integers = HEADER.value + (ENTRY.value + 1) * grid + 4 * num_rows
    work = torch.empty(integers, dtype=torch.int32, device=kv_lens.device)
    block_rows = max(256, triton.next_power_of_2(num_rows))
    block_grid = max(1, 8192 // block_rows)
    launch(
        plan_decode_kernel,
        (-(-grid // block_grid), 1, 1),
        (block_tables, kv_lens, work),
        (block_tables.stride(0), num_rows, window or 0, grid),
        NUM_KV_HEADS=num_kv_heads,
        PAGE=block_size,
        TILE=key_tile(block_size, tile),
        MIN_TILES=min_tiles,
        BLOCK_ROWS=block_rows,
        BLOCK_GRID=block_grid,
    )
    return work


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["q_offsets", "kv_lens"])
def plan_prefill_kernel(
    q_offsets,
    kv_lens,
    entries,
    num_rows,
    TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    row = tl.program_id(0)
    rows = tl.arange(0, BLOCK_ROWS)
    live = rows < num_rows
    lengths = tl.load(kv_lens + rows, mask=live, other=0).to(tl.int32)
    query_starts = tl.load(q_offsets + rows, mask=live, other=0).to(tl.int32)
    query_ends = tl.load(q_offsets + 1 + rows, mask=live, other=0).to(tl.int32)
    tiles = tl.cdiv(query_ends - query_starts, TOKENS)
    length = tl.load(kv_lens + row).to(tl.int32)
    ahead = live & ((lengths > length) | ((lengths == length) & (rows < row)))
    first_tile = tl.sum(tl.where(ahead, tiles, 0), 0)
    if row == 0:
        tl.store(entries, tl.sum(tiles, 0))
    start = tl.load(q_offsets + row).to(tl.int32)
    count = tl.load(q_offsets + row + 1).to(tl.int32) - start
    num_tiles = tl.cdiv(count, TOKENS)
    for first in range(0, num_tiles, BLOCK_TILES):
        ranks = first + tl.arange(0, BLOCK_TILES)
        kept = ranks < num_tiles
        query = (num_tiles - 1 - ranks) * TOKENS
        entry = entries + (1 + first_tile + ranks) * 4
        tl.store(entry, row, mask=kept)
        tl.store(entry + 1, start + query, mask=kept)
        tl.store(entry + 2, tl.minimum(count - query, TOKENS), mask=kept)
        tl.store(entry + 3, length - count + query, mask=kept)


def plan_prefill_attention(
    block_tables: Tensor,
    q_offsets: Tensor,
    kv_lens: Tensor,
    cache: KVCache,
    *,
    num_heads: int,
    max_q_len: int,
    window: int | None = None,
    invariant: bool = False,
) -> PrefillTiles:
    """See `asyncllm.kernels.attention.plan_prefill_attention`."""
    num_rows = kv_lens.shape[0]
    shape = _shape(num_heads, cache)
    group = shape.group
    long, short = prefill_configs(cache)
    config = short if max_q_len * group <= SHORT_PROMPT_ROWS and not invariant else long
    if group > config.rows:
        raise ValueError(
            f"Attention on a GPU takes up to {config.rows} query heads per KV head, not {group}. "
            "Run this model on the CPU."
        )
    # Checked here rather than in the first layer.
    key_tile(shape.block_size, config.tile)
    tokens = config.rows // group
    capacity = num_rows * -(-max_q_len // tokens)
    entries = list_tiles(q_offsets, kv_lens, capacity, tokens)
    return PrefillTiles(
        entries, block_tables, block_tables.stride(0), shape, config, tokens, num_rows, capacity, window or 0
    )


def list_tiles(q_offsets: Tensor, kv_lens: Tensor, capacity: int, tokens: int) -> Tensor:
    """Return `PrefillTiles.entries` with room for `capacity` tiles of `tokens` queries each."""
    num_rows = kv_lens.shape[0]
    entries = torch.empty(1 + capacity, 4, dtype=torch.int32, device=kv_lens.device)
    launch(
        plan_prefill_kernel,
        (num_rows, 1, 1),
        (q_offsets, kv_lens, entries),
        (num_rows,),
        TOKENS=tokens,
        BLOCK_ROWS=max(256, triton.next_power_of_2(num_rows)),
        BLOCK_TILES=64,
    )
    return entries


def _shape(num_heads: int, cache: KVCache) -> AttentionShape:
    _, num_kv_heads, block_size, _ = cache.k.shape
    form = cache.format.name if isinstance(cache, QuantizedKV) else ""
    return AttentionShape(num_heads, num_kv_heads, cache.head_dim, block_size, form)
