"""Experts of 8 bits: op and launcher against products of each assignment by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels import ScaledWeight
from asyncllm.kernels.triton.linear import scaled_experts as launchers
from tests.kernels.device import DEVICE, assert_repeatable, poison, random
from tests.kernels.test_scaled import FP8, INT8, KINDS, scaled_weight

EXPERTS, HIDDEN, INNER = 5, 192, 144


def stack(n: int, k: int, dtype: torch.dtype, *, grouped: bool) -> ScaledWeight:
    experts = [scaled_weight(n, k, dtype, grouped=grouped) for _ in range(EXPERTS)]
    codes = torch.stack([each.codes.view(torch.uint8).roll(index) for index, each in enumerate(experts)]).view(dtype)
    return ScaledWeight(codes, torch.stack([each.scales * (index + 1) for index, each in enumerate(experts)]), None)


def inputs(
    tokens: int, dtype: torch.dtype, *, grouped: bool, x_type: torch.dtype = torch.bfloat16
) -> tuple[Tensor, ScaledWeight, ScaledWeight, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(tokens)]).to(DEVICE)
    weights = torch.rand(tokens, 2, generator=generator).to(DEVICE)
    up, down = stack(2 * INNER, HIDDEN, dtype, grouped=grouped), stack(HIDDEN, INNER, dtype, grouped=grouped)
    return random(tokens, HIDDEN, seed=tokens, dtype=x_type), up, down, weights, ids


def wanted(x: Tensor, up: ScaledWeight, down: ScaledWeight, weights: Tensor, ids: Tensor) -> Tensor:
    """One assignment after the other."""
    product: Any = kernels.linear_scaled.reference  # type: ignore[attr-defined]
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for token in range(len(x)):
        for choice in range(ids.shape[1]):
            expert = int(ids[token, choice])
            if expert >= 0:
                first, second = (ScaledWeight(each.codes[expert], each.scales[expert], None) for each in (up, down))
                hidden = product(x[token : token + 1], first)
                out[token] += weights[token, choice] * product(kernels.silu_mul(hidden), second)[0].float()
    return out


def assert_close(y: Tensor, expected: Tensor) -> None:
    """What the first product leaves is rounded again: at a near tie to the neighbour, which in fp8 is 6 % away."""
    assert (y.float() - expected).norm() < 2e-2 * expected.norm()


@KINDS
@pytest.mark.parametrize("tokens", [1, 9])
def test_op_and_launcher(dtype: torch.dtype, grouped: bool, tokens: int) -> None:
    given = inputs(tokens, dtype, grouped=grouped)
    expected = wanted(*given)

    def launched() -> Tensor:
        poison((2 * tokens, 2 * INNER), (2 * tokens, HIDDEN), dtype=torch.bfloat16)
        return launchers.scaled_experts(*given)

    assert_close(kernels.scaled_experts.reference(*given), expected)  # type: ignore[attr-defined]
    assert_close(assert_repeatable(launched), expected)


# Rows of experts that are elsewhere hold whatever was there.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [FP8, INT8])
def test_experts_elsewhere_add_nothing(dtype: torch.dtype) -> None:
    x, up, down, weights, ids = inputs(7, dtype, grouped=False, x_type=torch.float32)
    ids[2], weights[2] = -1, 0
    ids[4, 1], weights[4, 1] = -1, 0
    expected = wanted(x, up, down, weights, ids)
    for experts in (kernels.scaled_experts, launchers.scaled_experts):
        y = experts(x, up, down, weights, ids)
        assert_close(y, expected)
        assert not y[2].any()
        assert experts(x[:0], up, down, weights[:0], ids[:0]).shape == (0, HIDDEN)


@pytest.mark.gpu
@KINDS
@pytest.mark.parametrize("tokens", [1, 16, 100, 700])
def test_the_shapes_of_models_on_the_device(dtype: torch.dtype, grouped: bool, tokens: int) -> None:
    up, down = stack(2 * 768, 2048, dtype, grouped=grouped), stack(2048, 768, dtype, grouped=grouped)
    _, _, _, weights, ids = inputs(tokens, dtype, grouped=grouped)
    x = random(tokens, 2048, seed=tokens, dtype=torch.bfloat16)
    y = assert_repeatable(lambda: kernels.scaled_experts(x, up, down, weights, ids))
    expected = kernels.scaled_experts.reference(x, up, down, weights, ids).float()  # type: ignore[attr-defined]
    assert_close(y, expected)
