"""Packed products for Hopper and many tokens: the kernels' numbers and barriers on a model of Gluon, what they compile
to, and on a GPU what they compute."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels import PackedWeight
from asyncllm.kernels.packed import natural
from asyncllm.kernels.triton.counters import zero_counters
from asyncllm.kernels.triton.linear import hopper_packed, hopper_packed_wide
from asyncllm.kernels.triton.linear.tiles import RingConfig, WideConfig
from tests.kernels import gluon_model, offline
from tests.kernels.device import assert_a_graph_repeats, assert_repeatable, fresh_seed, poison, random
from tests.kernels.test_packed import packed_weight


def small_scales(n: int, k: int, *, group: int = 128, scales: torch.dtype = torch.float16) -> PackedWeight:
    weight = packed_weight(n, k, group=group, seed=fresh_seed())
    return weight._replace(scales=(weight.scales / 16).to(scales))


def expected(x: Tensor, weight: PackedWeight, bias: Tensor | None, *, rounded: bool) -> Tensor:
    """In float64, of the weight's numbers, rounded or not."""
    dense = natural(weight, x.dtype if rounded else torch.float64).double()
    return x.double() @ dense.T + (0 if bias is None else bias.double())


def modelled(
    x: Tensor, weight: PackedWeight, config: WideConfig | RingConfig, *, bias: Tensor | None = None,
    gated: bool = False, processors: int = 6,
) -> Tensor:  # fmt: skip
    tokens, k = x.shape
    n = weight.out_features // 2 if gated else weight.out_features
    out = x.new_full((tokens, n), torch.nan)
    given = (out, out if bias is None else bias, weight.scales, weight.zeros)
    words = weight.words.view(-1, 32)
    token_tiles = -(-tokens // config.tokens)
    lines = gluon_model.Descriptor(x, (config.tokens, 32))
    if isinstance(config, RingConfig) and config.joined:
        lines = gluon_model.Descriptor(x.view(tokens, -1, 32).transpose(0, 1), (4, config.tokens, 32))
        if gated:
            words = words.view(-1, n, 32)
    if isinstance(config, WideConfig):
        options = hopper_packed_wide.compile_options(config, k, weight.group_size, gated=gated, bias=bias is not None)
        del options["maxnreg"]
        run = hopper_packed_wide.RUN
        column_tiles, steps = -(-n // (run if gated else run * config.halves)), -(-k // hopper_packed.CHUNK)
        shares = hopper_packed_wide.share_count(config, token_tiles, column_tiles, steps, processors)
        assert shares * token_tiles <= processors
        blocks = shares * token_tiles
        partial = torch.full((blocks * 2 * config.halves * 64 * config.tokens,), torch.nan)
        flags = torch.zeros(blocks * 2, dtype=torch.int32)
        gluon_model.run(
            hopper_packed_wide.wide_kernel, (blocks, 1, 1),
            lines, gluon_model.Descriptor(words, (run, 32)), *given, partial, flags,
            tokens, token_tiles, column_tiles, shares, n, USE_PDL=False, **options,
        )  # fmt: skip
    else:
        options = hopper_packed.compile_options(config, k, weight.group_size, gated=gated, bias=bias is not None)
        rows = -(-n // config.rows)
        numbers = config.splits * rows * token_tiles * config.rows * config.tokens * (2 if gated else 1)
        partial, flags = torch.full((numbers,), torch.nan), torch.zeros(rows * token_tiles, dtype=torch.int32)
        gluon_model.run(
            hopper_packed.ring_kernel, (config.splits, rows, token_tiles),
            lines, gluon_model.Descriptor(words, (*(2,) * (words.dim() - 2), config.rows, 32)), *given, partial, flags,
            tokens, n, USE_PDL=False, **options,
        )  # fmt: skip
    assert not flags.any()
    return out


@pytest.mark.parametrize(
    ("config", "dtype", "scales", "k", "processors"),
    [
        # Three tiles of tokens, whose blocks have whole tiles of rows; shares of 2.7 chunks; one group; 24-bit scales.
        (WideConfig(16, 2), torch.bfloat16, torch.float16, 256, 3),
        (WideConfig(16, 3, halves=1, splits=3), torch.bfloat16, torch.bfloat16, 1056, 12),
        (WideConfig(32, 2, splits=8), torch.float16, torch.float16, 640, 9),
        (WideConfig(32, 2, rounded=False), torch.bfloat16, torch.float16, 640, 7),
        (WideConfig(16, 2, halves=1, splits=2), torch.bfloat16, torch.float32, 384, 9),
        (RingConfig(64, 32, 2, splits=2, rounded=True), torch.bfloat16, torch.float16, 640, 0),
        (RingConfig(64, 32, 2, splits=3), torch.float16, torch.float16, 640, 0),
        (RingConfig(64, 16, 2, splits=2, joined=True), torch.bfloat16, torch.float16, 544, 0),
    ],
)
def test_a_model_of_the_kernel_multiplies(
    config: WideConfig | RingConfig, dtype: torch.dtype, scales: torch.dtype, k: int, processors: int
) -> None:
    weight = small_scales(272, k, group=k if k % 128 else 128, scales=scales)
    x, bias = random(37, k, dtype=dtype).cpu(), random(272, seed=5, dtype=dtype).cpu()
    y = modelled(x, weight, config, bias=bias, processors=processors)
    step = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    wanted = expected(x, weight, bias, rounded=config.rounded)
    magnitude = x.double().abs() @ natural(weight, torch.float64).abs().T
    assert ((y.double() - wanted).abs() <= wanted.abs() * step + magnitude * 2.0**-19).all()
    if isinstance(config, RingConfig) or config.halves == 2:
        gated = modelled(x, weight, config, gated=True, processors=processors)
        plain = modelled(x, weight, config, processors=processors)
        torch.testing.assert_close(gated, kernels.silu_mul(plain), atol=4 * step, rtol=4 * step)


def test_the_model_finds_a_sum_that_is_read_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = small_scales(128, 1024), random(16, 1024, dtype=torch.bfloat16).cpu()
    waits = gluon_model._mma_wait

    def short(outstanding: int, deps: tuple[gluon_model.Value, ...]) -> object:
        return waits(outstanding + 1, deps)

    monkeypatch.setattr(gluon_model, "_mma_wait", short)
    with pytest.raises(AssertionError, match="before its product is done"):
        modelled(x, weight, WideConfig(16, 2, halves=1, splits=1))


def test_two_factors_round_as_one_does() -> None:
    """Every scale of float16, every code less every zero point: the two factors of `rounding_factors` in bfloat16."""
    scales = torch.arange(1, 0x7C00, dtype=torch.int16).view(torch.float16).float()
    high = scales.bfloat16()
    low = (scales - high.float()).bfloat16()
    for less in range(16):
        code = torch.full((1,), float(less))
        product = (code * low.float()).bfloat16()
        assert torch.equal(product.float(), code * low.float()), "the small product is exact"
        # A fused sum rounds once, as the sum of numbers that float64 has room for does.
        fused = (code.double() * high.double() + product.double()).float()
        assert torch.equal(fused.bfloat16(), (code * scales).bfloat16())


def test_shares_fill_the_device_and_no_more() -> None:
    config = WideConfig(128, 3, splits=4)
    assert hopper_packed_wide.share_count(config, 2, 24, 32, 132) == 66
    assert hopper_packed_wide.share_count(config, 1, 16, 32, 132) == 64, "no more than splits of each tile"
    assert hopper_packed_wide.share_count(config, 1, 1, 2, 132) == 2, "nor than there are chunks"


@pytest.mark.timeout(300)
def test_kernels_compile_to_what_they_are_meant_to_be(compile_kernels: offline.Compile) -> None:
    for name, case in compile_kernels("compile_wide").items():
        assert case.spilled_bytes == 0, name
        assert case.shared_bytes <= offline.MAX_SHARED_BYTES, name
        # Two for each run of 32 input features, half of the tile, and consumer.
        assert case.wgmma == 8 * 2 * (1 if "-1-" in name else 2), name
        assert case.mma == 0, name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "config",
    [
        WideConfig(8, 8, halves=1, rounded=False),
        WideConfig(64, 5, rounded=False),
        WideConfig(128, 3),
        WideConfig(256, 2, halves=1),
    ],
)
def test_products(config: WideConfig, dtype: torch.dtype) -> None:
    """Rows that do not fill a tile, several tiles of tokens, one group for all features, tiles that no blocks share."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("for Hopper")
    for n, k, group in ((1040, 4096, 128), (1040, 1056, 1056), (1024, 256, 128)):
        weight = small_scales(n, k, group=group)
        bias = random(n, seed=5, dtype=dtype)
        for tokens in (1, config.tokens, 2 * config.tokens + 5):
            x = random(tokens, k, seed=tokens, dtype=dtype)
            poison((tokens, n), dtype=dtype)
            y = assert_repeatable(lambda rows=x, of=weight, plus=bias: hopper_packed_wide.wide(rows, of, plus, config))
            wanted = expected(x, weight, bias, rounded=config.rounded)
            bound = 4e-3 if dtype == torch.bfloat16 else 1e-3
            assert (y.double() - wanted).norm() < bound * wanted.norm(), (n, k, tokens)
            if config.halves == 2:
                plain = hopper_packed_wide.wide(x, weight, None, config)
                gated = hopper_packed_wide.wide(x, weight, None, config, gated=True).float()
                assert (gated - kernels.silu_mul(plain).float()).norm() < 2e-2 * gated.norm(), (n, k, tokens)
    assert not zero_counters(y.device).any()


@pytest.mark.gpu
def test_a_graph_repeats_shared_products() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("for Hopper")
    weight = packed_weight(512, 512, group=128)
    weight = weight._replace(scales=weight.scales / 64)

    def product(rows: Tensor) -> Tensor:
        return hopper_packed_wide.wide(rows, weight, None, WideConfig(64, 4))

    assert_a_graph_repeats(random(70, 512, dtype=torch.bfloat16), product, product)
