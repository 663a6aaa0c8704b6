"""Products with packed weights: the op and its launchers against float64, and what the kernels compile to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels import PackedWeight
from asyncllm.kernels.packed import natural, pack_codes
from asyncllm.kernels.triton.counters import zero_counters
from asyncllm.kernels.triton.linear import packed as products
from asyncllm.kernels.triton.linear import packed_experts as launchers
from asyncllm.kernels.triton.linear.packed import TILES, multiply
from asyncllm.kernels.triton.linear.tiles import Tile, choose_tile
from tests.kernels import offline
from tests.kernels.device import DEVICE, assert_a_graph_repeats, assert_repeatable, fresh_seed, poison, random


def packed_weight(
    n: int, k: int, *, bits: int = 4, group: int | None = None, ordered: bool = False, seed: int = 1
) -> PackedWeight:
    """Random codes with every zero point; the scales differ by a factor of eight."""
    generator = torch.Generator().manual_seed(seed)
    size = k if group is None else group
    shape = (k // size, n)
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=generator)
    zeros = torch.randint(0, 1 << bits, shape, dtype=torch.uint8, generator=generator)
    scales = torch.rand(shape, generator=generator).mul_(7).add_(1).div_(1 << bits).half()
    order = torch.randperm(k, generator=generator).to(DEVICE) if ordered else None
    return PackedWeight(pack_codes(codes, bits).to(DEVICE), scales.to(DEVICE), zeros.to(DEVICE), order, bits, size, k)


def whole(weight: PackedWeight) -> Tensor:
    """The weight [N, K] in float64, number by number of the formula in `PackedWeight`."""
    values = weight.words.cpu().numpy().view("<u2").astype(int)
    result = torch.zeros(weight.out_features, weight.in_features, dtype=torch.float64)
    per_word = 16 // weight.bits
    for place in range(weight.in_features):
        chunk, inside = divmod(place, 32 * per_word)
        codes = values[chunk, :, inside % 32] >> (weight.bits * (inside // 32)) & ((1 << weight.bits) - 1)
        group = place // weight.group_size
        column = place if weight.order is None else int(weight.order[place])
        zeros, scales = weight.zeros[group].cpu().double(), weight.scales[group].cpu().double()
        result[:, column] = (torch.from_numpy(codes) - zeros) * scales
    return result


def assert_close(actual: Tensor, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> None:
    """Within the rounding of the result and of a sum in float32."""
    dense, rows = whole(weight), x.cpu().double()
    expected = rows @ dense.T + (0 if bias is None else bias.cpu().double())
    step = {torch.float32: 2.0**-22, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[actual.dtype]
    allowed = expected.abs() * step + (rows.abs() @ dense.T.abs()) * 2.0**-18
    assert ((actual.cpu().double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, None), (8, 96), (8, None)])
def test_the_op_is_the_formula(bits: int, group: int | None, dtype: torch.dtype) -> None:
    weight = packed_weight(7, 288, bits=bits, group=group, ordered=bits == 8)
    x, bias = random(2, 3, 288, dtype=dtype), random(7, seed=3, dtype=dtype)
    y = kernels.linear_packed(x, weight, bias)
    assert y.dtype == dtype
    assert_close(y, x, weight, bias)
    out = torch.full((2, 3, 7), torch.nan, dtype=dtype, device=DEVICE)
    assert kernels.linear_packed(x, weight, bias, out=out) is out
    assert torch.equal(out, y)
    torch.testing.assert_close(natural(weight, torch.float32).cpu(), whole(weight).float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("bits", "group"), [(4, 32), (4, 64), (4, 96), (4, 128), (4, None), (8, 32), (8, 64), (8, None)]
)
def test_groups_of_every_size(bits: int, group: int | None, dtype: torch.dtype) -> None:
    weight = packed_weight(48, 384 if group else 160, bits=bits, group=group)
    x = random(3, weight.in_features, dtype=dtype)
    poison((3, 48), dtype=dtype)
    assert_close(products.linear_packed(x, weight), x, weight)


@pytest.mark.parametrize(
    ("tokens", "tile"),
    [
        (1, Tile(16, 16, 4, 3)),
        (17, Tile(32, 32, 4, 3, programs=8)),
        (33, Tile(64, 32, 4, 3, programs=64)),
    ],
)
def test_odd_sizes_splits_and_tiles_of_tokens(tokens: int, tile: Tile) -> None:
    weight = packed_weight(72, 544, group=32)
    x = random(tokens, 544, dtype=torch.bfloat16)
    bias = random(72, seed=5, dtype=torch.bfloat16) if tokens > 1 else None
    poison((tokens, 72), dtype=torch.bfloat16)
    y = assert_repeatable(lambda: multiply(x, weight, bias, tile))
    assert_close(y, x, weight, bias)
    assert not zero_counters(x.device).any()


@pytest.mark.parametrize(
    ("tokens", "tile"),
    [
        (3, Tile(32, 16, 4, 3, programs=8)),
        (70, Tile(16, 32, 4, 3, programs=16)),
        (140, Tile(64, 128, 4, 3, programs=4)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gated_products_and_rounded_weights(tokens: int, tile: Tile, dtype: torch.dtype) -> None:
    """With a tile that the rows do not fill. Scales of float16 are of x's type, or of another."""
    weight = packed_weight(144, 544, group=544 if tokens == 3 else 32)
    weight = weight._replace(scales=weight.scales / 16)
    x = random(tokens, 544, dtype=dtype)
    y = multiply(x, weight, None, tile)
    if tile.tokens >= products.LEAST_ROUNDED:
        expected = x.cpu().double() @ natural(weight, dtype).cpu().double().T
        torch.testing.assert_close(y.cpu().double(), expected, atol=2e-2, rtol=2.0**-7)
    else:
        assert_close(y, x, weight)
    gated = assert_repeatable(lambda: multiply(x, weight, None, tile, gated=True))
    # Its sums may be split otherwise.
    expected = kernels.silu_mul(y).float()
    assert (gated.float() - expected).norm() <= 1e-2 * expected.norm()
    assert not zero_counters(x.device).any()


def test_the_gated_op() -> None:
    weight = packed_weight(96, 160, group=32, ordered=True)
    weight = weight._replace(scales=weight.scales / 16)
    for tokens in (0, 1, 20, products.MOST_FUSED // 2 + 1):
        x = random(2, tokens, 160, dtype=torch.bfloat16)
        poison((2 * tokens, 48), dtype=torch.bfloat16)
        found = products.linear_packed_silu_mul(x, weight)
        expected = kernels.linear_packed_silu_mul.reference(x, weight)  # type: ignore[attr-defined]
        assert found.shape == (2, tokens, 48)
        assert (found.float() - expected.float()).norm() <= 2e-2 * expected.float().norm()


def test_many_tokens_float32_order_and_nothing() -> None:
    weight = packed_weight(40, 160, group=32, ordered=True)
    many = random(2, products.MOST_FUSED // 2 + 1, 160, dtype=torch.bfloat16)
    y = products.linear_packed(many, weight)
    expected = many.cpu().double() @ natural(weight, torch.bfloat16).cpu().double().T
    torch.testing.assert_close(y.cpu().double(), expected, atol=1e-2, rtol=1e-2)
    for rows in (random(3, 160), random(5, 160, dtype=torch.float16)):
        assert_close(products.linear_packed(rows, weight), rows, weight)
        out = torch.full((len(rows), 40), torch.nan, dtype=rows.dtype, device=DEVICE)
        assert products.linear_packed(rows, weight, out=out) is out
        assert_close(out, rows, weight)
    assert products.linear_packed(random(0, 160, dtype=torch.bfloat16), weight).shape == (0, 40)


def test_every_code_and_every_zero_point_is_exact() -> None:
    """x picks one input feature, so each output is one (code - zero) * scale."""
    for bits in (4, 8):
        count = 1 << bits
        codes = torch.arange(count, dtype=torch.uint8)[:, None].expand(count, 32).contiguous()
        zeros = torch.arange(count, dtype=torch.uint8).roll(bits)[None]
        weight = PackedWeight(
            pack_codes(codes, bits).to(DEVICE),
            torch.ones(1, count).half().to(DEVICE),
            zeros.to(DEVICE),
            None,
            bits,
            32,
            32,
        )
        x = torch.eye(32, dtype=torch.bfloat16, device=DEVICE)
        for row in products.linear_packed(x, weight):
            assert torch.equal(row.cpu().int(), torch.arange(count).int() - zeros[0].int())


def stacked(n: int, k: int, *, ordered: bool, seed: int) -> tuple[PackedWeight, Tensor]:
    """Four experts, and their weights [4, N, K]."""
    each = [packed_weight(n, k, group=32, ordered=ordered, seed=seed + expert) for expert in range(4)]
    each = [one._replace(scales=one.scales / 16) for one in each]
    words, scales, zeros = (torch.stack(parts) for parts in zip(*[one[:3] for one in each], strict=True))
    order = torch.stack([one.order for one in each if one.order is not None]) if ordered else None
    stack = each[0]._replace(words=words, scales=scales, zeros=zeros, order=order)
    return stack, torch.stack([whole(one).float() for one in each])


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(
    ("product", "dtype", "tokens"),
    [
        (kernels.packed_experts, torch.float32, 5),
        (launchers.packed_experts, torch.float32, 5),
        (launchers.packed_experts, torch.bfloat16, 1),
        (launchers.packed_experts, torch.bfloat16, 37),
        (launchers.packed_experts, torch.float16, 90),
        (launchers.packed_experts, torch.bfloat16, 300),
    ],
)
def test_experts(product: Any, dtype: torch.dtype, tokens: int, ordered: bool) -> None:
    gate_up, first = stacked(128, 96, ordered=ordered, seed=1)
    down, second = stacked(96, 64, ordered=ordered, seed=9)
    x, weights = random(tokens, 96, dtype=dtype), random(tokens, 2, seed=7).abs()
    ids = random(tokens, 4, seed=8).argsort(-1)[:, :2].contiguous()
    y = product(x, gate_up, down, weights, ids)
    rows = (x.cpu().float(), first, second, weights.cpu(), ids.cpu())
    expected = kernels.fused_experts.reference(*rows)  # type: ignore[attr-defined]
    assert y.dtype == dtype
    step = 1e-5 if dtype == torch.float32 else 2e-2
    assert (y.cpu().float() - expected).norm() <= step * expected.norm()


def test_the_tile_follows_the_tokens() -> None:
    assert [choose_tile(TILES, tokens) for tokens in (1, 16, 17, 64, 65, 1000)] == [
        TILES[i] for i in (0, 0, 1, 2, 3, 4)
    ]


def test_kernels_compile_to_what_they_are_meant_to_be(compile_kernels: offline.Compile) -> None:
    for name, case in compile_kernels("compile_packed").items():
        assert case.spilled_bytes == 0, name
        assert case.shared_bytes <= offline.MAX_SHARED_BYTES, name
        if name.startswith("product"):
            assert case.wgmma >= 4, name
            assert case.mma == 0, name
            assert case.async_copies >= 20, name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("bits", "group"), [(4, 128), (4, 32), (8, 128)])
def test_every_tile_on_the_device(bits: int, group: int, dtype: torch.dtype) -> None:
    weight = packed_weight(1536, 4096, bits=bits, group=group, seed=fresh_seed())
    for tokens in (1, 8, 16, 32, 50, 64, 100, 500, 1024, 1100):
        x = random(tokens, 4096, seed=tokens, dtype=dtype)
        poison((tokens, 1536), dtype=dtype)
        y = assert_repeatable(lambda rows=x: kernels.linear_packed(rows, weight))
        expected = x.double() @ natural(weight, torch.float64).T
        difference = (y.double() - expected).norm() / expected.norm()
        assert difference < (4e-3 if dtype == torch.bfloat16 else 1e-3), tokens


@pytest.mark.gpu
def test_a_graph_repeats_a_split_product() -> None:
    weight = packed_weight(512, 512, group=128)
    weight = weight._replace(scales=weight.scales / 64)
    x = random(5, 512, dtype=torch.bfloat16)

    def product(rows: Tensor) -> Tensor:
        return kernels.linear_packed(rows, weight)

    assert_a_graph_repeats(x, product, product)
