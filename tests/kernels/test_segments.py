"""Attention within segments, and the rotation of heads in place, interpreted on a CPU and compiled on a GPU."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from asyncllm import kernels
from tests.kernels import offline
from tests.kernels.device import DEVICE, assert_repeatable, fresh_seed, poison, random

if DEVICE.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
    from asyncllm.kernels.triton import rotary
    from asyncllm.kernels.triton.attention import segments as launcher

HALF = torch.bfloat16
ALLOWED = {torch.float32: 1e-5, torch.float16: 2e-3, HALF: 1.5e-2}


def expected(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float) -> Tensor:
    """In float64."""
    pieces = zip(*(torch.split(each.double(), lengths) for each in (q, k, v)), strict=True)
    attended = [
        torch.einsum("hqk,khd->qhd", (torch.einsum("qhd,khd->hqk", a, b) * scale).softmax(-1), c) for a, b, c in pieces
    ]
    return torch.cat(attended)


def qkv_of(tokens: int, heads: int, head_dim: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Parts of one product, with memory of others around them that is NaN."""
    around = torch.full((tokens + 40, 3, heads, head_dim), torch.nan, dtype=dtype, device=DEVICE)
    around[20:-20] = random(tokens, 3, heads, head_dim, seed=seed, dtype=dtype)
    q, k, v = around[20:-20].unbind(1)
    return q, k, v


def check(lengths: list[int], heads: int, head_dim: int, dtype: torch.dtype, seed: int = 0) -> None:
    q, k, v = qkv_of(sum(lengths), heads, head_dim, dtype, seed)
    plan = kernels.split_segments(lengths, DEVICE)
    wanted = expected(q, k, v, lengths, head_dim**-0.5)
    for attend in (kernels.segment_attention.reference, launcher.segment_attention):
        poison(q.shape, dtype=dtype)
        actual = attend(q, k, v, plan)
        assert actual.is_contiguous()
        error = (actual.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        assert error.max().item() < ALLOWED[dtype], (attend, lengths, error.max().item())


@pytest.mark.parametrize(
    ("lengths", "heads", "head_dim", "dtype"),
    [
        ([140], 2, 16, HALF),
        ([25, 25, 25], 3, 24, torch.float32),
        ([1, 130, 64, 7], 2, 40, torch.float16),
        # Windows of 4 x 4, and those that the edge of an image cuts.
        ([16, 16, 12, 16, 16, 12, 4, 4, 3], 2, 8, torch.float32),
        ([128, 256], 1, 80, HALF),
        ([1], 1, 4, torch.float32),
    ],
    ids=["one", "even", "odd", "windows", "tiles", "single"],
)
def test_attention(lengths: list[int], heads: int, head_dim: int, dtype: torch.dtype) -> None:
    check(lengths, heads, head_dim, dtype)


def test_plans() -> None:
    even, windows, long = (kernels.split_segments(lengths, DEVICE) for lengths in ([7, 7], [64, 3], [200, 5]))
    assert (even.length, even.tiles) == (7, None)
    assert (windows.rows, long.rows) == (64, 128)
    assert windows.tiles is not None
    assert long.tiles is not None
    assert windows.tiles.tolist() == [[0, 0, 64], [64, 64, 67]]
    assert long.tiles.tolist() == [[0, 0, 200], [128, 0, 200], [200, 200, 205]]


def test_a_key_that_is_not_finite_stays_in_its_segment() -> None:
    q, k, v = qkv_of(9, 1, 16, torch.float32)
    k[3] = torch.nan
    v[3] = torch.inf
    attended = launcher.segment_attention(q, k, v, kernels.split_segments([3, 2, 4], DEVICE))
    assert attended[3:5].isnan().all()
    assert attended[:3].isfinite().all()
    assert attended[5:].isfinite().all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "turned", "dtype"), [(5, 3, 40, 40, torch.float32), (9, 2, 24, 16, HALF)]
)
def test_rotation_in_place(
    tokens: int, heads: int, head_dim: int, turned: int, dtype: torch.dtype, interleaved: bool
) -> None:
    frequencies = random(turned // 2, seed=1).abs()
    rotation = kernels.rotation(torch.arange(tokens, device=DEVICE), frequencies)
    packed = random(tokens, 3, heads, head_dim, dtype=dtype)
    other = packed.clone()
    wanted = kernels.rotary.apply_rotary(packed[:, 1], rotation, interleaved=interleaved)
    rotary.rotate_heads(packed[:, 1], rotation, interleaved=interleaved)
    kernels.rotate_heads.reference(other[:, 1], rotation, interleaved=interleaved)
    assert torch.equal(other[:, 1], wanted)
    tolerance = 1e-6 if dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(packed[:, 1], wanted, atol=tolerance, rtol=tolerance)
    assert torch.equal(packed[:, 0::2], other[:, 0::2])


def test_configs_compile_for_hopper(compile_kernels: offline.Compile) -> None:
    """With hardly any spilled register, in the shared memory that there is, and on the tensor cores."""
    from tests.kernels import compile_segments

    results = compile_kernels("compile_segments")
    for case in compile_segments.CASES:
        result = results[case.name]
        assert result.spilled_bytes <= (96 if "fp32" in case.name else 16), (case.name, result)
        assert result.shared_bytes <= offline.MAX_SHARED_BYTES, case.name
        if case.name.startswith("attention") and "fp32" not in case.name:
            assert result.wgmma > 0, case.name
            assert result.async_copies > 0, case.name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF])
@pytest.mark.parametrize(("heads", "head_dim"), [(16, 64), (16, 80), (16, 72), (3, 8), (2, 256)])
def test_attention_on_gpu(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    seed = fresh_seed()
    lengths = torch.randint(1, 1500, (7,), generator=torch.Generator().manual_seed(seed)).tolist()
    check(lengths, heads, head_dim, dtype, seed)
    check([1025] * 3, heads, head_dim, dtype, seed)
    check([64] * 40 + [56] * 5 + [49], heads, head_dim, dtype, seed)
    q, k, v = qkv_of(sum(lengths), heads, head_dim, dtype, seed)
    plan = kernels.split_segments(lengths, DEVICE)
    assert_repeatable(lambda: kernels.segment_attention(q, k, v, plan))
