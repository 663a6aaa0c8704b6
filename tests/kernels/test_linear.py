"""Products with a weight: the Triton kernels against float64, what they compile to, and batch invariance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels.triton.counters import NUM_COUNTERS, zero_counters
from asyncllm.kernels.triton.linear import invariant as linear_invariant
from asyncllm.kernels.triton.linear import product as launchers
from asyncllm.kernels.triton.linear.exact import linear_exact
from asyncllm.kernels.triton.linear.small import GemvConfig, NarrowConfig, SkinnyConfig, gemv, skinny
from tests.kernels import offline
from tests.kernels.device import DEVICE, fresh_seed, interpreted, poison


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)


def expected(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


def assert_close(actual: Tensor, wanted: Tensor) -> None:
    """Within two roundings of the result's dtype: one is the result's own, the order of summation costs less."""
    step = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[actual.dtype]
    torch.testing.assert_close(actual.double(), wanted, atol=step, rtol=step)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@interpreted
@DTYPES
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_without_tensor_cores(tokens: int, with_bias: bool, dtype: torch.dtype) -> None:
    x, weight = random(tokens, 96, dtype=dtype), random(8, 96, seed=1, dtype=dtype)
    bias = random(8, seed=2, dtype=dtype) if with_bias else None
    for columns in (32, 64, 128):
        assert_close(gemv(x, weight, bias, config=GemvConfig(4, columns)), expected(x, weight, bias))


@interpreted
@DTYPES
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("tokens", "config"),
    [
        (1, SkinnyConfig(rows=16, columns=32)),
        (5, SkinnyConfig(rows=16, columns=32, splits=3)),
        (17, SkinnyConfig(rows=16, columns=32, splits=2)),
        (40, SkinnyConfig(rows=32, columns=32, splits=5)),
    ],
)
def test_with_tensor_cores(tokens: int, config: SkinnyConfig, with_bias: bool, dtype: torch.dtype) -> None:
    x, weight = random(tokens, 160, dtype=dtype), random(32, 160, seed=1, dtype=dtype)
    bias = random(32, seed=2, dtype=dtype) if with_bias else None
    assert_close(skinny(x, weight, bias, config=config), expected(x, weight, bias))


@interpreted
@DTYPES
@pytest.mark.parametrize(
    ("tokens", "config"),
    [
        (1, SkinnyConfig(rows=16, columns=32)),
        (17, SkinnyConfig(rows=32, columns=32)),
        (40, SkinnyConfig(rows=16, columns=32, splits=3)),
    ],
)
def test_the_gate_behind_the_product(tokens: int, config: SkinnyConfig, dtype: torch.dtype) -> None:
    x, weight = random(tokens, 160, dtype=dtype), (random(96, 160, seed=1) / 12).to(dtype)
    gate, up = expected(x, weight).chunk(2, -1)
    y = skinny(x, weight, config=config, gated=True)
    assert y.shape == (tokens, 48)
    assert_close(y, F.silu(gate) * up)


@interpreted
def test_a_split_sum_leaves_its_counters_at_zero_and_repeats() -> None:
    x, weight = random(3, 256, dtype=torch.bfloat16), random(48, 256, seed=1, dtype=torch.bfloat16)
    config = SkinnyConfig(rows=16, columns=32, splits=3)
    first = skinny(x, weight, config=config)
    assert not zero_counters(x.device).any()
    assert torch.equal(skinny(x, weight, config=config), first)


@interpreted
@pytest.mark.parametrize(
    "product", [kernels.linear, launchers.linear, kernels.linear_invariant, launchers.linear_invariant]
)
def test_a_product_in_a_given_tensor(product: Any) -> None:
    x, weight, bias = random(2, 3, 32), random(5, 32, seed=1), random(5, seed=2)
    for given in (None, bias):
        out = torch.full((2, 3, 5), torch.nan)
        assert product(x, weight, given, out=out) is out
        assert torch.equal(out, product(x, weight, given))
    for wrong in (torch.empty(3, 5), torch.empty(2, 3, 5, dtype=torch.float64), torch.empty(2, 3, 10)[..., ::2]):
        with pytest.raises(ValueError, match="out is"):
            product(x, weight, out=wrong)


@interpreted
def test_the_table_decides_by_shape_and_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {(16, 64): ((2, GemvConfig(4, 32)), (20, SkinnyConfig(rows=16, columns=32)))}
    monkeypatch.setattr(launchers, "_table", lambda device: table)
    used = []
    for name in ("gemv", "skinny"):
        run = getattr(launchers, name)
        monkeypatch.setattr(launchers, name, lambda *a, _n=name, _r=run, **k: (used.append(_n), _r(*a, **k))[1])
    weight, bias = random(16, 64, dtype=torch.bfloat16), random(16, seed=1, dtype=torch.bfloat16)
    for tokens, name in [(1, "gemv"), (2, "gemv"), (3, "skinny"), (20, "skinny"), (21, None), (0, None)]:
        x = random(tokens, 64, seed=2, dtype=torch.bfloat16)
        used.clear()
        assert_close(launchers.linear(x, weight, bias), expected(x, weight, bias))
        out = torch.full((tokens, 16), torch.nan, dtype=torch.bfloat16)
        assert launchers.linear(x, weight, bias, out=out) is out
        assert_close(out, expected(x, weight, bias))
        assert used == ([] if name is None else [name, name])
    used.clear()
    x = random(2, 2, 64, seed=3, dtype=torch.bfloat16)
    assert launchers.linear(x, weight).shape == (2, 2, 16)
    assert used == ["skinny"]
    for other in (random(2, 64), random(2, 128, dtype=torch.bfloat16)[:, ::2]):
        launchers.linear(other, weight.to(other.dtype))
    launchers.linear(random(2, 32, dtype=torch.bfloat16), weight[:, :32].contiguous())
    assert used == ["skinny"], "float32, gaps between elements and unknown shapes go to the library"
    for columns, features, expected_use in ((32, 16, ["gemv"]), (40, 16, ["gemv"]), (32, 15, []), (33, 16, [])):
        x, own = random(1, columns, dtype=torch.bfloat16), random(features, columns, seed=4, dtype=torch.bfloat16)
        used.clear()
        assert_close(launchers.linear(x, own), expected(x, own))
        assert used == expected_use, "one token needs no entry, but whole rows of a tile, and aligned ones"


def test_every_configuration_of_the_table_fits_its_weight() -> None:
    for table in launchers.TABLES.values():
        for (n, k), entries in table.items():
            assert [most for most, _ in entries] == sorted({most for most, _ in entries})
            for most, config in entries:
                if config is None or isinstance(config, NarrowConfig):
                    continue
                assert most <= (4 if isinstance(config, GemvConfig) else 64)
                assert n % config.rows == 0
                if isinstance(config, SkinnyConfig):
                    assert k % config.columns == 0
                    assert n // config.rows <= NUM_COUNTERS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_invariant_reference(dtype: torch.dtype) -> None:
    x, weight, bias = random(2, 3, 40, dtype=dtype), random(7, 40, seed=1, dtype=dtype), random(7, seed=2, dtype=dtype)
    y = kernels.linear_invariant(x, weight, bias)
    assert_close(y, expected(x, weight, bias))
    assert torch.equal(kernels.linear_invariant(x[1, 1:2], weight, bias), y[1, 1:2])
    assert kernels.linear_invariant(x[:0], weight).shape == (0, 3, 7)


@interpreted
@pytest.mark.parametrize(("tokens", "n", "k"), [(1, 64, 128), (5, 70, 40), (33, 130, 96), (140, 33, 24)])
def test_invariant_kernel_on_odd_shapes(tokens: int, n: int, k: int) -> None:
    x, weight = random(tokens, k, dtype=torch.bfloat16), (random(n, k, seed=1) / 8).bfloat16()
    bias = random(n, seed=2, dtype=torch.bfloat16)
    assert_close(launchers.linear_invariant(x, weight, bias), expected(x, weight, bias))
    assert_close(launchers.linear_invariant(x, weight), expected(x, weight))


@interpreted
def test_invariant_kernel_takes_any_leading_axes() -> None:
    x, weight = random(2, 8, 32)[:, ::4], random(5, 32, seed=1)
    assert_close(launchers.linear_invariant(x, weight), expected(x, weight))
    assert launchers.linear_invariant(x[:0], weight).shape == (0, 2, 5)


def test_wide_tiles_only_where_they_occupy_the_device() -> None:
    def sizes(dtype: torch.dtype) -> list[int]:
        choices = (linear_invariant.choose_tile(size, 4096, dtype, 132) for size in (1, 16, 17, 64, 65, 256, 8192))
        return [tile.tokens for tile in choices]

    assert sizes(torch.bfloat16) == [16, 16, 32, 64, 128, 128, 256]
    assert sizes(torch.float32) == [32] * 7


def test_kernels_compile_to_what_they_are_meant_to_be(compile_kernels: offline.Compile) -> None:
    for name, case in compile_kernels("compile_linear").items():
        assert case.spilled_bytes == 0, name
        assert case.shared_bytes <= offline.MAX_SHARED_BYTES, name
        if name.startswith("gemv"):
            assert case.wgmma == case.mma == 0, name
            assert case.registers <= 128, name
        elif name == "invariant-float32":
            assert case.wgmma == case.mma == 0, "no rounding to a shorter type"
        else:
            # Equal bits hold among wgmma tiles; mma.sync may sum in another order.
            assert case.wgmma >= 4, name
            assert case.mma == 0, name
            assert case.async_copies >= 20 or name.startswith("exact"), name


def poisoned(tokens: int, n: int) -> None:
    """Leave NaN in the memory that the next output of this size is allocated in."""
    torch.full((tokens, n), torch.nan, dtype=torch.bfloat16, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 16, 17, 33, 64])
def test_few_tokens_on_a_gpu(tokens: int) -> None:
    seed = fresh_seed()
    n, k = 1536, 4096
    x = random(tokens, k, seed=seed, dtype=torch.bfloat16, device="cuda")
    weight = (random(n, k, seed=seed + 1, device="cuda") / 64).bfloat16()
    bias = random(n, seed=seed + 2, dtype=torch.bfloat16, device="cuda")
    configs: list[Any] = [SkinnyConfig(), SkinnyConfig(splits=3), SkinnyConfig(columns=128, stages=3)]
    configs += [GemvConfig(4, 1024), GemvConfig(8, 2048, warps=8)] if tokens <= 4 else []
    for config in configs:
        run: Any = gemv if isinstance(config, GemvConfig) else skinny
        poisoned(tokens, n)
        y = run(x, weight, bias, config=config)
        assert_close(y, expected(x, weight, bias))
        poisoned(tokens, n)
        assert torch.equal(run(x, weight, bias, config=config), y), "two runs differ"


def test_shapes_without_an_entry_have_a_kernel_for_few_tokens() -> None:
    chosen = launchers._by_shape
    assert chosen(1, 4544, 4544) == launchers.ONE_TOKEN
    assert chosen(1, 2048, 576) == launchers.ONE_TOKEN_FEW_FEATURES
    assert chosen(1, 4096, 128256) is None, "a vocabulary"
    assert chosen(16, 8192, 3072) == NarrowConfig(64, 2, 8, splits=2)
    assert chosen(2, 4544, 4672) == NarrowConfig(64, 2, 8)
    assert chosen(16, 3072, 9216) == NarrowConfig(128, 1, 8)
    for case in ((17, 4544, 4544), (16, 2048, 576), (16, 1024, 4544), (16, 4544, 4673)):
        assert chosen(*case) is None
    assert chosen(0, 4544, 4544) is None


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, 16])
@pytest.mark.parametrize(
    ("n", "k"), [(32, 2880), (576, 2048), (4544, 4544), (2880, 4096), (3072, 8192), (9216, 3072), (37888, 3584)]
)
def test_few_tokens_in_any_shape_on_a_gpu(n: int, k: int, tokens: int) -> None:
    seed = fresh_seed()
    x = random(tokens, k, seed=seed, dtype=torch.bfloat16, device="cuda")
    weight = (random(n, k, seed=seed + 1, device="cuda") / 64).bfloat16()
    bias = random(n, seed=seed + 2, dtype=torch.bfloat16, device="cuda")
    for own in (None, bias):
        poisoned(tokens, n)
        y = launchers.linear(x, weight, own)
        assert_close(y, expected(x, weight, own))
        poisoned(tokens, n)
        assert torch.equal(launchers.linear(x, weight, own), y), "two runs differ"


@pytest.mark.parametrize("rows", [2, 4, 8])
def test_the_gate_behind_the_product_of_one_token(rows: int) -> None:
    x, weight = random(1, 300).to(DEVICE), (random(2 * 24, 300, seed=1) / 20).to(DEVICE)
    gate, up = expected(x, weight).chunk(2, -1)
    poison((1, 24), dtype=torch.float32)
    y = gemv(x, weight, config=GemvConfig(rows, 128), gated=True)
    torch.testing.assert_close(y.double(), F.silu(gate) * up, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(14336, 4096), (8192, 3072), (2816, 2048), (18944, 3584)])
def test_one_token_with_its_gate_on_a_gpu(n: int, k: int) -> None:
    x = random(1, k, seed=fresh_seed(), dtype=torch.bfloat16, device="cuda")
    weight = (random(2 * n, k, seed=1, device="cuda") / 64).bfloat16()
    poisoned(1, n)
    y = kernels.linear_silu_mul(x, weight)
    gate, up = expected(x, weight).chunk(2, -1)
    assert_close(y, F.silu(gate) * up)
    torch.testing.assert_close(y, kernels.silu_mul(kernels.linear(x, weight)), atol=1e-2, rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 33, 64])
def test_the_gate_behind_the_product_on_a_gpu(tokens: int) -> None:
    seed = fresh_seed()
    n, k = 768, 4096
    x = random(tokens, k, seed=seed, dtype=torch.bfloat16, device="cuda")
    weight = (random(2 * n, k, seed=seed + 1, device="cuda") / 64).bfloat16()
    gate, up = expected(x, weight).chunk(2, -1)
    for config in (SkinnyConfig(), SkinnyConfig(splits=3), SkinnyConfig(128, 128, warps=8)):
        poisoned(tokens, n)
        y = skinny(x, weight, config=config, gated=True)
        assert_close(y, F.silu(gate) * up)
        poisoned(tokens, n)
        assert torch.equal(skinny(x, weight, config=config, gated=True), y), "two runs differ"
        other = x.clone()
        other[tokens // 2 :] = torch.nan
        assert torch.equal(skinny(other, weight, config=config, gated=True)[: tokens // 2], y[: tokens // 2])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "k", "dtype"),
    [
        (4096, 4096, torch.bfloat16),
        (4096, 14336, torch.bfloat16),
        (1000, 520, torch.bfloat16),
        (77, 200, torch.float16),
        (1000, 520, torch.float32),
    ],
)
def test_rows_have_the_same_bits_in_any_batch(n: int, k: int, dtype: torch.dtype) -> None:
    seed = fresh_seed()
    x = random(2100, k, seed=seed, dtype=dtype, device="cuda")
    weight = (random(n, k, seed=seed + 1, device="cuda") / k**0.5).to(dtype)
    whole = kernels.linear_invariant(x, weight)
    assert_close(whole[:32], expected(x[:32], weight, None))
    for tokens in (*range(1, 20), 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257, 300, 1000):
        first = seed % (2100 - tokens)
        poisoned(tokens, n)
        y = kernels.linear_invariant(x[first : first + tokens], weight)
        assert torch.equal(y, whole[first : first + tokens]), f"{tokens} rows from {first}"


@pytest.mark.gpu
def test_a_graph_repeats_a_split_sum() -> None:
    seed = fresh_seed()
    x = random(4, 4096, seed=seed, dtype=torch.bfloat16, device="cuda")
    weight = random(1024, 4096, seed=seed + 1, dtype=torch.bfloat16, device="cuda")
    config = SkinnyConfig(splits=4)
    wanted = skinny(x, weight, config=config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Launched in a row, so that programs of one kernel start before those of the last one are done.
        results = [skinny(x, weight, config=config) for _ in range(8)]
    for _ in range(3):
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(result, wanted) for result in results)


def assert_exact(tokens: int, n: int, k: int, *, with_bias: bool) -> None:
    x = random(tokens, k, seed=fresh_seed(), dtype=torch.bfloat16).to(DEVICE)
    weight = random(n, k, seed=1).to(DEVICE)
    bias = random(n, seed=2).to(DEVICE) if with_bias else None
    poison((tokens, n), dtype=torch.float32)
    y = linear_exact(x, weight, bias)
    assert y.dtype == torch.float32
    # Nearer than the 8 bits of bfloat16, and the 11 of what tensor cores make of float32, would come.
    torch.testing.assert_close(y.double(), expected(x, weight, bias), atol=4e-6 * k**0.5, rtol=1e-6)
    assert torch.equal(linear_exact(x[None], weight, bias)[0], y)


@interpreted
@pytest.mark.parametrize(
    ("tokens", "n", "k", "with_bias"),
    [(1, 5, 72, True), (17, 70, 300, False), (70, 6, 260, True), (200, 70, 150, False)],
)
def test_a_product_as_exact_as_float32(tokens: int, n: int, k: int, with_bias: bool) -> None:
    assert_exact(tokens, n, k, with_bias=with_bias)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 60, 300, 8000])
@pytest.mark.parametrize(("n", "k"), [(64, 2048), (160, 5120), (8, 4096)])
def test_a_product_as_exact_as_float32_on_gpu(tokens: int, n: int, k: int) -> None:
    assert_exact(tokens, n, k, with_bias=n == 8)


@pytest.mark.gpu
@pytest.mark.parametrize("features", [13, 92553])
def test_rows_of_an_uneven_number_of_results_on_gpu(features: int) -> None:
    x = random(3, 70, 64, seed=fresh_seed(), dtype=torch.bfloat16, device="cuda")
    weight = random(features, 64, seed=1, dtype=torch.bfloat16, device="cuda")
    bias = random(features, seed=2, dtype=torch.bfloat16, device="cuda")
    for own in (None, bias):
        poison((210, features + 7), dtype=torch.bfloat16)
        y = launchers.linear(x, weight, own)
        assert_close(y.flatten(0, 1), expected(x.flatten(0, 1), weight, own))
        out = torch.full_like(y, torch.nan)
        assert launchers.linear(x, weight, own, out=out) is out
        assert torch.equal(out, y)


@interpreted
def test_a_product_with_float32_of_other_tokens() -> None:
    weight = random(6, 40, seed=1)
    for x in (random(2, 40, dtype=torch.float16), random(2, 40), random(0, 40, dtype=torch.bfloat16)):
        assert torch.equal(linear_exact(x, weight), F.linear(x.float(), weight))
