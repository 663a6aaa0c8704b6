"""Products of numbers of 8 bits: op and launchers against float64 of the same codes, and what they compile to."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels import Rounding, ScaledWeight
from asyncllm.kernels.scaled import expand, round_codes
from asyncllm.kernels.triton.counters import zero_counters
from asyncllm.kernels.triton.linear import scaled as launchers
from asyncllm.kernels.triton.linear.hopper_scaled import product as hopper_product
from asyncllm.kernels.triton.linear.scaled import LIBRARY, ONE_TOKEN, TILES, HopperConfig, multiply
from asyncllm.kernels.triton.linear.small import GemvConfig, NarrowConfig
from asyncllm.kernels.triton.linear.tiles import Tile
from asyncllm.kernels.triton.rounded import round_rows
from tests.kernels import offline
from tests.kernels.device import DEVICE, assert_a_graph_repeats, assert_repeatable, fresh_seed, poison, random

FP8, INT8 = torch.float8_e4m3fn, torch.int8
KINDS = pytest.mark.parametrize(
    ("dtype", "grouped"), [(FP8, False), (FP8, True), (INT8, False), (INT8, True)],
    ids=["fp8", "fp8-grouped", "int8", "int8-grouped"],
)  # fmt: skip


def scaled_weight(n: int, k: int, dtype: torch.dtype, *, grouped: bool, static: float | None = None) -> ScaledWeight:
    codes, _ = round_codes(random(n, k, seed=1).cpu(), dtype)
    scales = torch.rand(-(-k // 128) if grouped else 1, n, generator=torch.Generator().manual_seed(2)) / 100 + 1e-3
    given = None if static is None else torch.tensor([static], device=DEVICE)
    return ScaledWeight(codes.to(DEVICE), scales.to(DEVICE), given)


def expected(codes: Tensor, scales: Tensor, weight: ScaledWeight) -> tuple[Tensor, Tensor]:
    """The product of the codes, each times its scale, in float64, and the sum of the magnitudes."""
    size = 128 if scales.shape[1] > 1 else codes.shape[1]
    spread = scales.cpu().double().repeat_interleave(size, 1)[:, : codes.shape[1]]
    rows = codes.cpu().double() * spread
    dense = expand(ScaledWeight(*[each.cpu() for each in weight[:2]], None), torch.float64)
    return rows @ dense.T, rows.abs() @ dense.T.abs()


def assert_close(actual: Tensor, wanted: Tensor, magnitude: Tensor) -> None:
    step = {torch.float32: 2.0**-21, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[actual.dtype]
    assert ((actual.cpu().double() - wanted).abs() <= wanted.abs() * step + magnitude * 2.0**-12).all()


@KINDS
@pytest.mark.parametrize("k", [64, 300])
def test_the_op_is_the_product_of_its_codes(dtype: torch.dtype, grouped: bool, k: int) -> None:
    weight = scaled_weight(9, k, dtype, grouped=grouped)
    x, bias = random(2, 3, k, dtype=torch.bfloat16), random(9, seed=4, dtype=torch.bfloat16)
    rows = x.cpu().reshape(-1, k)
    codes, scales, _ = kernels.round_rows.reference(rows, weight.rounding)  # type: ignore[attr-defined]
    spread = scales.repeat_interleave(128 if scales.shape[1] > 1 else k, 1)[:, :k]
    step = spread if dtype == INT8 else rows.float().abs() / 8 + spread / 2**6
    assert ((codes.float() * spread - rows.float()).abs() <= step * 0.5001).all()
    wanted, magnitude = expected(codes, scales, weight)
    y = kernels.linear_scaled(x, weight, bias)
    assert_close(y.reshape(-1, 9), wanted + bias.cpu().double(), magnitude)
    out = torch.full((2, 3, 9), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    assert kernels.linear_scaled(x, weight, bias, out=out) is out
    assert torch.equal(out, y)


def test_a_given_scale_clips() -> None:
    weight = scaled_weight(5, 64, FP8, grouped=False, static=0.001)
    x = random(3, 64)
    wanted, magnitude = expected((x.cpu() / 0.001).clamp(-448, 448).to(FP8).double(), torch.full((3, 1), 0.001), weight)
    for product in (kernels.linear_scaled, launchers.linear_scaled):
        assert_close(product(x, weight), wanted, magnitude)


@KINDS
@pytest.mark.parametrize("x_type", [torch.float32, torch.bfloat16])
def test_rounded_rows_are_those_of_the_reference(dtype: torch.dtype, grouped: bool, x_type: torch.dtype) -> None:
    x = random(6, 300, dtype=x_type)
    x[1] = 0
    x[2] *= 1e-3
    x[3, 7] = 1000.0
    # A fraction that is a half, to both sides.
    x[4] = (torch.arange(300) % 100 - 50).to(x_type) / 2
    codes, scales, kind = round_rows(x, Rounding(dtype, grouped))
    assert kind == x_type
    size = 128 if grouped else 300
    for group, part in enumerate(x.cpu().float().split(size, 1)):
        wanted, own, _ = kernels.round_rows.reference(part, Rounding(dtype))  # type: ignore[attr-defined]
        torch.testing.assert_close(scales[:, group].cpu(), own[:, 0], rtol=1e-6, atol=0)
        found = codes[:, group * size :][:, :size].cpu().float()
        # A division that is rounded otherwise may lead to the neighbour.
        different = found != wanted.float()
        assert different.sum() <= 2
        assert (found - wanted.float()).abs().max() <= 32


def test_every_code_is_read_and_written_as_torch_does() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    every = every[(every & 127) != 127].view(FP8).float()
    between = torch.cat([every, every * 1.03, every * 0.97, (every[:-1] + every[1:]) / 2])
    row = between.clamp(-448, 448)[None].to(DEVICE)
    weight = ScaledWeight(torch.eye(len(every)).to(FP8).to(DEVICE), torch.ones(1, len(every), device=DEVICE), None)
    codes, scales, _ = round_rows(row, weight.rounding)
    assert scales.item() == 1
    assert torch.equal(codes.cpu().float(), row.cpu().to(FP8).float())
    assert torch.equal(launchers.linear_scaled(every[None].to(DEVICE), weight).cpu(), every[None])


@pytest.mark.parametrize(
    ("tokens", "n", "k", "tile", "dtype", "grouped"),
    [
        (1, 64, 256, Tile(16, 16, 4, 3), FP8, True),
        (19, 40, 300, Tile(32, 32, 4, 3, programs=9), INT8, False),
        (17, 72, 384, Tile(64, 16, 4, 3), FP8, False),
        (3, 24, 384, Tile(16, 16, 4, 3, programs=9), INT8, True),
    ],
)
def test_the_kernel_on_odd_sizes(tokens: int, n: int, k: int, tile: Tile, dtype: torch.dtype, grouped: bool) -> None:
    weight = scaled_weight(n, k, dtype, grouped=grouped)
    bias = random(n, seed=5, dtype=torch.bfloat16) if tokens > 1 else None
    codes, scales, _ = round_rows(random(tokens, k, dtype=torch.bfloat16), weight.rounding)

    def product() -> Tensor:
        poison((tokens, n), dtype=torch.bfloat16)
        out = torch.empty(tokens, n, dtype=torch.bfloat16, device=DEVICE)
        multiply(codes, scales, weight, bias, tile, out)
        return out

    wanted, magnitude = expected(codes, scales, weight)
    assert_close(assert_repeatable(product), wanted + (0 if bias is None else bias.cpu().double()), magnitude)
    assert not zero_counters(codes.device).any()


@pytest.mark.parametrize("dtype", [FP8, INT8])
@pytest.mark.parametrize(
    ("n", "k", "config"), [(24, 300, GemvConfig(4, 256)), (16, 64, GemvConfig(8, 128)), (12, 384, GemvConfig(2, 64))]
)
def test_one_token_without_tensor_cores(n: int, k: int, config: GemvConfig, dtype: torch.dtype) -> None:
    weight, bias = scaled_weight(n, k, dtype, grouped=False), random(n, seed=5, dtype=torch.bfloat16)
    codes, scales, _ = round_rows(random(1, k, seed=fresh_seed(), dtype=torch.bfloat16), weight.rounding)
    wanted, magnitude = expected(codes, scales, weight)
    for given, offset in ((None, 0.0), (bias, bias.cpu().double())):
        out = torch.full((1, n), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        launchers.multiply_one(codes, scales, weight, given, config, out)
        assert_close(out, wanted + offset, magnitude)
    out = torch.empty(1, n, dtype=torch.bfloat16, device=DEVICE)
    launchers.multiply_one(codes, scales, weight, None, config, out)
    gated = torch.full((1, n // 2), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    launchers.multiply_one(codes, scales, weight, None, config, gated, gated=True)
    torch.testing.assert_close(gated, kernels.silu_mul(out), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("k", [2056, 256])
def test_one_rounded_row_with_the_gate(k: int) -> None:
    """By a kernel with the gate, and for the shorter row by tiles and a separate gate."""
    weight = scaled_weight(48, k, FP8, grouped=False)
    codes, scales, _ = round_rows(random(1, k, dtype=torch.bfloat16), weight.rounding)
    wanted = kernels.silu_mul(launchers.linear_rounded(codes, scales, weight, dtype=torch.bfloat16))
    for product in (launchers.linear_rounded_silu_mul, kernels.linear_rounded_silu_mul):
        y = product(codes, scales, weight, dtype=torch.bfloat16)
        torch.testing.assert_close(y, wanted, atol=1e-2, rtol=1e-2)


def test_several_rows_leave_the_gate_to_the_next_rounding() -> None:
    weight = scaled_weight(48, 256, FP8, grouped=False)
    codes, scales, _ = round_rows(random(3, 256, dtype=torch.bfloat16), weight.rounding)
    for product in (launchers.linear_rounded_silu_mul, kernels.linear_rounded_silu_mul):
        assert product(codes, scales, weight, dtype=torch.bfloat16) is None


@KINDS
def test_the_launcher(dtype: torch.dtype, grouped: bool) -> None:
    weight = scaled_weight(40, 256, dtype, grouped=grouped)
    x = random(2, 3, 256, dtype=torch.float16)
    y, wanted = launchers.linear_scaled(x, weight), kernels.linear_scaled.reference(x.cpu(), ScaledWeight(*[  # type: ignore[attr-defined]
        each.cpu() for each in weight[:2]], None))  # fmt: skip
    torch.testing.assert_close(y.cpu(), wanted, atol=4e-3, rtol=4e-3)
    out = torch.full((2, 3, 40), torch.nan, dtype=torch.float16, device=DEVICE)
    assert launchers.linear_scaled(x, weight, out=out) is out
    assert torch.equal(out, y)
    assert launchers.linear_scaled(x[:0], weight).shape == (0, 3, 40)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("dtype", [FP8, INT8])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_alone(dtype: torch.dtype, bad: float) -> None:
    weight = scaled_weight(8, 300, dtype, grouped=False)
    x = random(3, 300)
    alone = launchers.linear_scaled(x, weight)
    x[1, 200] = bad
    for product in (kernels.linear_scaled, launchers.linear_scaled):
        y = product(x, weight)
        assert not y[1].isfinite().any()
    assert torch.equal(y[[0, 2]], alone[[0, 2]])


def test_kernels_compile_to_what_they_are_meant_to_be(compile_kernels: offline.Compile) -> None:
    for name, case in compile_kernels("compile_scaled").items():
        assert case.spilled_bytes == 0, name
        assert case.shared_bytes <= offline.MAX_SHARED_BYTES, name
        if name.startswith("product"):
            assert case.wgmma >= 4, name
            assert case.mma == 0, name
            assert case.async_copies >= 20, name


def test_what_multiplies_is_chosen_by_rows_and_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = NarrowConfig(64, 1, 4)
    monkeypatch.setattr(launchers, "_table", lambda *_: {(64, 128): ((4, narrow), (8, TILES[3]), (300, LIBRARY))})
    monkeypatch.setattr(launchers, "is_hopper", lambda device: True)

    def chosen(
        tokens: int, dtype: torch.dtype = FP8, *, n: int = 64, k: int = 128, grouped: bool = False,
        x: torch.dtype = torch.bfloat16,
    ) -> object:  # fmt: skip
        weight = scaled_weight(n, 256 if grouped else k, dtype, grouped=grouped)
        return launchers.choose(weight.codes[:1].repeat(tokens, 1), weight, x)

    assert [chosen(tokens) for tokens in (1, 4, 5, 9, 301)] == [narrow, narrow, TILES[3], LIBRARY, LIBRARY]
    # What the library does not take: integers, results of other types, odd sizes, groups.
    assert [chosen(tokens, INT8) for tokens in (4, 8, 9, 100)] == [narrow, TILES[3], TILES[0], TILES[3]]
    assert [chosen(tokens, x=torch.float16) for tokens in (100, 301)] == [TILES[3], HopperConfig(shares=True)]
    assert [chosen(tokens, n=72) for tokens in (1, 100)] == [TILES[0], TILES[3]]
    assert [chosen(tokens, n=72, k=4000) for tokens in (1, 2)] == [ONE_TOKEN, TILES[0]]
    assert chosen(1, n=73, k=4000) == chosen(1, n=72, k=4128) == TILES[0]
    assert [chosen(tokens, grouped=True) for tokens in (1, 100)] == [TILES[0], TILES[3]]
    # A third of the multiprocessors, a half, all but a few, all and one more.
    widths = [(256 * 44, 128), (256 * 66, 65), (256 * 66, 129), (256 * 67, 129)]
    tiles, shares = HopperConfig(), HopperConfig(shares=True)
    assert [chosen(tokens, INT8, n=n) for n, tokens in widths] == [TILES[3], shares, tiles, shares]
    assert chosen(300, INT8, n=72) == chosen(300, INT8, k=72) == chosen(300, INT8, grouped=True) == TILES[3]
    assert [chosen(tokens, n=80) for tokens in (64, 65)] == [TILES[2], LIBRARY]


def test_tiles_hold_more_and_more_tokens() -> None:
    assert [tile.tokens for tile in TILES] == sorted({tile.tokens for tile in TILES})


@pytest.mark.gpu
@KINDS
def test_every_tile_on_the_device(dtype: torch.dtype, grouped: bool) -> None:
    weight = scaled_weight(1536, 4096, dtype, grouped=grouped)
    for tokens in (1, 8, 16, 32, 50, 64, 100, 500, 3000):
        x = random(tokens, 4096, seed=tokens, dtype=torch.bfloat16)
        poison((tokens, 1536), dtype=torch.bfloat16)
        y = assert_repeatable(lambda rows=x: kernels.linear_scaled(rows, weight))
        wanted = kernels.linear_scaled.reference(x, weight).double()  # type: ignore[attr-defined]
        assert (y.double() - wanted).norm() / wanted.norm() < 6e-3, tokens


@pytest.mark.gpu
def test_long_sums_of_one_sign_keep_their_digits() -> None:
    """Hopper's tensor cores keep some 14 bits of a sum in fp8."""
    weight = ScaledWeight(torch.full((64, 14336), 1.125).to(FP8).to(DEVICE), torch.ones(1, 64, device=DEVICE), None)
    x = torch.rand(4, 14336, generator=torch.Generator().manual_seed(0)).add_(1).to(DEVICE)
    codes, scales, _ = round_rows(x, weight.rounding)
    wanted = codes.double().sum(1) * 1.125 * scales[:, 0].double()
    torch.testing.assert_close(kernels.linear_scaled(x, weight)[:, 0].double(), wanted, rtol=1e-3, atol=0)


N, K = 1424, 1040
"""Neither 256 rows of a weight nor 128 features divide these evenly."""
HOPPER = pytest.mark.parametrize("config", [HopperConfig(), HopperConfig(shares=True)], ids=["tiles", "shares"])
BITS = pytest.mark.parametrize("dtype", [FP8, INT8], ids=["fp8", "int8"])


def many(codes: Tensor, scales: Tensor, weight: ScaledWeight, config: HopperConfig, *, gated: bool) -> Tensor:
    """With NaN in the memory that results and partial sums are allocated in; counters are left at zero."""
    n = weight.codes.shape[0] // 2 if gated else weight.codes.shape[0]
    poison((len(codes), n), dtype=torch.bfloat16)
    out = torch.empty(len(codes), n, dtype=torch.bfloat16, device=DEVICE)
    if config.shares:
        poison((132 * 2 * 2 * 64 * 128,), dtype=torch.float32)
    hopper_product(codes, scales, weight, None, out, shares=config.shares, gated=gated)
    assert not zero_counters(codes.device).any()
    return out


@pytest.mark.gpu
@HOPPER
@BITS
@pytest.mark.parametrize("tokens", [1, 65, 128, 129, 256, 257, 1000, 4097])
def test_many_tokens_on_hopper(tokens: int, dtype: torch.dtype, config: HopperConfig) -> None:
    weight, bias = scaled_weight(N, K, dtype, grouped=False), random(N, seed=5, dtype=torch.bfloat16)
    codes, scales, _ = round_rows(random(tokens, K, seed=fresh_seed(), dtype=torch.bfloat16), weight.rounding)
    plain = assert_repeatable(lambda: many(codes, scales, weight, config, gated=False))
    wanted, magnitude = expected(codes, scales, weight)
    # Tensor cores keep some 14 bits of sums of fp8.
    assert_close(plain, wanted, magnitude)
    biased = torch.full_like(plain, torch.nan)
    hopper_product(codes, scales, weight, bias, biased, shares=config.shares, gated=False)
    assert_close(biased, wanted + bias.cpu().double(), magnitude + bias.cpu().double().abs())
    gated = assert_repeatable(lambda: many(codes, scales, weight, config, gated=True)).double().cpu()
    (gate, up), (gate_size, up_size) = wanted.chunk(2, -1), magnitude.chunk(2, -1)
    # SiLU is at most 1.1 times as steep as its argument.
    error = 2.0**-12 * (1.1 * gate_size * up.abs() + gate.abs() * up_size) + 2.0**-6 * (gate * up).abs()
    assert ((gated - F.silu(gate) * up).abs() <= error).all()


@pytest.mark.gpu
@HOPPER
@BITS
def test_rows_do_not_see_each_other_on_hopper(dtype: torch.dtype, config: HopperConfig) -> None:
    weight = scaled_weight(N, K, dtype, grouped=False)
    x = random(300, K, seed=fresh_seed(), dtype=torch.bfloat16)
    alone = many(*round_rows(x, weight.rounding)[:2], weight, config, gated=True)
    others = x.clone()
    others[:137], others[138:200], others[200], others[201:] = 3.0, -x[138:200], torch.nan, 7.0
    y = many(*round_rows(others, weight.rounding)[:2], weight, config, gated=True)
    assert torch.equal(y[137], alone[137])
    assert y[200].isnan().all()
    assert y[:200].isfinite().all()
    assert y[201:].isfinite().all()


@pytest.mark.gpu
@HOPPER
def test_a_graph_of_products_on_hopper(config: HopperConfig) -> None:
    """Launched in a row, each on what the one before has stored: the weights come early, the tokens must not."""
    weight = scaled_weight(1024, 512, FP8, grouped=False)
    # So that results are about as large as x.
    weight.scales.fill_(4.5e-4)

    def product(x: Tensor) -> Tensor:
        codes, scales, _ = round_rows(x, weight.rounding)
        out = torch.empty(len(x), 512, dtype=torch.bfloat16, device=DEVICE)
        hopper_product(codes, scales, weight, None, out, shares=config.shares, gated=True)
        return out

    assert_a_graph_repeats(random(256, 512, seed=fresh_seed(), dtype=torch.bfloat16), product, product)
