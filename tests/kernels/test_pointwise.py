"""Norms, gates and rotations against their formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels import PagedKV, Rotation


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def scaled(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm(eps: float) -> None:
    x, weight = random(5, 7), random(7, seed=1)
    torch.testing.assert_close(kernels.rms_norm(x, weight, eps).double(), scaled(x, weight, eps), atol=1e-5, rtol=1e-5)


def test_rms_norm_of_large_bfloat16_values_does_not_overflow() -> None:
    x = torch.full((1, 64), 3e19, dtype=torch.bfloat16)
    weight = torch.ones(64, dtype=torch.bfloat16)
    assert torch.isfinite(kernels.rms_norm(x * 0.1, weight, 1e-6)).all()


def test_rms_norm_with_a_float32_weight_keeps_the_dtype_of_x() -> None:
    x, weight = random(3, 8).bfloat16(), 1 + 0.001 * random(8, seed=1)
    normed = kernels.rms_norm(x, weight, 1e-6)
    assert normed.dtype == torch.bfloat16
    assert torch.equal(normed, scaled(x, weight, 1e-6).bfloat16())


def test_add_rms_norm_leaves_its_inputs_alone() -> None:
    x, residual, weight = random(4, 8), random(4, 8, seed=1), random(8, seed=2)
    before = x.clone(), residual.clone()
    normed, total = kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed.double(), scaled(total, weight, 1e-5), atol=1e-5, rtol=1e-5)


def test_gates() -> None:
    x = 3 * random(5, 14)
    gate, up = x.double().split(7, -1)
    silu = gate / (1 + torch.exp(-gate)) * up
    gelu = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    torch.testing.assert_close(kernels.silu_mul(x).double(), silu, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(kernels.gelu_tanh_mul(x).double(), gelu, atol=1e-5, rtol=1e-5)


def rotation(angles: Tensor) -> Rotation:
    """What `apply_rotary` takes for angles [T, R/2]."""
    cos, sin = angles.cos(), angles.sin()
    return Rotation(torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None])


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Pairs (i, i + R/2) as complex numbers, in float64."""
    size = 2 * angles.shape[-1]
    first, second = x.double()[..., :size].chunk(2, -1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles).to(torch.complex128)[:, None]
    return torch.cat([turned.real, turned.imag, x.double()[..., size:]], -1)


@pytest.mark.parametrize("size", [8, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_apply_rotary(size: int, dtype: torch.dtype) -> None:
    x, angles = random(5, 3, 8).to(dtype), random(5, size // 2, seed=1)
    actual = kernels.apply_rotary(x, rotation(angles))
    assert actual.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual.double(), rotated(x, angles), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("normed", [False, True])
def test_rope_fill_kv(normed: bool) -> None:
    tokens, num_heads, num_kv_heads, head_dim = 5, 4, 2, 8
    qkv, angles = random(tokens, (num_heads + 2 * num_kv_heads) * head_dim), random(tokens, head_dim // 2, seed=1)
    q_norm, k_norm = (random(head_dim, seed=2), random(head_dim, seed=3)) if normed else (None, None)
    cache = PagedKV.over(torch.zeros(2, 3, num_kv_heads, 4, head_dim))
    slots = torch.tensor([9, 0, 7, 2, 4])
    actual = kernels.rope_fill_kv(
        qkv,
        rotation(angles),
        cache,
        kernels.plan_cache_write(slots, cache),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=1e-5,
    )
    q, k, v = qkv.view(tokens, -1, head_dim).split([num_heads, num_kv_heads, num_kv_heads], 1)
    if q_norm is not None and k_norm is not None:
        q, k = scaled(q, q_norm, 1e-5), scaled(k, k_norm, 1e-5)
    torch.testing.assert_close(actual.double(), rotated(q, angles), atol=1e-5, rtol=1e-5)
    written = cache.k[slots // 4, :, slots % 4].double()
    torch.testing.assert_close(written, rotated(k, angles), atol=1e-5, rtol=1e-5)
    assert torch.equal(cache.v[slots // 4, :, slots % 4], v)
