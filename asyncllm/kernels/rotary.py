"""Rotary position embedding (Su et al., 2021) of a fused qkv, and the write of K and V into their pages."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm.kernels.cache import PagedKV, fill_kv_cache
from asyncllm.kernels.norm import rms_norm

__all__ = ["apply_rotary", "rope_fill_kv"]


def apply_rotary(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + R/2) of each head's first R features; the others pass.

    x [T, heads, D], cos_sin [T, R] float32 (cosines, then sines) -> [T, heads, D] in x's dtype. The products are taken
    in float32.
    """
    size = cos_sin.shape[-1]
    cos, sin = cos_sin.view(-1, 1, 2, size // 2).unbind(2)
    first, second = x[..., :size].unflatten(-1, (2, -1)).unbind(-2)
    rotated = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    low, high = rotated[..., :size].unflatten(-1, (2, -1)).unbind(-2)
    if x.dtype == torch.float32:
        torch.mul(first, cos, out=low).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=high).addcmul_(first, sin)
    else:
        low.copy_(first * cos - second * sin)
        high.copy_(second * cos + first * sin)
    if size < x.shape[-1]:
        rotated[..., size:] = x[..., size:]
    return rotated


def rope_fill_kv(
    qkv: Tensor,
    cos_sin: Tensor,
    cache: PagedKV,
    slot_mapping: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Normalise (if weights are given), rotate q and k, write k and v to the cache, return q.

    qkv [T, (num_heads + 2 num_kv_heads) * head_dim], heads of q, then of k, then of v; cos_sin [T, R] float32 with
    R <= head_dim; slot_mapping [T] int64; q_norm and k_norm [head_dim], both or neither, applied per head before the
    rotation (Qwen3). -> q [T, num_heads, head_dim].
    """
    heads = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
    rotated, values = heads[:, : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
    if q_norm is not None and k_norm is not None:
        q, k = rotated[:, :num_heads], rotated[:, num_heads:]
        rotated = torch.cat([rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)], 1)
    rotated = apply_rotary(rotated, cos_sin)
    fill_kv_cache(rotated[:, num_heads:], values, cache, slot_mapping)
    return rotated[:, :num_heads]
