"""Packed products for Hopper: which of them an op takes, what they compile to, and on a GPU what they compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels import PackedWeight
from asyncllm.kernels.packed import natural
from asyncllm.kernels.triton.counters import zero_counters
from asyncllm.kernels.triton.linear import packed
from asyncllm.kernels.triton.linear.tiles import RingConfig, Tile, WideConfig
from tests.kernels import offline
from tests.kernels.device import assert_a_graph_repeats, assert_repeatable, fresh_seed, poison, random
from tests.kernels.test_packed import packed_weight


def test_the_table_decides_by_shape_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = packed_weight(64, 256, group=128)
    tile = Tile(16, 16, 4, 3)
    used: list[Any] = []
    far = packed.MOST_FUSED + 2
    table = {(64, 256): ((2, RingConfig(64, 8, 4)), (5, None), (9, tile), (far, WideConfig(128, 3)))}
    monkeypatch.setattr(packed, "_table", lambda device: table)

    def product(x: Tensor, weight: PackedWeight, bias: Any, config: Any, **more: Any) -> Tensor:
        used.append(config)
        return x.new_zeros(len(x), 64)

    monkeypatch.setattr("asyncllm.kernels.triton.linear.hopper_packed.ring", product)
    monkeypatch.setattr("asyncllm.kernels.triton.linear.hopper_packed_wide.wide", product)
    monkeypatch.setattr(packed, "multiply", product)
    for tokens in (1, 2, 3, 6, 9, 10, far, far + 1):
        packed.linear_packed(random(tokens, 256, dtype=torch.bfloat16), weight)
    assert used == [RingConfig(64, 8, 4)] * 2 + [tile] * 2 + [WideConfig(128, 3)] * 2
    used.clear()
    for other in (packed_weight(64, 256, group=32), packed_weight(64, 256, bits=8, group=128)):
        packed.linear_packed(random(1, 256, dtype=torch.bfloat16), other)
    packed.linear_packed(random(far + 1, 256, dtype=torch.bfloat16), weight)
    assert used == [packed.TILES[0]] * 2, "rings are of whole chunks in 4 bits"


@pytest.mark.timeout(300)
def test_kernels_compile_to_what_they_are_meant_to_be(compile_kernels: offline.Compile) -> None:
    for name, case in compile_kernels("compile_ring").items():
        assert case.spilled_bytes == 0, name
        assert case.shared_bytes <= offline.MAX_SHARED_BYTES, name
        # Two for each run of 32 input features.
        assert case.wgmma == (16 if "gated" in name else 8), name
        assert case.mma == 0, name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "config",
    [
        RingConfig(64, 8, 8, 4),
        RingConfig(64, 16, 4, 8),
        RingConfig(64, 32, 4),
        RingConfig(64, 64, 4, 2),
        RingConfig(64, 16, 6, 2, joined=True),
        RingConfig(64, 128, 2, 2, rounded=True),
        RingConfig(128, 128, 3, rounded=True),
    ],
)
def test_products(config: RingConfig, dtype: torch.dtype) -> None:
    """Of rows that do not fill a tile, in several tiles of tokens, and with one group."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("for Hopper")
    from asyncllm.kernels.triton.linear.hopper_packed import ring

    for k, group in ((4096, 128), (1056, 1056)):
        weight = packed_weight(272, k, group=group, seed=fresh_seed())
        weight = weight._replace(scales=weight.scales / 16)
        bias = random(272, seed=5, dtype=dtype)
        for tokens in (1, config.tokens, 2 * config.tokens + 5):
            x = random(tokens, k, seed=tokens, dtype=dtype)
            poison((tokens, 272), dtype=dtype)
            y = assert_repeatable(lambda rows=x, of=weight, plus=bias: ring(rows, of, plus, config))
            expected = x.double() @ natural(weight, torch.float64).T + bias.double()
            bound = (4e-3 if dtype == torch.bfloat16 else 1e-3) * (2 if config.rounded else 1)
            assert (y.double() - expected).norm() < bound * expected.norm(), (k, tokens)
            plain = ring(x, weight, None, config)
            gated, wanted = ring(x, weight, None, config, gated=True).float(), kernels.silu_mul(plain).float()
            assert (gated - wanted).norm() < 2e-2 * wanted.norm(), (k, tokens)
    assert not zero_counters(y.device).any()


@pytest.mark.gpu
def test_a_graph_repeats_a_split_product() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("for Hopper")
    from asyncllm.kernels.triton.linear.hopper_packed import ring

    weight = packed_weight(512, 512, group=128)
    weight = weight._replace(scales=weight.scales / 64)
    x = random(5, 512, dtype=torch.bfloat16)

    def product(rows: Tensor) -> Tensor:
        return ring(rows, weight, None, RingConfig(64, 8, 4, 4))

    assert_a_graph_repeats(x, product, product)
