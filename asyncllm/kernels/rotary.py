"""Rotary position embedding (Su et al., 2021) of a fused qkv, and the write of K and V into their pages."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm.kernels.cache import PagedKV, fill_kv_cache
from asyncllm.kernels.norm import rms_norm

__all__ = ["apply_rotary", "rope_fill_kv"]


def apply_rotary(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate pairs (i, i + R/2) of each head's first R features; the others pass.

    x [T, heads, D]; rotation [T, 2, R] float32: the cosine of each feature's angle, and its sine, negated for the first
    half -> [T, heads, D] in x's dtype. The products are taken in float32.
    """
    size = rotation.shape[-1]
    cos, sin = rotation[:, :1], rotation[:, 1:]
    turning = x if size == x.shape[-1] else x[..., :size]
    # Rolled by half its length, a vector holds each feature's partner.
    rotated = torch.addcmul(turning * cos, turning.roll(size // 2, -1), sin).to(x.dtype)
    return rotated if turning is x else torch.cat([rotated, x[..., size:]], -1)


def rope_fill_kv(
    qkv: Tensor,
    rotation: Tensor,
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

    qkv [T, (num_heads + 2 num_kv_heads) * head_dim], heads of q, then of k, then of v; rotation [T, 2, R] float32 as in
    `apply_rotary`; lines [T * num_kv_heads] int64 (`slot_lines`); q_norm and k_norm [head_dim], both or neither,
    applied per head before the rotation (Qwen3). -> q [T, num_heads, head_dim].
    """
    heads = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
    rotated, values = heads[:, : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
    if q_norm is not None and k_norm is not None:
        q, k = rotated[:, :num_heads], rotated[:, num_heads:]
        rotated = torch.cat([rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)], 1)
    rotated = apply_rotary(rotated, rotation)
    fill_kv_cache(rotated[:, num_heads:], values, cache, lines)
    return rotated[:, :num_heads]
