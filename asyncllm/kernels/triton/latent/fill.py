"""Latent attention's steps between projections and cache: the latents' norm and the rotation."""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.latent import LatentKV
from asyncllm.kernels.rotary import Rotation
from asyncllm.kernels.triton.language import release_consumers, round_to, wait_for_producers
from asyncllm.kernels.triton.launch import Configured
from asyncllm.kernels.triton.rotary import load_pairs, store_pairs

__all__ = ["rope_fill_latent", "rope_fill_latent_kernel"]

ROWS = 32
"""Number of query heads that a program rotates at a time. Not timed."""


@triton.jit
def _turn(line_ptr, cos, sin, inside, dtype: tl.constexpr, target_ptr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Load pairs of features of some lines, rotate them, and store them at target_ptr. cos and sin [1, BLOCK]."""
    first, second = load_pairs(line_ptr, inside, PAIRS, cos.shape[1], INTERLEAVED)
    new_first = round_to(first * cos - second * sin, dtype)
    new_second = round_to(second * cos + first * sin, dtype)
    store_pairs(target_ptr, new_first, new_second, inside, PAIRS, INTERLEAVED)


@triton.jit(do_not_specialize=["eps"], do_not_specialize_on_alignment=["place_ptr"])
def rope_fill_latent_kernel(
    q_ptr,
    kv_ptr,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    place_ptr,
    pages_ptr,
    eps,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """A program has one token. BLOCK is PAIRS, and RANK_BLOCK is RANK, padded to a power of two."""
    WIDTH: tl.constexpr = RANK + 2 * PAIRS
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    round_first: tl.constexpr = norm_ptr.dtype.element_ty == dtype
    token = tl.program_id(0).to(tl.int64)
    ranks = tl.arange(0, RANK_BLOCK)
    pair = tl.arange(0, BLOCK)
    row = tl.arange(0, ROWS)
    weight = tl.load(norm_ptr + ranks, mask=ranks < RANK, other=0.0).to(tl.float32)
    wait_for_producers(USE_PDL)
    release_consumers(USE_PDL)
    place = tl.load(place_ptr + token).to(tl.int64)
    written = place >= 0
    latent = tl.load(kv_ptr + token * WIDTH + ranks, mask=ranks < RANK, other=0.0).to(tl.float32)
    angle = token * (2 * PAIRS) + pair
    cos = tl.load(cos_ptr + angle, mask=pair < PAIRS, other=1.0)[None, :]
    # The second half of the table has the sines with positive sign.
    sin = tl.load(sin_ptr + PAIRS + angle, mask=pair < PAIRS, other=0.0)[None, :]

    scaled = latent * tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps)
    if round_first:
        scaled = round_to(scaled, dtype).to(tl.float32)
    line_ptr = pages_ptr + place * WIDTH
    tl.store(line_ptr + ranks, round_to(scaled * weight, dtype), mask=written & (ranks < RANK))
    one = tl.arange(0, 1)
    rope_ptr = kv_ptr + token * WIDTH + RANK + one[:, None]
    _turn(rope_ptr, cos, sin, (one == 0) & written, dtype, line_ptr + RANK + one[:, None], PAIRS, INTERLEAVED)
    for first in range(0, NUM_HEADS, ROWS):
        head = first + row
        head_ptr = q_ptr + (token * NUM_HEADS + head)[:, None] * HEAD_DIM + HEAD_DIM - 2 * PAIRS
        _turn(head_ptr, cos, sin, head < NUM_HEADS, dtype, head_ptr, PAIRS, INTERLEAVED)


def rope_fill_latent(
    q: Tensor,
    kv: Tensor,
    rotation: Rotation,
    cache: LatentKV,
    places: Tensor,
    *,
    norm: Tensor,
    eps: float,
    interleaved: bool,
) -> None:
    """See `asyncllm.kernels.latent.rope_fill_latent`."""
    if cache.pages.dtype != kv.dtype:
        raise ValueError(f"{kv.dtype} lines need a cache of {kv.dtype}, not of {cache.pages.dtype}")
    if not (q.is_contiguous() and kv.is_contiguous()):
        raise ValueError("Queries and lines are read without gaps: make them contiguous.")
    tokens, num_heads, head_dim = q.shape
    if tokens:
        kernel = _configured(num_heads, head_dim, cache.rank, rotation.cos.shape[-1] // 2, interleaved)
        tensors = (q, kv, norm, rotation.cos, rotation.sin, places, cache.pages)
        kernel((tokens, 1, 1), tensors, (eps,))


@functools.cache
def _configured(num_heads: int, head_dim: int, rank: int, pairs: int, interleaved: bool) -> Configured:
    return Configured(
        rope_fill_latent_kernel,
        num_warps=4,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        RANK=rank,
        RANK_BLOCK=triton.next_power_of_2(rank),
        PAIRS=pairs,
        BLOCK=triton.next_power_of_2(pairs),
        INTERLEAVED=interleaved,
        ROWS=min(ROWS, triton.next_power_of_2(num_heads)),
    )
