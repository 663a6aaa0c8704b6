"""Experts of e2m1 numbers: the layout, the op and its launchers against their numbers, and what the kernels compile
to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels.e2m1 import E2M1Weight, e2m1_experts, expand_e2m1, pack_e2m1
from asyncllm.kernels.triton.linear import e2m1_experts as launchers
from tests.kernels import offline
from tests.kernels.device import DEVICE, poison, random


def drawn(n: int, k: int, seed: int, least: int = 120, most: int = 123) -> tuple[E2M1Weight, Tensor]:
    """Four experts with every code and exponents `least` to `most`, and their weights [4, N, K], number by number."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (4, n, k), dtype=torch.uint8, generator=generator)
    exponents = torch.randint(least, most + 1, (4, n, k // 32), generator=generator).to(torch.uint8)
    packed = [pack_e2m1(*each) for each in zip(codes, exponents, strict=True)]
    words, joined = (torch.stack(each).to(DEVICE) for each in zip(*packed, strict=True))
    sign, exponent, behind = 1 - 2.0 * (codes >> 3), (codes >> 1 & 3).float(), (codes & 1) * 0.5
    values = sign * torch.where(exponent == 0, behind, (1 + behind) * 2 ** (exponent - 1))
    scales = (2.0 ** (exponents.double() - 127)).float().repeat_interleave(32, 2)
    return E2M1Weight(words, joined, k), values * scales


@pytest.mark.parametrize("expand", [expand_e2m1, launchers.expand_e2m1])
def test_every_code_with_every_exponent(expand: Any) -> None:
    weight, values = drawn(70, 160, 5, least=0, most=136)
    for dtype in (torch.float32, torch.bfloat16):
        poison((4, 70, 160), dtype=dtype)
        found = expand(weight.words, weight.exponents, in_features=160, dtype=dtype)
        assert torch.equal(found.cpu(), values.to(dtype))


# Rows of experts that are elsewhere hold whatever was there.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("product", "dtype", "tokens"),
    [
        (e2m1_experts, torch.float32, 5),
        (launchers.e2m1_experts, torch.float32, 5),
        (launchers.e2m1_experts, torch.float16, 1),
        (launchers.e2m1_experts, torch.float16, 21),
        (launchers.e2m1_experts, torch.bfloat16, 1),
        (launchers.e2m1_experts, torch.float16, 300),
        (launchers.e2m1_experts, torch.bfloat16, 21),
    ],
)
def test_experts_with_biases_and_a_limit(product: Any, dtype: torch.dtype, tokens: int) -> None:
    """One of each token's experts is elsewhere."""
    (gate_up, first), (down, second) = drawn(64, 160, 1), drawn(160, 32, 2)
    x, weights = random(tokens, 160, dtype=dtype), random(tokens, 3, seed=7).abs()
    ids = random(tokens, 4, seed=8).argsort(-1)[:, :3].contiguous()
    ids[:, 1], weights[:, 1] = -1, 0.0
    biases = {"gate_up_bias": random(4, 64, seed=3, dtype=dtype), "down_bias": random(4, 160, seed=4, dtype=dtype)}
    y = product(x, gate_up, down, weights, ids, limit=1.5, **biases)
    rows = (x.cpu().float(), first, second, weights.cpu(), ids.cpu())
    expected = kernels.fused_experts.reference(  # type: ignore[attr-defined]
        *rows, limit=1.5, **{name: bias.cpu().float() for name, bias in biases.items()}
    )
    step = 1e-5 if dtype == torch.float32 else 2e-2
    assert (y.cpu().float() - expected).norm() <= step * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_code_is_exact_in_a_product(dtype: torch.dtype) -> None:
    """Each token picks one input feature of a product with the weights of one expert."""
    weight, values = drawn(64, 160, 3)
    x = torch.eye(160, dtype=dtype, device=DEVICE)
    for ungrouped in (False, True):
        if ungrouped:
            ids = torch.zeros(160, dtype=torch.int64, device=DEVICE)
            blocks = launchers.Blocks(ids, ids, launchers.UNGROUPED_TILE.tokens, True)
        else:
            blocks = launchers.blocks_of(torch.zeros(160, 1, dtype=torch.int64, device=DEVICE), 4, 16, 64)
        y = torch.full((160, 64), torch.nan, dtype=dtype, device=DEVICE)
        launchers.multiply(x, weight, y, blocks, top_k=1, swiglu=False)
        assert torch.equal(y.cpu().float(), values[0].T)


def test_blocks_follow_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token's result has the same bits in a block of any size, and no tokens have none."""
    (gate_up, _), (down, _) = drawn(64, 64, 1), drawn(64, 32, 9)
    x, weights = random(520, 64, dtype=torch.bfloat16), random(520, 1, seed=7).abs()
    ids = torch.zeros(520, 1, dtype=torch.int64, device=DEVICE)
    ids[260:] = 3
    sizes, group = [], launchers.blocks_of

    def noted(*given: Any) -> launchers.Blocks:
        blocks = group(*given)
        sizes.append(blocks.size)
        return blocks

    monkeypatch.setattr(launchers, "blocks_of", noted)
    wide = launchers.e2m1_experts(x, gate_up, down, weights, ids)
    for tokens in (0, 1, 30, 80):
        rows = slice(520 - tokens, 520)
        few = launchers.e2m1_experts(x[rows], gate_up, down, weights[rows], ids[rows])
        assert torch.equal(few, wide[rows])
    assert sizes == [128, 16, 16, 32]


def test_kernels_compile_to_what_they_are_meant_to_be(compile_kernels: offline.Compile) -> None:
    for name, case in compile_kernels("compile_e2m1").items():
        assert case.spilled_bytes == 0, name
        assert case.shared_bytes <= offline.MAX_SHARED_BYTES, name
