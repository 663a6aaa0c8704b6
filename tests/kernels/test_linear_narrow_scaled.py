"""Products of few rows in 8 bits whose weights come first: what they compile to, and the kernel on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from asyncllm.kernels import RoundedRows, Rounding, ScaledWeight
from asyncllm.kernels.triton.counters import zero_counters
from asyncllm.kernels.triton.linear.scaled import LIBRARY, TABLES
from asyncllm.kernels.triton.linear.small import NarrowConfig
from tests.kernels import offline
from tests.kernels.device import DEVICE, assert_a_graph_repeats, fresh_seed, poison, random
from tests.kernels.test_scaled import FP8, INT8, assert_close, expected, scaled_weight

N, K = 1416, 1008
"""Neither tiles nor stages divide these evenly."""

CASES = pytest.mark.parametrize(
    "config",
    [
        NarrowConfig(64, 2, 6, splits=2),
        NarrowConfig(64, 1, 4, splits=5),
        NarrowConfig(128, 1, 3),
        NarrowConfig(256, 1, 3),
    ],
    ids=lambda config: "-".join(map(str, vars(config).values())),
)


def rows_of(tokens: int, k: int, dtype: torch.dtype, seed: int) -> RoundedRows:
    from asyncllm.kernels.triton.rounded import round_rows

    return round_rows(random(tokens, k, seed=seed, dtype=torch.bfloat16), Rounding(dtype))


def launched(rows: RoundedRows, weight: ScaledWeight, config: NarrowConfig, bias: Tensor | None = None) -> Tensor:
    """With NaN in the memory that the result is allocated in; counters are left at zero."""
    poison((len(rows.codes), len(weight.codes)), dtype=torch.bfloat16)
    y = product(rows, weight, config, bias)
    assert not zero_counters(y.device).any()
    return y


def product(rows: RoundedRows, weight: ScaledWeight, config: NarrowConfig, bias: Tensor | None = None) -> Tensor:
    from asyncllm.kernels.triton.linear.narrow_scaled import narrow_scaled

    out = torch.empty(len(rows.codes), len(weight.codes), dtype=torch.bfloat16, device=DEVICE)
    narrow_scaled(rows.codes, rows.scales, weight, bias, config, out)
    return out


def test_kernels_compile_to_what_they_are_meant_to_be(compile_kernels: offline.Compile) -> None:
    for name, case in compile_kernels("compile_narrow_scaled").items():
        assert case.spilled_bytes == 0, name
        assert case.shared_bytes <= offline.MAX_SHARED_BYTES, name
        # Four products of 32 input features for each part, and each 64 rows of a warpgroup.
        assert case.wgmma in (4, 8), name
        assert case.mma == case.async_copies == 0, name


def test_every_configuration_fits_its_weight() -> None:
    for table in TABLES.values():
        for (n, k), entries in table.items():
            assert [most for most, _ in entries] == sorted({most for most, _ in entries})
            for _, config in entries:
                if isinstance(config, NarrowConfig):
                    assert n % config.rows == k % (config.parts * 128) == 0
                else:
                    assert config == LIBRARY or k % 128 == 0


@pytest.mark.gpu
@CASES
@pytest.mark.parametrize("dtype", [FP8, INT8])
@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 65, 128, 130, 300])
def test_results_on_a_gpu(tokens: int, dtype: torch.dtype, config: NarrowConfig) -> None:
    if config.rows == 256 and tokens > 128:
        pytest.skip("two warpgroups have no registers for so many sums")
    if config.parts * config.stages == 12 and tokens > 64:
        pytest.skip("shared memory has no room for so many stages of so many tokens")
    seed = fresh_seed() % 2**31
    rows, weight = rows_of(tokens, K, dtype, seed), scaled_weight(N, K, dtype, grouped=False)
    bias = random(N, seed=seed, dtype=torch.bfloat16)
    y = launched(rows, weight, config, bias)
    wanted, magnitude = expected(rows.codes, rows.scales, weight)
    assert_close(y, wanted + bias.cpu().double(), magnitude)
    assert torch.equal(launched(rows, weight, config, bias), y), "two runs differ"


@pytest.mark.gpu
@CASES
def test_rows_do_not_see_each_other_on_a_gpu(config: NarrowConfig) -> None:
    rows, weight = rows_of(20, K, FP8, fresh_seed() % 2**31), scaled_weight(N, K, FP8, grouped=False)
    alone = launched(rows, weight, config)
    rows.scales[5] = torch.nan
    rows.codes[6:].view(torch.uint8).zero_()
    found = launched(rows, weight, config)
    assert found[5].isnan().all()
    assert torch.equal(found[:5], alone[:5])


@pytest.mark.gpu
def test_long_sums_of_one_sign_keep_their_digits() -> None:
    weight = ScaledWeight(torch.full((64, 14336), 1.125).to(FP8).to(DEVICE), torch.ones(1, 64, device=DEVICE), None)
    codes = (torch.rand(4, 14336, generator=torch.Generator().manual_seed(0)) + 1).to(FP8).to(DEVICE)
    y = launched(RoundedRows(codes, torch.ones(4, 1, device=DEVICE), torch.bfloat16), weight, NarrowConfig(64, 2, 6))
    # Half a unit of bfloat16's last place is up to 3.9e-3; 448 sums kept in 14 bits would be off by 2e-2.
    torch.testing.assert_close(y[:, 0].double(), codes.double().sum(1) * 1.125, rtol=6e-3, atol=0)


@pytest.mark.gpu
@CASES
def test_a_graph_on_a_gpu(config: NarrowConfig) -> None:
    """Launched in a row, each on what the one before has stored: the weights come early, the tokens must not."""
    from asyncllm.kernels.triton.rounded import round_rows

    weight = scaled_weight(512, 512, FP8, grouped=False)

    def rounded_product(x: Tensor) -> Tensor:
        return product(round_rows(x, weight.rounding), weight, config)

    assert_a_graph_repeats(random(16, 512, dtype=torch.bfloat16), rounded_product, rounded_product)
