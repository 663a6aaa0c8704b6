"""Products of few tokens whose weights come first: which products take them, and the kernel on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels.triton.counters import NUM_COUNTERS, zero_counters
from asyncllm.kernels.triton.linear import product as linear
from asyncllm.kernels.triton.linear.small import GemvConfig, NarrowConfig, token_tile
from tests.kernels import offline
from tests.kernels.device import DEVICE, assert_a_graph_repeats, fresh_seed, poison, random

OF_TABLES = [
    (shape, config)
    for table in linear.TABLES.values()
    for shape, entries in table.items()
    for _, config in entries
    if isinstance(config, NarrowConfig)
]


class FakeKernel:
    """Takes the place of `narrow`, and remembers how it was called."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        config: NarrowConfig,
        release_first: bool = True,
        out: Tensor | None = None,
    ) -> Tensor:
        self.calls.append(len(x))
        y = F.linear(x, weight, bias)
        return y if out is None else out.copy_(y)


def test_the_table_decides_by_shape_and_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeKernel()
    monkeypatch.setattr("asyncllm.kernels.triton.linear.narrow.narrow", fake)
    config = NarrowConfig(64, 2, 4)
    plain = {(16, 64): ((1, GemvConfig(4, 32)), (3, config))}
    monkeypatch.setattr(linear, "_table", lambda device: plain)
    weight, bias = random(16, 64, seed=1, dtype=torch.bfloat16), random(16, seed=2, dtype=torch.bfloat16)
    for tokens in range(1, 6):
        x = random(tokens, 64, seed=3, dtype=torch.bfloat16)
        fake.calls.clear()
        step = 2e-2 if tokens == 1 else 0.0  # the product without tensor cores sums in another order
        torch.testing.assert_close(linear.linear(x, weight, bias), F.linear(x, weight, bias), atol=step, rtol=step)
        out = torch.full((tokens, 16), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        assert linear.linear(x, weight, out=out) is out
        assert not out.isnan().any()
        assert fake.calls == ([tokens, tokens] if 2 <= tokens <= 3 else [])
    fake.calls.clear()
    unaligned = random(2 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 64)
    assert linear.linear(unaligned, weight).shape == (2, 16)
    assert not fake.calls, "what TMA cannot read goes to the library"


def test_every_configuration_fits_its_weight() -> None:
    assert OF_TABLES
    for (n, k), config in OF_TABLES:
        assert config.rows >= 64
        assert n % config.rows == k % (config.parts * 64) == 0
        assert n // config.rows <= NUM_COUNTERS


def test_kernels_compile_to_what_they_are_meant_to_be(compile_kernels: offline.Compile) -> None:
    for name, case in compile_kernels("compile_narrow").items():
        assert case.spilled_bytes == 0, name
        assert case.shared_bytes <= offline.MAX_SHARED_BYTES, name
        assert case.registers <= 128, name
        # Four products of 16 input features for each part, and each 64 rows of a warpgroup.
        assert case.wgmma in (8, 16), name
        assert case.mma == case.async_copies == 0, name


# The kernel itself, which no interpreter runs.

N, K = 1416, 1000
"""Neither tiles nor stages divide these evenly."""

CASES = pytest.mark.parametrize(
    "config",
    [
        NarrowConfig(64, 2, 6, splits=2),
        NarrowConfig(64, 1, 4, splits=5),
        NarrowConfig(128, 2, 4),
        NarrowConfig(256, 1, 3),
    ],
    ids=lambda config: "-".join(map(str, vars(config).values())),
)


def inputs(tokens: int, n: int = N, k: int = K, *, seed: int, dtype: Any = torch.bfloat16) -> Any:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(tokens, k, device=DEVICE, generator=generator)
    weight = torch.randn(n, k, device=DEVICE, generator=generator) / k**0.5
    return x.to(dtype), weight.to(dtype)


def launched(x: Tensor, weight: Tensor, config: NarrowConfig, bias: Tensor | None = None) -> Tensor:
    """With NaN in the memory that results and partial sums are allocated in; counters are left at zero."""
    from asyncllm.kernels.triton.linear.narrow import narrow

    n = weight.shape[0]
    poison((len(x), n), dtype=x.dtype)
    poison((-(-n // config.rows) * config.splits * config.rows * token_tile(len(x)),), dtype=torch.float32)
    y = narrow(x, weight, bias, config=config)
    assert not zero_counters(x.device).any()
    return y


def wanted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = x.double() @ weight.double().t()
    return y if bias is None else y + bias.double()


@pytest.mark.gpu
@CASES
@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 32, 33, 64])
def test_results_on_a_gpu(tokens: int, config: NarrowConfig) -> None:
    seed = fresh_seed() % 2**31
    for dtype in (torch.bfloat16, torch.float16):
        x, weight = inputs(tokens, seed=seed, dtype=dtype)
        bias = random(N, seed=seed, dtype=dtype)
        y = launched(x, weight, config, bias)
        torch.testing.assert_close(y.double(), wanted(x, weight, bias), atol=2e-2, rtol=2e-2)
        assert torch.equal(launched(x, weight, config, bias), y), "two runs differ"


@pytest.mark.gpu
@pytest.mark.parametrize("k", [4096, 14336])
@pytest.mark.parametrize("tokens", [2, 7, 16, 17, 32, 50, 64])
def test_the_measured_shapes_on_a_gpu(tokens: int, k: int) -> None:
    """Through the op, in the way that the device's table takes."""
    x, weight = inputs(tokens, 4096, k, seed=fresh_seed() % 2**31)
    poison((tokens, 4096), dtype=torch.bfloat16)
    y = kernels.linear(x, weight)
    torch.testing.assert_close(y.double(), wanted(x, weight), atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@CASES
def test_rows_do_not_see_each_other_on_a_gpu(config: NarrowConfig) -> None:
    x, weight = inputs(20, seed=fresh_seed() % 2**31)
    alone = launched(x, weight, config)
    others = x.clone()
    others[5] = torch.nan
    others[6:] *= 3
    found = launched(others, weight, config)
    assert found[5].isnan().all()
    assert torch.equal(found[:5], alone[:5])


@pytest.mark.gpu
@CASES
def test_nothing_is_written_beside_the_result_on_a_gpu(config: NarrowConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = inputs(13, seed=0)
    plain = launched(x, weight, config)
    surrounded = torch.full((39, N), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    empty = torch.empty

    def inside(shape: Any, **options: Any) -> Tensor:
        return surrounded[13:26] if shape == (13, N) else empty(shape, **options)

    monkeypatch.setattr(torch, "empty", inside)
    assert torch.equal(launched(x, weight, config), plain)
    assert torch.equal(surrounded[13:26], plain)
    assert surrounded[:13].isnan().all()
    assert surrounded[26:].isnan().all()


@pytest.mark.gpu
@CASES
def test_a_graph_on_a_gpu(config: NarrowConfig) -> None:
    """Launched in a row, each on what the one before has stored: the weights come early, the tokens must not."""
    from asyncllm.kernels.triton.linear.narrow import narrow

    x, weight = inputs(16, n=512, k=512, seed=fresh_seed() % 2**31)
    assert_a_graph_repeats(x, lambda x: narrow(x, weight, config=config), lambda x: launched(x, weight, config))
