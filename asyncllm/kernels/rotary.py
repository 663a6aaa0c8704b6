"""Rotary position embedding (Su et al., 2021) of a fused qkv, and the write of K and V to their pages."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.cache import KVCache, fill_kv_cache
from asyncllm.kernels.dispatch import op
from asyncllm.kernels.norm import rms_norm

__all__ = ["Rotation", "apply_rotary", "linear_rope_fill_kv", "rope_fill_kv", "rotation"]


class Rotation(NamedTuple):
    """The rotation of a step's tokens, the same in all layers. R features of a head are rotated, in R/2 pairs with one
    angle each: entries i and i + R/2 belong to pair i, whichever two features a model pairs."""

    cos: Tensor
    """[T, 1, R] float32: the cosine of each entry's angle."""
    sin: Tensor
    """[T, 1, R] float32: its sine, negated for the first half."""


@op("rotary:rotation")
def rotation(positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> Rotation:
    """Return the rotation of each token by its position times the frequency of each pair.

    positions [T] int64; frequencies [R/2], or [T, R/2] for separate ones per token, float32. The angles are products in
    float32; `factor` multiplies cosines and sines.
    """
    if frequencies.ndim == 2:
        frequencies = frequencies[:, None]
    # The first half rotates the other way: its sines are negated, its cosines are not.
    angles = positions[:, None, None] * torch.cat([-frequencies, frequencies], -1)
    cos, sin = angles.cos(), angles.sin_()
    if factor != 1.0:
        cos, sin = cos.mul_(factor), sin.mul_(factor)
    return Rotation(cos, sin)


def apply_rotary(x: Tensor, rotation: Rotation, *, interleaved: bool = False) -> Tensor:
    """Rotate the first R features of each head; the others are unchanged.

    x [T, heads, D] -> [T, heads, D] in x's dtype. The products are computed in float32. The pairs are (i, i + R/2), or
    (2i, 2i + 1) if interleaved (GPT-J).
    """
    size = rotation.cos.shape[-1]
    turning = x if size == x.shape[-1] else x[..., :size]
    if interleaved:
        turning = turning.reshape(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
    # Rolled by half its length, a vector holds each feature's partner.
    rotated = torch.addcmul(turning * rotation.cos, turning.roll(size // 2, -1), rotation.sin).to(x.dtype)
    if interleaved:
        rotated = rotated.view(*x.shape[:-1], 2, -1).transpose(-1, -2).flatten(-2)
    return rotated if size == x.shape[-1] else torch.cat([rotated, x[..., size:]], -1)


@op("rotary:rope_fill_kv")
def rope_fill_kv(
    qkv: Tensor,
    rotation: Rotation,
    cache: KVCache,
    plan: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
) -> Tensor:
    """Normalise q and k (if weights are given), rotate them, write k and v to the cache, return q.

    qkv [T, (num_heads + 2 num_kv_heads) * head_dim], heads of q, then of k, then of v; plan: `plan_cache_write` of the
    tokens' places; q_norm and k_norm [head_dim], both or neither, applied per head before the rotation (Qwen3);
    interleaved: which features form a pair, as in `apply_rotary`. -> q [T, num_heads, head_dim].
    """
    heads = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
    if q_norm is None or k_norm is None:
        heads = heads.clone()
    else:
        q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], 1)
        heads = torch.cat([rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps), v], 1)
    return _rotate_and_fill(heads, rotation, cache, plan, num_heads, num_kv_heads, interleaved=interleaved)


def _rotate_and_fill(
    heads: Tensor,
    rotation: Rotation,
    cache: KVCache,
    plan: Tensor,
    num_heads: int,
    num_kv_heads: int,
    *,
    interleaved: bool = False,
) -> Tensor:
    """Rotate the queries and keys among heads [T, H + 2K, D] in place, write keys and values to the cache, and return
    the queries [T, H, D]."""
    turning, size = heads[:, : num_heads + num_kv_heads], rotation.cos.shape[-1]
    if interleaved or size < heads.shape[-1]:
        turning.copy_(apply_rotary(turning, rotation, interleaved=interleaved))
    else:
        torch.addcmul(turning * rotation.cos, turning.roll(size // 2, -1), rotation.sin, out=turning)
    fill_kv_cache(heads[:, num_heads:], cache, plan)
    return heads[:, :num_heads]


@op("linear.rotary:linear_rope_fill_kv")
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
    """`rope_fill_kv` of x weight^T: project to q, k and v, rotate q and k, write k and v to the cache, return q.

    x [T, K], weight [(num_heads + 2 num_kv_heads) * head_dim, K]. -> q [T, num_heads, head_dim].
    """
    heads = F.linear(x, weight).view(-1, num_heads + 2 * num_kv_heads, head_dim)
    return _rotate_and_fill(heads, rotation, cache, plan, num_heads, num_kv_heads)
