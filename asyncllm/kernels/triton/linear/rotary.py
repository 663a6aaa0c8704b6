"""The projection to queries, keys and values and their rotation in one kernel, for up to 64 tokens.

It is `small.skinny_kernel` with another order of rows and another epilogue. A tile has pairs of features that are
rotated together, one from each half of a head. It lies within one head, so that all of its results are either queries,
keys or values.
"""

from __future__ import annotations

from functools import cache as memoize

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.cache import KVCache, PagedKV
from asyncllm.kernels.rotary import Rotation
from asyncllm.kernels.triton.cache import check_cache
from asyncllm.kernels.triton.device import table_name
from asyncllm.kernels.triton.language import PDL, dot, release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.linear.product import choose, linear
from asyncllm.kernels.triton.linear.small import SkinnyConfig, token_tile
from asyncllm.kernels.triton.page import line_of
from asyncllm.kernels.triton.rotary import rope_fill_kv

__all__ = ["TABLES", "linear_rope_fill_kv", "skinny_rotary", "skinny_rotary_kernel"]

Table = dict[tuple[int, int], tuple[tuple[int, SkinnyConfig | None], ...]]

TABLES: dict[str, Table] = {
    "NVIDIA H200": {
        (6144, 4096): (
            (1, None),
            (32, SkinnyConfig(64, 128, stages=6)),  # a layer 123.8 us at 16 tokens, in two kernels 125.1
            (64, SkinnyConfig(64, 128, stages=5)),  # a layer 149.1 us at 60 tokens, in two kernels 150.0
        ),
        (3072, 4096): (
            (1, None),
            (32, SkinnyConfig(64, 128, stages=6)),
            (64, SkinnyConfig(64, 128, stages=5)),
        ),
    }
}
"""Device name -> weight shape (N, K) -> (maximum number of tokens, configuration), ascending. None, and numbers that no
entry covers, use `linear` and `rope_fill_kv`. Figures are in bf16, for a layer with attention to 300 keys per row
(Triton 3.6.0, CUDA 13.0). The second shape is half of the first, for two ranks, and is not timed."""


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["place_ptr"])
def skinny_rotary_kernel(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, place_ptr, k_ptr, v_ptr, q_ptr, tokens,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Multiply up to BLOCK_M rows of x [tokens, K] by BLOCK_N rows of weight [(NUM_HEADS + 2 * NUM_KV_HEADS) *
    HEAD_DIM, K], rotate queries and keys by cos and sin [tokens, HEAD_DIM], and store queries to q [tokens, NUM_HEADS,
    HEAD_DIM] and the others to the cache."""
    PAIRS: tl.constexpr = BLOCK_N // 2
    TILES: tl.constexpr = HEAD_DIM // BLOCK_N
    HALF: tl.constexpr = HEAD_DIM // 2
    release_consumers(USE_PDL)
    head = tl.program_id(0) // TILES
    pair = tl.program_id(0) % TILES * PAIRS + tl.arange(0, PAIRS)
    own = tl.arange(0, BLOCK_N)
    rows = head * HEAD_DIM + tl.program_id(0) % TILES * PAIRS + own % PAIRS + own // PAIRS * HALF
    columns = tl.arange(0, BLOCK_K)[None, :]
    w_rows = weight_ptr + rows[:, None].to(tl.int64) * K
    wait_for_producers(USE_PDL)

    token = tl.arange(0, BLOCK_M)
    inside = token < tokens
    x_rows = x_ptr + token[:, None] * K
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for step in range(0, K // BLOCK_K):
        k = step * BLOCK_K + columns
        w = tl.load(w_rows + k, eviction_policy="evict_first")
        x = tl.load(x_rows + k, mask=inside[:, None], other=0.0)
        acc = dot(w, tl.trans(x), acc)

    dtype: tl.constexpr = q_ptr.dtype.element_ty
    first, second = tl.split(tl.permute(tl.reshape(acc, [2, PAIRS, BLOCK_M]), [1, 2, 0]))
    if head < NUM_HEADS + NUM_KV_HEADS:
        # The product is rounded, as by a separate kernel.
        first, second = round_to(first, dtype).to(tl.float32), round_to(second, dtype).to(tl.float32)
        angle = token[None, :] * HEAD_DIM + pair[:, None]
        # The second half of the table has the sines with positive sign.
        cos = tl.load(cos_ptr + angle, mask=inside[None, :], other=1.0)
        sin = tl.load(sin_ptr + HALF + angle, mask=inside[None, :], other=0.0)
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned
    if head < NUM_HEADS:
        into = q_ptr + (token * NUM_HEADS + head)[None, :] * HEAD_DIM + pair[:, None]
        tl.store(into, round_to(first, dtype), mask=inside[None, :])
        tl.store(into + HALF, round_to(second, dtype), mask=inside[None, :])
    else:
        # Padding of a captured step has no place.
        place = tl.load(place_ptr + token, mask=inside, other=-1).to(tl.int64)
        is_k = head < NUM_HEADS + NUM_KV_HEADS
        kv_head = head - NUM_HEADS - (0 if is_k else NUM_KV_HEADS)
        line = line_of(place, kv_head, NUM_KV_HEADS, BLOCK_SIZE)
        into = (k_ptr if is_k else v_ptr) + line[None, :] * HEAD_DIM + pair[:, None]
        tl.store(into, round_to(first, dtype), mask=(place >= 0)[None, :])
        tl.store(into + HALF, round_to(second, dtype), mask=(place >= 0)[None, :])


def skinny_rotary(
    x: Tensor, weight: Tensor, rotation: Rotation, cache: PagedKV, places: Tensor, *, num_heads: int, num_kv_heads: int,
    head_dim: int, config: SkinnyConfig,
) -> Tensor:  # fmt: skip
    """Launch `linear_rope_fill_kv` for up to 64 tokens. All tensors are contiguous and, except rotation and places, of
    one 16-bit dtype.

    `config.rows` divides head_dim, which is rotated as a whole; `config.columns` divides K; `config.splits` is 1.
    """
    tokens, k = x.shape
    q = torch.empty((tokens, num_heads, head_dim), dtype=x.dtype, device=x.device)
    skinny_rotary_kernel[(weight.shape[0] // config.rows,)](
        x, weight, rotation.cos, rotation.sin, places, cache.k, cache.v, q, tokens, k, token_tile(tokens), config.rows,
        config.columns, num_heads, num_kv_heads, head_dim, cache.k.shape[2],
        num_warps=config.warps, num_stages=config.stages, **PDL,
    )  # fmt: skip
    return q


def linear_rope_fill_kv(
    x: Tensor,
    weight: Tensor,
    rotation: Rotation,
    cache: KVCache,
    plan: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> Tensor:
    table = _table(x.device)
    config = choose(table, x, weight) if table and x.dtype.itemsize == 2 else None
    # A quantized cache scales a line by its largest number, but a tile may have only a part of it.
    if config is None or not isinstance(cache, PagedKV) or rotation.cos.shape[-1] != head_dim or head_dim % config.rows:
        return rope_fill_kv(
            linear(x, weight),
            rotation,
            cache,
            plan,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
    check_cache(cache, x.dtype)
    return skinny_rotary(
        x,
        weight,
        rotation,
        cache,
        plan,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        config=config,
    )


@memoize
def _table(device: torch.device) -> Table:
    return TABLES.get(table_name(device), {})
