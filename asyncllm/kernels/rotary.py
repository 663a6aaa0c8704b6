"""Rotary position embedding (Su et al., 2021) of a fused qkv, and the write of K and V into their pages."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from asyncllm.kernels.cache import PagedKV, fill_kv_cache
from asyncllm.kernels.norm import rms_norm

__all__ = ["Rotation", "apply_rotary", "rope_fill_kv"]


class Rotation(NamedTuple):
    """How far the tokens of a step are turned; the same in all layers. R features of a head are turned, in pairs
    (i, i + R/2) with one angle each."""

    cos: Tensor
    """[T, 1, R] float32: the cosine of each feature's angle."""
    sin: Tensor
    """[T, 1, R] float32: its sine, negated for the first half."""


def apply_rotary(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn the first R features of each head; the others pass.

    x [T, heads, D] -> [T, heads, D] in x's dtype. The products are taken in float32.
    """
    size = rotation.cos.shape[-1]
    turning = x if size == x.shape[-1] else x[..., :size]
    # Rolled by half its length, a vector holds each feature's partner.
    rotated = torch.addcmul(turning * rotation.cos, turning.roll(size // 2, -1), rotation.sin).to(x.dtype)
    return rotated if turning is x else torch.cat([rotated, x[..., size:]], -1)


def rope_fill_kv(
    qkv: Tensor,
    rotation: Rotation,
    cache: PagedKV,
    lines: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Normalise (if weights are given), rotate q and k, write k and v to the cache, return q.

    qkv [T, (num_heads + 2 num_kv_heads) * head_dim], heads of q, then of k, then of v; lines [T * 2 * num_kv_heads]
    int64 (`slot_lines`); q_norm and k_norm [head_dim], both or neither, applied per head before the rotation (Qwen3).
    -> q [T, num_heads, head_dim].
    """
    heads = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
    turning, values = heads[:, : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
    if q_norm is not None and k_norm is not None:
        q, k = turning[:, :num_heads], turning[:, num_heads:]
        turning = torch.cat([rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)], 1)
    rotated = apply_rotary(turning, rotation)
    fill_kv_cache(torch.cat([rotated[:, num_heads:], values], 1), cache, lines)
    return rotated[:, :num_heads]
