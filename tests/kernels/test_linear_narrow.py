"""Products of few tokens whose weights come first: which products take them, and the kernel on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels.triton import linear, linear_gated
from asyncllm.kernels.triton.counters import NUM_COUNTERS, zero_counters
from asyncllm.kernels.triton.linear_gated import GatedConfig
from asyncllm.kernels.triton.linear_small import GemvConfig, NarrowConfig, token_tile
from tests.kernels import offline
from tests.kernels.device import DEVICE, assert_a_graph_repeats, fresh_seed, poison, random

OF_TABLES = [
    (shape, config, gated)
    for gated, tables in ((False, linear.TABLES), (True, linear_gated.TABLES))
    for table in tables.values()
    for shape, entries in table.items()
    for _, config in entries
    if isinstance(config, NarrowConfig)
]


class FakeKernel:
    """Takes the place of `narrow`, and remembers how it was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, bool]] = []

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, config: NarrowConfig, gated: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        self.calls.append((len(x), gated))
        if gated:
            return kernels.silu_mul(kernels.linear(x, weight))
        y = F.linear(x, weight, bias)
        return y if out is None else out.copy_(y)


def test_the_tables_decide_by_shape_and_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeKernel()
    monkeypatch.setattr("asyncllm.kernels.triton.linear_narrow.narrow", fake)
    config = NarrowConfig(64, 2, 4)
    plain = {(16, 64): ((1, GemvConfig(4, 32)), (3, config))}
    monkeypatch.setattr(linear, "_table", lambda device: plain)
    monkeypatch.setattr(linear_gated, "_table", lambda device: {(16, 64): ((1, None), (3, config), (4, GatedConfig()))})
    monkeypatch.setattr(
        "asyncllm.kernels.triton.linear_hopper.gated_product",
        lambda x, weight, tokens, *, shares: kernels.silu_mul(kernels.linear(x, weight)),
    )
    weight, bias = random(16, 64, seed=1, dtype=torch.bfloat16), random(16, seed=2, dtype=torch.bfloat16)
    for tokens in range(1, 6):
        x = random(tokens, 64, seed=3, dtype=torch.bfloat16)
        fake.calls.clear()
        step = 2e-2 if tokens == 1 else 0.0  # the product without tensor cores sums in another order
        torch.testing.assert_close(linear.linear(x, weight, bias), F.linear(x, weight, bias), atol=step, rtol=step)
        out = torch.full((tokens, 16), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        assert linear.linear(x, weight, out=out) is out
        assert not out.isnan().any()
        assert linear_gated.linear_silu_mul(x, weight).shape == (tokens, 8)
        assert fake.calls == ([(tokens, False), (tokens, False), (tokens, True)] if 2 <= tokens <= 3 else [])
    fake.calls.clear()
    unaligned = random(2 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 64)
    assert linear.linear(unaligned, weight).shape == (2, 16)
    assert linear_gated.linear_silu_mul(unaligned, weight).shape == (2, 8)
    assert not fake.calls, "what TMA cannot read goes to the library"


def test_every_configuration_fits_its_weight() -> None:
    assert OF_TABLES
    for (n, k), config, gated in OF_TABLES:
        results = config.rows // 2 if gated else config.rows
        assert results >= 64
        assert n % results == k % (config.parts * 64) == 0
        assert n // results <= NUM_COUNTERS


def test_kernels_compile_to_what_they_are_meant_to_be() -> None:
    for name, case in offline.compiled("compile_narrow").items():
        assert case.spilled_bytes == 0, name
        assert case.shared_bytes <= offline.MAX_SHARED_BYTES, name
        assert case.registers <= 128, name
        # Four products of 16 input features for each part, and each 64 rows of a warpgroup.
        assert case.wgmma in (8, 16), name
        assert case.mma == case.async_copies == 0, name


# The kernel itself, which no interpreter runs.

N, K = 1416, 1000
"""Neither tiles nor slots divide these evenly."""

PLAIN = [
    NarrowConfig(64, 2, 6, splits=2),
    NarrowConfig(64, 1, 4, splits=5),
    NarrowConfig(128, 2, 4),
    NarrowConfig(256, 1, 3),
]
GATED = [NarrowConfig(256, 2, 2), NarrowConfig(128, 1, 5), NarrowConfig(128, 2, 3, splits=3)]
CASES = pytest.mark.parametrize(
    ("config", "gated"),
    [(config, False) for config in PLAIN] + [(config, True) for config in GATED],
    ids=lambda value: "-".join(map(str, vars(value).values())) if isinstance(value, NarrowConfig) else None,
)


def inputs(tokens: int, n: int = N, k: int = K, *, gated: bool, seed: int, dtype: Any = torch.bfloat16) -> Any:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(tokens, k, device=DEVICE, generator=generator)
    weight = torch.randn(2 * n if gated else n, k, device=DEVICE, generator=generator) / k**0.5
    return x.to(dtype), weight.to(dtype)


def launched(x: Tensor, weight: Tensor, config: NarrowConfig, *, gated: bool, bias: Tensor | None = None) -> Tensor:
    """With NaN in the memory that results and partial sums are allocated in; counters are left at zero."""
    from asyncllm.kernels.triton.linear_narrow import narrow

    n = weight.shape[0] // 2 if gated else weight.shape[0]
    poison((len(x), n), dtype=x.dtype)
    tiles = -(-n // (config.rows // 2 if gated else config.rows))
    poison((tiles * config.splits * config.rows * token_tile(len(x)),), dtype=torch.float32)
    y = narrow(x, weight, bias, config=config, gated=gated)
    assert not zero_counters(x.device).any()
    return y


def wanted(x: Tensor, weight: Tensor, *, gated: bool, bias: Tensor | None = None) -> Tensor:
    y = x.double() @ weight.double().t()
    if bias is not None:
        y += bias.double()
    if gated:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y


@pytest.mark.gpu
@CASES
@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 32, 33, 64])
def test_results_on_a_gpu(tokens: int, config: NarrowConfig, gated: bool) -> None:
    seed = fresh_seed() % 2**31
    for dtype in (torch.bfloat16, torch.float16):
        x, weight = inputs(tokens, gated=gated, seed=seed, dtype=dtype)
        bias = None if gated else random(N, seed=seed, dtype=dtype)
        y = launched(x, weight, config, gated=gated, bias=bias)
        torch.testing.assert_close(y.double(), wanted(x, weight, gated=gated, bias=bias), atol=2e-2, rtol=2e-2)
        assert torch.equal(launched(x, weight, config, gated=gated, bias=bias), y), "two runs differ"


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 7, 16, 17, 32])
def test_the_measured_shapes_on_a_gpu(tokens: int) -> None:
    """Through the ops, in the way that the device's tables take."""
    seed = fresh_seed() % 2**31
    x, weight = inputs(tokens, 14336, 4096, gated=True, seed=seed)
    poison((tokens, 14336), dtype=torch.bfloat16)
    y = kernels.linear_silu_mul(x, weight)
    torch.testing.assert_close(y.double(), wanted(x, weight, gated=True), atol=2e-2, rtol=2e-2)
    x, weight = inputs(tokens, 4096, 14336, gated=False, seed=seed)
    poison((tokens, 4096), dtype=torch.bfloat16)
    y = kernels.linear(x, weight)
    torch.testing.assert_close(y.double(), wanted(x, weight, gated=False), atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@CASES
def test_rows_do_not_see_each_other_on_a_gpu(config: NarrowConfig, gated: bool) -> None:
    x, weight = inputs(20, gated=gated, seed=fresh_seed() % 2**31)
    alone = launched(x, weight, config, gated=gated)
    others = x.clone()
    others[5] = torch.nan
    others[6:] *= 3
    found = launched(others, weight, config, gated=gated)
    assert found[5].isnan().all()
    assert torch.equal(found[:5], alone[:5])


@pytest.mark.gpu
@CASES
def test_nothing_is_written_beside_the_result_on_a_gpu(
    config: NarrowConfig, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = inputs(13, gated=gated, seed=0)
    plain = launched(x, weight, config, gated=gated)
    surrounded = torch.full((39, N), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    empty = torch.empty

    def inside(shape: Any, **options: Any) -> Tensor:
        return surrounded[13:26] if shape == (13, N) else empty(shape, **options)

    monkeypatch.setattr(torch, "empty", inside)
    assert torch.equal(launched(x, weight, config, gated=gated), plain)
    assert torch.equal(surrounded[13:26], plain)
    assert surrounded[:13].isnan().all()
    assert surrounded[26:].isnan().all()


@pytest.mark.gpu
@CASES
def test_a_graph_on_a_gpu(config: NarrowConfig, gated: bool) -> None:
    """Launched in a row, each on what the one before has stored: the weights come early, the tokens must not."""
    from asyncllm.kernels.triton.linear_narrow import narrow

    x, weight = inputs(16, n=512, k=512, gated=gated, seed=fresh_seed() % 2**31)
    weight *= 1.3  # so that results are about as large as x
    assert_a_graph_repeats(
        x,
        lambda x: narrow(x, weight, config=config, gated=gated),
        lambda x: launched(x, weight, config, gated=gated),
    )
