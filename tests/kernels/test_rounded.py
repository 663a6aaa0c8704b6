"""Ops that round what they make to 8 bits: launchers against the ops that they stand for, one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels import RoundedRows, Rounding
from asyncllm.kernels.triton import rounded as launchers
from tests.kernels.device import DEVICE, poison, random

FP8, INT8 = torch.float8_e4m3fn, torch.int8


def roundings() -> list[Rounding]:
    given = torch.tensor([0.01], device=DEVICE)
    return [Rounding(FP8), Rounding(INT8), Rounding(FP8, grouped=True), Rounding(FP8, scale=given)]


def assert_rounded(actual: RoundedRows, x: Tensor, rounding: Rounding) -> None:
    """`actual` is what `round_rows` makes of x, but for numbers that another order of sums has put on the other side
    of the middle between two codes, or one step of x's type away from it."""
    wanted = kernels.round_rows.reference(x, rounding)  # type: ignore[attr-defined]
    assert actual.dtype == x.dtype
    assert actual.scales.shape == wanted.scales.shape
    torch.testing.assert_close(actual.scales.cpu(), wanted.scales.cpu(), rtol=2**-7, atol=0)
    found, expected = actual.codes.cpu().float(), wanted.codes.cpu().float()
    different = found != expected
    assert different.float().mean() <= 0.01
    assert ((found - expected).abs() <= expected.abs() / 4 + 1).all()


@pytest.mark.parametrize("size", [64, 300, 4096])
def test_the_norm_of_a_sum(size: int) -> None:
    weight = random(size, seed=3, dtype=torch.bfloat16)
    for rounding in roundings():
        x, residual = random(5, size, seed=1, dtype=torch.bfloat16), random(5, size, seed=2, dtype=torch.bfloat16)
        x[1] = residual[1] = 0
        poison((5, size), (5, 1), dtype=torch.float32)
        found, total = launchers.add_rms_norm_rounded(x, residual, weight, 1e-5, rounding)
        normed, wanted = kernels.add_rms_norm.reference(x, residual, weight, 1e-5)  # type: ignore[attr-defined]
        assert torch.equal(total, wanted)
        assert_rounded(found, normed, rounding)
        assert not found.codes[1].float().any()


def test_a_weight_of_float32_is_as_in_the_norm_alone() -> None:
    x, weight = random(3, 256, seed=1, dtype=torch.bfloat16), random(256, seed=3)
    found, _ = launchers.add_rms_norm_rounded(x, x, weight, 1e-5, Rounding(FP8))
    assert_rounded(found, kernels.add_rms_norm.reference(x, x, weight, 1e-5)[0], Rounding(FP8))  # type: ignore[attr-defined]


@pytest.mark.parametrize("size", [40, 300, 1500])
@pytest.mark.parametrize("gelu", [False, True])
def test_the_gate(size: int, gelu: bool) -> None:
    for rounding in roundings():
        x = random(3, 2 * size, seed=1, dtype=torch.bfloat16)
        poison((3, size), (3, 1), dtype=torch.float32)
        gate = kernels.gelu_tanh_mul if gelu else kernels.silu_mul
        assert_rounded(launchers.gate_rounded(x, rounding, gelu=gelu), gate.reference(x), rounding)  # type: ignore[attr-defined]


def test_nothing_of_no_rows() -> None:
    x = random(0, 256)
    assert launchers.gate_rounded(x, Rounding(INT8)).codes.shape == (0, 128)
    assert launchers.round_rows(x, Rounding(INT8)).scales.shape == (0, 1)
    rows, total = launchers.add_rms_norm_rounded(x, x, x.new_ones(256), 1e-5, Rounding(FP8, grouped=True))
    assert (rows.codes.shape, rows.scales.shape, total.shape) == ((0, 256), (0, 2), (0, 256))


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_alone(bad: float) -> None:
    x, weight = random(3, 256), random(256, seed=3)
    for rounding in (Rounding(FP8), Rounding(INT8)):
        rows, _ = launchers.add_rms_norm_rounded(x, x, weight, 1e-5, rounding)
        other = x.clone()
        other[1, 200] = bad
        found, _ = launchers.add_rms_norm_rounded(other, x, weight, 1e-5, rounding)
        assert not (found.codes[1].float() * found.scales[1]).isfinite().all()
        assert torch.equal(found.codes[::2].view(torch.uint8), rows.codes[::2].view(torch.uint8))
        assert torch.equal(found.scales[::2], rows.scales[::2])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 17, 500])
def test_the_shapes_of_models_on_the_device(rows: int) -> None:
    weight = random(4096, seed=3, dtype=torch.bfloat16)
    for rounding in roundings():
        x = random(rows, 2 * 14336, seed=rows, dtype=torch.bfloat16)
        assert_rounded(kernels.gate_rounded(x, rounding), kernels.silu_mul(x), rounding)
        assert_rounded(kernels.round_rows(x, rounding), x, rounding)
        x = x[:, :4096].contiguous()
        found, total = kernels.add_rms_norm_rounded(x, x, weight, 1e-5, rounding)
        normed, wanted = kernels.add_rms_norm(x, x, weight, 1e-5)
        assert torch.equal(total, wanted)
        assert_rounded(found, normed, rounding)
