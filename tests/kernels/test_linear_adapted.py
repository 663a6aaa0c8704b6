"""A layer's product beside the products with its adapters' A."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels import LoRAWeights, ShrunkRows
from asyncllm.kernels.triton import lora as launchers
from asyncllm.kernels.triton import norm
from asyncllm.kernels.triton.linear import adapted
from asyncllm.kernels.triton.linear import product as linear
from asyncllm.kernels.triton.linear.small import GemvConfig, NarrowConfig, SkinnyConfig
from tests.kernels.device import DEVICE, assert_a_graph_repeats, fresh_seed, poison, random

RANK = 16


def adapters(num_slots: int, sizes: tuple[int, ...], k: int, *, seed: int) -> LoRAWeights:
    """Adapters of full rank, except for the last slot's, which has nothing for the layer."""
    a = random(num_slots, len(sizes) * RANK, k, seed=seed, dtype=torch.bfloat16)
    b = random(num_slots, sum(sizes), RANK, seed=seed + 1, dtype=torch.bfloat16)
    ranks = torch.full((num_slots, 1), RANK, dtype=torch.int32, device=DEVICE)
    ranks[-1] = 0
    return LoRAWeights(a, b, ranks[:, 0], sizes)


def slots_of(tokens: int, num_slots: int, seed: int) -> Tensor:
    return torch.randint(-1, num_slots, (tokens,), generator=torch.Generator().manual_seed(seed)).int().to(DEVICE)


def added(pair: tuple[Tensor, ShrunkRows], slots: Tensor, lora: LoRAWeights) -> Tensor:
    return launchers.expand_lora(*pair, slots, lora)


@pytest.mark.parametrize("tokens", [2, 13, 64, 65])
@pytest.mark.parametrize(
    "config", [None, GemvConfig(4, 128), SkinnyConfig(64, 64), SkinnyConfig(64, 64, splits=2)], ids=str
)
def test_both_are_what_they_are_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, tokens: int, config: linear.Config | None
) -> None:
    k, sizes, seed = 512, (128, 64), fresh_seed()
    table = {(sum(sizes), k): () if config is None else ((4 if isinstance(config, GemvConfig) else 64, config),)}
    monkeypatch.setattr(linear, "_table", lambda device: table)
    monkeypatch.setattr(linear, "FEW_TOKENS", 0)
    x, weight = (random(rows, k, seed=seed + rows, dtype=torch.bfloat16) for rows in (tokens, sum(sizes)))
    lora, slots = adapters(5, sizes, k, seed=seed), slots_of(tokens, 5, seed)
    bias = random(sum(sizes), seed=3, dtype=torch.bfloat16)
    poison((1, tokens, 2 * RANK), dtype=torch.float32)
    found = added(adapted.linear_shrink_lora(x, weight, bias, slots, lora), slots, lora)
    y = linear.linear(x, weight, bias)
    apart = added((y.clone(), launchers.shrink_lora(x, slots, lora)), slots, lora)
    assert torch.equal(found, apart)
    assert torch.equal(found[slots < 0], y[slots < 0])
    pair = kernels.linear_shrink_lora.reference(x, weight, bias, slots, lora)
    expected = kernels.expand_lora.reference(*pair, slots, lora)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05 * k**0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("num_slots", [2, 65])
@pytest.mark.parametrize("tokens", [2, 16, 33, 64])
@pytest.mark.parametrize(
    "config",
    [
        NarrowConfig(64, parts=2, stages=6, splits=2),
        SkinnyConfig(64, 128, splits=1, stages=5),
        SkinnyConfig(64, 128, splits=2, stages=5),
        SkinnyConfig(32, 128, splits=4, stages=4),
    ],
    ids=str,
)
def test_a_graph_waits_for_both(
    monkeypatch: pytest.MonkeyPatch, config: SkinnyConfig | NarrowConfig, tokens: int, num_slots: int
) -> None:
    """Also with more blocks than fit on a device at once."""
    size, seed = 4096, fresh_seed()
    monkeypatch.setattr(linear, "_table", lambda device: {(size, size): ((64, config),)})
    x, weight = (random(rows, size, seed=seed + rows, dtype=torch.bfloat16) for rows in (tokens, size))
    scale = torch.full((size,), 0.02, dtype=torch.bfloat16, device=DEVICE)
    lora, slots = adapters(num_slots, (size,), size, seed=seed), slots_of(tokens, num_slots, seed)

    def beside(x: Tensor) -> Tensor:
        return added(adapted.linear_shrink_lora(norm.rms_norm(x, scale, 1e-6), weight, None, slots, lora), slots, lora)

    def apart(x: Tensor) -> Tensor:
        torch.cuda.synchronize()
        normed = norm.rms_norm(x, scale, 1e-6)
        shrunk = launchers.shrink_lora(normed, slots, lora)
        return added((linear.linear(normed, weight), shrunk), slots, lora)

    for _ in range(10):
        assert_a_graph_repeats(x, beside, apart)
