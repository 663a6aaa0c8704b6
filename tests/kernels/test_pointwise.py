"""Norms, gates, gathers and rotations against their formulas in float64; launchers beside the references."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels import PagedKV, Rotation
from asyncllm.kernels.triton import activation, embedding, norm
from tests.kernels import offline
from tests.kernels.device import DEVICE, assert_repeatable, fresh_seed, poison, random


def scaled(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def layer_normed(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    x = x.double()
    x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return x if bias is None else x + bias.double()


RMS_NORM = pytest.mark.parametrize("rms_norm", [kernels.rms_norm, norm.rms_norm], ids=["op", "launcher"])
ADD_RMS_NORM = pytest.mark.parametrize(
    "add_rms_norm", [kernels.add_rms_norm, norm.add_rms_norm], ids=["op", "launcher"]
)
LAYER_NORM = pytest.mark.parametrize("layer_norm", [kernels.layer_norm, norm.layer_norm], ids=["op", "launcher"])


@RMS_NORM
@pytest.mark.parametrize("eps", [1e-6, 0.5])
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 64), (17, 130), (2, 2049)])
def test_rms_norm(rms_norm: Any, eps: float, shape: tuple[int, ...]) -> None:
    x, weight = random(*shape), random(shape[-1], seed=1)
    torch.testing.assert_close(rms_norm(x, weight, eps).double(), scaled(x, weight, eps), atol=1e-5, rtol=1e-5)


@RMS_NORM
def test_rms_norm_of_large_bfloat16_values_does_not_overflow(rms_norm: Any) -> None:
    x = torch.full((1, 64), 3e19, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.ones(64, dtype=torch.bfloat16, device=DEVICE)
    assert torch.isfinite(rms_norm(x * 0.1, weight, 1e-6)).all()


@RMS_NORM
def test_rms_norm_with_a_float32_weight_keeps_the_dtype_of_x(rms_norm: Any) -> None:
    x, weight = random(3, 8, dtype=torch.bfloat16), 1 + 0.001 * random(8, seed=1)
    normed = rms_norm(x, weight, 1e-6)
    assert normed.dtype == torch.bfloat16
    assert torch.equal(normed, scaled(x, weight, 1e-6).bfloat16())


@RMS_NORM
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_rounds_before_it_multiplies_a_weight_of_the_models_dtype(rms_norm: Any, dtype: torch.dtype) -> None:
    x, weight = random(6, 64, dtype=dtype), random(64, seed=1, dtype=dtype)
    expected = scaled(x, torch.ones_like(weight), 1e-6).to(dtype) * weight
    assert torch.equal(rms_norm(x, weight, 1e-6), expected)
    assert not torch.equal(scaled(x, weight, 1e-6).to(dtype), expected)


@ADD_RMS_NORM
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_rms_norm_leaves_its_inputs_alone(add_rms_norm: Any, dtype: torch.dtype) -> None:
    x, residual, weight = (random(4, 8, seed=seed, dtype=dtype) for seed in range(3))
    weight = weight[0]
    before = x.clone(), residual.clone()
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])
    assert torch.equal(total, x + residual)
    assert normed.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(normed.double(), scaled(total, weight, 1e-5), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("module", [kernels, norm], ids=["op", "launcher"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mean_squares_are_those_of_each_part(module: Any, dtype: torch.dtype) -> None:
    x = 1e3 * random(70, 130, dtype=dtype)
    means = module.mean_squares(x, (96, 17))
    expected = torch.stack([x.double()[:, :96].square().mean(1), x.double()[:, 96:113].square().mean(1)], 1)
    assert means.dtype == torch.float32
    torch.testing.assert_close(means.double(), expected, atol=0, rtol=1e-5)
    for row in (3, 69):
        assert torch.equal(module.mean_squares(x[row : row + 1], (96, 17))[0], means[row]), "whatever is beside it"


@LAYER_NORM
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm(layer_norm: Any, biased: bool, dtype: torch.dtype) -> None:
    # A mean far from 0 shows a variance that is taken as a difference of large squares.
    x, weight = (30 + random(5, 70)).to(dtype), random(70, seed=1, dtype=dtype)
    bias = random(70, seed=2, dtype=dtype) if biased else None
    normed = layer_norm(x, weight, bias, 1e-5)
    assert normed.dtype == dtype
    tolerance = 2e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(normed.double(), layer_normed(x, weight, bias, 1e-5), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("module", [kernels, norm], ids=["op", "launcher"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_layer_norm_is_the_norm_of_the_sum(module: Any, dtype: torch.dtype) -> None:
    x, residual = (random(5, 70, seed=seed, dtype=dtype) for seed in range(2))
    weight, bias = (random(70, seed=seed, dtype=dtype) for seed in (2, 3))
    before = x.clone(), residual.clone()
    poison(x.shape, x.shape, dtype=dtype)
    normed, total = module.add_layer_norm(x, residual, weight, bias, 1e-5)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, module.layer_norm(total, weight, bias, 1e-5))


@pytest.mark.parametrize("module", [kernels, activation], ids=["op", "launcher"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activate(module: Any, dtype: torch.dtype) -> None:
    x = (3 * random(3, activation.COLUMNS + 5)).to(dtype)
    x[0, 0] = -60.0
    wide = x.double()
    expected = {
        "gelu": 0.5 * wide * torch.special.erfc(-wide / math.sqrt(2)),
        "gelu_tanh": 0.5 * wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))),
        "relu": wide.clamp(min=0),
        "silu": wide / (1 + torch.exp(-wide)),
        "squared_relu": wide.clamp(min=0) ** 2,
    }
    assert set(expected) == set(get_args(kernels.ActivationKind))
    tolerance = 1e-5 if dtype == torch.float32 else 2**-8
    for kind, values in expected.items():
        poison(x.shape, dtype=dtype)
        torch.testing.assert_close(module.activate(x, kind).double(), values, atol=1e-6, rtol=tolerance)


def test_rows_beyond_the_limit_are_refused() -> None:
    with pytest.raises(ValueError, match="16384"):
        norm.rms_norm(torch.zeros(1, 16385, device=DEVICE), torch.ones(16385, device=DEVICE), 1e-6)


def gates(x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = x.double().chunk(2, -1)
    silu = gate / (1 + torch.exp(-gate)) * up
    gelu = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    return silu, gelu


@pytest.mark.parametrize("module", [kernels, activation], ids=["op", "launcher"])
@pytest.mark.parametrize("shape", [(5, 14), (2, 3, 12), (3, 2 * activation.COLUMNS + 20)])
def test_gates(module: Any, shape: tuple[int, ...]) -> None:
    x = 3 * random(*shape)
    x[0, ..., 0] = -60.0
    silu, gelu = gates(x)
    torch.testing.assert_close(module.silu_mul(x).double(), silu, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(module.gelu_tanh_mul(x).double(), gelu, atol=1e-5, rtol=1e-5)


def test_launched_gates_round_twice() -> None:
    """To the dtype of x after the activation, and after the product, as the references do."""
    x = 3 * random(4, 300, dtype=torch.bfloat16)
    gate, up = x.chunk(2, -1)
    ones = torch.ones_like(up)
    active_gates = gates(torch.cat([gate, ones], -1))
    for launched, active in zip((activation.silu_mul, activation.gelu_tanh_mul), active_gates, strict=True):
        expected = active.bfloat16() * up
        actual = launched(x)
        assert (actual != expected).float().mean() < 0.02
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=2**-6)
        assert not torch.equal((active * up.double()).bfloat16(), expected)


@pytest.mark.parametrize("module", [kernels, embedding], ids=["op", "launcher"])
@pytest.mark.parametrize("width", [5, embedding.COLUMNS + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embed_and_gather(module: Any, width: int, dtype: torch.dtype) -> None:
    table = random(9, width, dtype=dtype)
    ids = torch.tensor([3, 8, 0, 3], device=DEVICE)
    assert torch.equal(module.embed(ids, table), table[ids])
    scale = 50.596442562694074
    assert torch.equal(module.embed(ids, table, scale), table[ids] * torch.tensor(scale, dtype=dtype, device=DEVICE))
    assert torch.equal(module.gather_rows(table, ids.int()[1:]), table[ids[1:]])
    assert module.gather_rows(table, ids[:0]).shape == (0, width)
    apart = random(9, 3 * width, dtype=dtype)[:, width : 2 * width]
    assert torch.equal(module.gather_rows(apart, ids), apart[ids])
    assert torch.equal(module.gather_rows(apart.t(), ids[2:3]), apart.t()[ids[2:3]])


def rotation(angles: Tensor) -> Rotation:
    """What `apply_rotary` takes for angles [T, R/2]."""
    cos, sin = angles.cos(), angles.sin()
    return Rotation(torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None])


def rotated(x: Tensor, angles: Tensor, interleaved: bool = False) -> Tensor:
    """Pairs (i, i + R/2), or (2i, 2i + 1), as complex numbers, in float64."""
    size = 2 * angles.shape[-1]
    turning, rest = x.double()[..., :size], x.double()[..., size:]
    first, second = (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.chunk(2, -1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles).to(torch.complex128)[:, None]
    if interleaved:
        return torch.cat([torch.view_as_real(turned).flatten(-2), rest], -1)
    return torch.cat([turned.real, turned.imag, rest], -1)


@pytest.mark.parametrize("size", [8, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
def test_apply_rotary(size: int, dtype: torch.dtype, interleaved: bool) -> None:
    x, angles = random(5, 3, 8, dtype=dtype), random(5, size // 2, seed=1)
    actual = kernels.apply_rotary(x, rotation(angles), interleaved=interleaved)
    assert actual.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual.double(), rotated(x, angles, interleaved), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
def test_rope_fill_kv(normed: bool, interleaved: bool) -> None:
    tokens, num_heads, num_kv_heads, head_dim = 5, 4, 2, 8
    qkv, angles = random(tokens, (num_heads + 2 * num_kv_heads) * head_dim), random(tokens, head_dim // 2, seed=1)
    q_norm, k_norm = (random(head_dim, seed=2), random(head_dim, seed=3)) if normed else (None, None)
    cache = PagedKV.over(torch.zeros(2, 3, num_kv_heads, 4, head_dim, device=DEVICE))
    places = torch.tensor([9, 0, 7, 2, 4], device=DEVICE)
    actual = kernels.rope_fill_kv(
        qkv,
        rotation(angles),
        cache,
        kernels.plan_cache_write(places, cache),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=1e-5,
        interleaved=interleaved,
    )
    q, k, v = qkv.view(tokens, -1, head_dim).split([num_heads, num_kv_heads, num_kv_heads], 1)
    if q_norm is not None and k_norm is not None:
        q, k = scaled(q, q_norm, 1e-5), scaled(k, k_norm, 1e-5)
    torch.testing.assert_close(actual.double(), rotated(q, angles, interleaved), atol=1e-5, rtol=1e-5)
    written = cache.k[places // 4, :, places % 4].double()
    torch.testing.assert_close(written, rotated(k, angles, interleaved), atol=1e-5, rtol=1e-5)
    assert torch.equal(cache.v[places // 4, :, places % 4], v)


COMPILED = [
    "add_rms_norm 4096",
    "add_rms_norm 8192",
    "add_rms_norm 16384",
    "add_rms_norm 3584 float32 weight",
    "rms_norm 128",
    "mean_squares 3072",
    "layer_norm 4096",
    "add_layer_norm 4096",
    "activate gelu",
    "activate gelu_tanh",
    "activate squared_relu",
    "silu_mul 14336",
    "gelu_tanh_mul 14336",
    "embed 4096",
]


@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name: str, compile_kernels: offline.Compile) -> None:
    kernel = compile_kernels("compile_pointwise")[name]
    assert kernel.spilled_bytes == 0
    assert kernel.registers <= 128
    assert kernel.shared_bytes <= 16384


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 256, 1025])
@pytest.mark.parametrize("size", [4096, 3584, 896, 128, 14336])
def test_add_rms_norm_on_gpu(rows: int, size: int) -> None:
    seed = fresh_seed()
    x, residual = (random(rows, size, seed=seed + part, dtype=torch.bfloat16) for part in range(2))
    for dtype in (torch.bfloat16, torch.float32):
        weight = random(size, seed=seed + 2, dtype=dtype)
        poison((rows, size), (rows, size), dtype=torch.bfloat16)
        normed, total = kernels.add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(total, x + residual)
        torch.testing.assert_close(normed.double(), scaled(total, weight, 1e-5), atol=1e-2, rtol=2**-7)
        assert_repeatable(lambda: kernels.add_rms_norm(x, residual, weight, 1e-5)[0])  # noqa: B023
        alone = kernels.add_rms_norm(x[-1:], residual[-1:], weight, 1e-5)[0]
        assert torch.equal(alone, normed[-1:])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 70, 9000])
def test_mean_squares_on_gpu(rows: int) -> None:
    x = random(rows, 4096, seed=fresh_seed(), dtype=torch.bfloat16)
    means = kernels.mean_squares(x, (3072, 512))
    expected = torch.stack([x.double()[:, :3072].square().mean(1), x.double()[:, 3072:3584].square().mean(1)], 1)
    torch.testing.assert_close(means.double(), expected, atol=0, rtol=1e-5)
    assert torch.equal(kernels.mean_squares(x[-1:], (3072, 512)), means[-1:])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 70, 70000])
def test_layer_norm_and_gates_on_gpu(rows: int) -> None:
    seed = fresh_seed()
    x, weight, bias = (random(*shape, seed=seed, dtype=torch.bfloat16) for shape in ((rows, 768), (768,), (768,)))
    poison((rows, 768), dtype=torch.bfloat16)
    normed = kernels.layer_norm(x, weight, bias, 1e-5)
    torch.testing.assert_close(normed.double(), layer_normed(x, weight, bias, 1e-5), atol=2e-2, rtol=2**-7)
    for op, expected in zip((kernels.silu_mul, kernels.gelu_tanh_mul), gates(x), strict=True):
        poison((rows, 384), dtype=torch.bfloat16)
        torch.testing.assert_close(assert_repeatable(lambda: op(x)).double(), expected, atol=1e-3, rtol=2**-6)  # noqa: B023


@pytest.mark.gpu
def test_embed_on_gpu() -> None:
    table = random(128256, 512, seed=fresh_seed(), dtype=torch.bfloat16)
    ids = torch.randint(0, 128256, (3001,), device=DEVICE)
    poison((3001, 512), dtype=torch.bfloat16)
    assert torch.equal(kernels.embed(ids, table), table[ids])
    assert torch.equal(kernels.gather_rows(table, ids[1:].int()), table[ids[1:]])
