"""The gate inside the product: which way a product takes, the protocol of its kernel, and the kernel on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm import kernels
from asyncllm.agent.warm_up import mlp_sizes
from asyncllm.kernels.triton import counters
from asyncllm.kernels.triton.counters import NUM_COUNTERS, zero_counters
from asyncllm.kernels.triton.device import is_hopper, table_name
from asyncllm.kernels.triton.linear import gated as linear_gated
from asyncllm.kernels.triton.linear.gated import TABLES, GatedConfig
from asyncllm.kernels.triton.linear.hopper import CONSUMER_TOKENS, gated_product
from asyncllm.kernels.triton.linear.small import SkinnyConfig
from tests.kernels import offline
from tests.kernels.device import DEVICE, assert_a_graph_repeats, fresh_seed, poison, random
from tests.kernels.ring_model import Deadlock, Launch, run

H200 = TABLES["NVIDIA H200"]
TILES, SHARES, WIDE_TILES = GatedConfig(), GatedConfig(shares=True), GatedConfig(192)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_reference_rounds_as_product_and_gate_do(dtype: torch.dtype) -> None:
    x, weight = random(2, 3, 40, dtype=dtype).cpu(), (random(14, 40, seed=1) / 6).to(dtype).cpu()
    y = kernels.linear_silu_mul(x, weight)
    assert y.shape == (2, 3, 7)
    assert torch.equal(y, kernels.silu_mul(kernels.linear(x, weight)))
    gate, up = (x.double() @ weight.double().t()).chunk(2, -1)
    step = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(y.double(), F.silu(gate) * up, atol=step, rtol=step)
    assert kernels.linear_silu_mul(x[:0], weight).shape == (0, 3, 7)


class FakeKernel:
    """Takes the place of `gated_product`, and remembers how it was called."""

    def __init__(self) -> None:
        self.configs: list[GatedConfig] = []

    def __call__(self, x: Tensor, weight: Tensor, tokens: int, *, shares: bool) -> Tensor:
        self.configs.append(GatedConfig(tokens, shares))
        return kernels.linear_silu_mul.reference(x, weight)  # type: ignore[attr-defined,no-any-return]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    fake = FakeKernel()
    monkeypatch.setattr("asyncllm.kernels.triton.linear.hopper.gated_product", fake)
    return fake


def test_the_table_decides_by_shape_and_number_of_tokens(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {(16, 64): ((2, None), (4, TILES), (5, None), (7, SHARES), (9, WIDE_TILES))}
    monkeypatch.setattr(linear_gated, "_table", lambda device: table)
    weight = random(16, 64, seed=1, dtype=torch.bfloat16)
    expected = [None, None, None, TILES, TILES, None, SHARES, SHARES, WIDE_TILES, WIDE_TILES, None]
    for tokens, config in enumerate(expected):
        kernel.configs.clear()
        x = random(tokens, 64, seed=2, dtype=torch.bfloat16)
        y = linear_gated.linear_silu_mul(x, weight)
        torch.testing.assert_close(y, kernels.silu_mul(kernels.linear(x, weight)), atol=2e-1, rtol=2e-2)
        assert kernel.configs == ([] if config is None else [config])
    kernel.configs.clear()
    assert linear_gated.linear_silu_mul(random(2, 2, 64, dtype=torch.bfloat16), weight).shape == (2, 2, 8)
    assert kernel.configs == [TILES]
    kernel.configs.clear()
    unaligned = random(3 * 64 + 1, dtype=torch.bfloat16)[1:].view(3, 64)
    for x, other in (
        (random(3, 64), weight.float()),
        (random(3, 64).half(), weight.half()),
        (unaligned, weight),
        (random(3, 32, dtype=torch.bfloat16), weight[:, :32].contiguous()),
        (random(3, 64, dtype=torch.bfloat16), random(64, 16, dtype=torch.bfloat16).t()),
    ):
        assert linear_gated.linear_silu_mul(x, other).shape == (3, 8)
    assert not kernel.configs, "other types, shapes, gaps and odd addresses go to the library"


def test_the_name_of_the_device_finds_its_table(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str, capability: tuple[int, int], processors: int) -> Any:
        for each in (linear_gated._table, table_name, is_hopper):
            each.cache_clear()
        properties = SimpleNamespace(multi_processor_count=processors)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return linear_gated._table(torch.device("cuda", 0))

    try:
        assert found("NVIDIA H200", (9, 0), 132) == found("NVIDIA H100 80GB HBM3", (9, 0), 132) == H200
        assert found("NVIDIA H100 PCIe", (9, 0), 114) == found("NVIDIA A100-SXM4-80GB", (8, 0), 108) == {}
        assert linear_gated._table(torch.device("cpu")) == {}
    finally:
        for each in (linear_gated._table, table_name, is_hopper):
            each.cache_clear()


def test_few_tokens_have_a_kernel_without_a_producer(kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {(32, 64): ((1, None), (3, SkinnyConfig(rows=16, columns=32)), (4, TILES))}
    monkeypatch.setattr(linear_gated, "_table", lambda device: table)
    used = []
    run = linear_gated.skinny
    monkeypatch.setattr(linear_gated, "skinny", lambda x, *a, **k: (used.append(len(x)), run(x, *a, **k))[1])
    weight = random(32, 64, seed=1, dtype=torch.bfloat16)
    for tokens in range(1, 5):
        x = random(tokens, 64, seed=2, dtype=torch.bfloat16)
        y = linear_gated.linear_silu_mul(x, weight)
        torch.testing.assert_close(y, kernels.silu_mul(kernels.linear(x, weight)), atol=2e-1, rtol=2e-2)
    assert used == [2, 3]
    assert kernel.configs == [TILES]


def test_every_configuration_fits_its_weight() -> None:
    for table in TABLES.values():
        for (n, k), entries in table.items():
            assert [most for most, _ in entries] == sorted({most for most, _ in entries})
            assert n % 16 == k % 8 == 0
            for most, config in entries:
                if isinstance(config, SkinnyConfig):
                    assert most <= 64
                    assert n % config.rows == k % config.columns == 0
                    assert n // config.rows <= NUM_COUNTERS
                elif isinstance(config, GatedConfig):
                    assert config.tokens in (128, 192)
                    assert not config.shares or -(-most // config.tokens) <= 132
            assert NUM_COUNTERS >= 3 * 132


@pytest.mark.parametrize("max_tokens", [1, 64, 100, 130, 200, 700, 1500, 2304, 4200, 8448, 20000])
def test_warming_up_takes_every_entry_that_a_step_may_take(max_tokens: int) -> None:
    entries = H200[28672, 4096]

    def taken(sizes: Any) -> set[linear_gated.Config | None]:
        found = set()
        for size in sizes:
            found.add(next((config for most, config in entries if size <= most), None))
        return found

    assert taken(mlp_sizes(max_tokens)) >= taken(range(1, max_tokens + 1)) - {None}
    assert mlp_sizes(max_tokens)[-1] == max_tokens


@pytest.mark.parametrize("consumers", [2, 3])
@pytest.mark.parametrize(
    ("token_tiles", "column_tiles", "steps", "blocks"),
    [(1, 1, 1, 1), (1, 5, 4, 3), (3, 7, 5, 8), (2, 3, 1, 6), (9, 2, 3, 4)],
)
def test_whole_tiles_are_summed_once_in_order(
    token_tiles: int, column_tiles: int, steps: int, blocks: int, consumers: int
) -> None:
    launch = Launch(token_tiles, column_tiles, steps, blocks, shares=False, consumers=consumers)
    for seed in range(4):
        _check(launch, seed, resident=blocks)


@pytest.mark.parametrize(
    ("token_tiles", "column_tiles", "steps", "shares"),
    [(1, 1, 6, 4), (1, 5, 4, 3), (2, 7, 5, 4), (3, 2, 8, 11), (2, 3, 4, 3), (1, 3, 2, 6)],
)
def test_shares_are_summed_once_in_order_however_many_blocks_run(
    token_tiles: int, column_tiles: int, steps: int, shares: int
) -> None:
    launch = Launch(token_tiles, column_tiles, steps, shares * token_tiles, shares=True)
    for seed in range(4):
        for resident in (1, 2, launch.blocks):
            _check(launch, seed, resident)


def _check(launch: Launch, seed: int, resident: int) -> None:
    device = run(launch, seed, resident)
    assert len(device.results) == launch.token_tiles * launch.column_tiles * launch.consumers
    assert all(steps == list(range(launch.steps)) for steps in device.results.values())
    assert not device.partial
    assert not any(device.flags.values())


@pytest.mark.parametrize(("broken", "shares"), [("phase", False), ("early", False), ("order", True), ("flag", True)])
def test_the_model_finds_a_broken_protocol(broken: str, shares: bool) -> None:
    launch = Launch(1, 2, 12, 8 if shares else 1, shares=shares, broken=broken)
    found = 0
    for seed in range(20):
        try:
            _check(launch, seed, launch.blocks)
        except (AssertionError, Deadlock):
            found += 1
    assert found


def test_kernels_compile_to_what_they_are_meant_to_be(compile_kernels: offline.Compile) -> None:
    compiled = compile_kernels("compile_gated")
    assert len(compiled) == 15
    for name, case in compiled.items():
        # Products of codes spill scales and a bias, behind their sums.
        of_codes = 96 if name.endswith("plain") else 16
        assert case.spilled_bytes <= (of_codes if name.startswith(("fp8", "i8")) else 0), name
        assert case.shared_bytes <= offline.MAX_SHARED_BYTES, name
        # Four products of 16 input features in the first step and in the loop, of each consumer: 64 x 256 for each of
        # two, twice 64 x 128 for each of three, and of integers.
        assert case.wgmma == (48 if name == "tiles-192" else 32 if name.startswith("i8") else 16), name
        assert case.mma == case.async_copies == 0, name


def test_streams_have_counters_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "_by_stream", {})
    monkeypatch.setattr(counters, "_spare", {})
    device = torch.device("cpu")
    first = zero_counters(device)
    assert zero_counters(device) is first
    assert first.shape == (NUM_COUNTERS,)
    assert not first.any()
    seen = {first.data_ptr()} | {counters._take(device).data_ptr() for _ in range(40)}
    assert len(seen) == 41


# The kernel itself, which no interpreter runs.

N, K = 1416, 1000
"""Neither tiles of 128 results nor steps of 64 features divide these evenly."""
ODD = [65, 127, 128, 129, 255, 256, 257, 511, 1000, 1024, 1025, 4095, 4096, 8191]
CONFIGS = pytest.mark.parametrize(
    "config", [TILES, SHARES, WIDE_TILES], ids=lambda config: f"{'shares' if config.shares else 'tiles'}{config.tokens}"
)


def inputs(tokens: int, n: int = N, k: int = K, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(tokens, k, device=DEVICE, generator=generator)
    weight = torch.randn(2 * n, k, device=DEVICE, generator=generator) / k**0.5
    return x.bfloat16(), weight.bfloat16()


def launched(x: Tensor, weight: Tensor, config: GatedConfig) -> Tensor:
    """With NaN in the memory that results and partial sums are allocated in; counters are left at zero."""
    poison((len(x), weight.shape[0] // 2), dtype=torch.bfloat16)
    if config.shares:
        poison((132 * 2 * 2 * CONSUMER_TOKENS * 128,), dtype=torch.float32)
    y = gated_product(x, weight, config.tokens, shares=config.shares)
    assert not zero_counters(x.device).any()
    return y


def assert_right(y: Tensor, x: Tensor, weight: Tensor) -> None:
    gate, up = (x.float() @ weight.float().t()).chunk(2, -1)
    torch.testing.assert_close(y.float(), F.silu(gate) * up, atol=2e-2, rtol=2e-2)


@pytest.fixture
def exact() -> Any:
    """References in full float32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.gpu
@pytest.mark.usefixtures("exact")
@CONFIGS
@pytest.mark.parametrize("tokens", [1, *ODD])
def test_results_on_a_gpu(tokens: int, config: GatedConfig) -> None:
    x, weight = inputs(tokens, seed=fresh_seed() % 2**31)
    y = launched(x, weight, config)
    assert_right(y, x, weight)
    assert torch.equal(launched(x, weight, config), y), "two runs differ"


@pytest.mark.gpu
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("tokens", [2, 17, 64, *ODD])
def test_the_measured_shape_on_a_gpu(tokens: int) -> None:
    """Through the op, in the way that the device's table takes."""
    x, weight = inputs(tokens, 14336, 4096, seed=fresh_seed() % 2**31)
    poison((tokens, 14336), dtype=torch.bfloat16)
    y = kernels.linear_silu_mul(x, weight)
    assert_right(y, x, weight)
    assert torch.equal(kernels.linear_silu_mul(x, weight), y)


@pytest.mark.gpu
@CONFIGS
def test_rows_do_not_see_each_other_on_a_gpu(config: GatedConfig) -> None:
    x, weight = inputs(300, seed=fresh_seed() % 2**31)
    alone = launched(x, weight, config)
    others = x.clone()
    others[:137] = torch.randn_like(others[:137])
    others[138:] = 7.0
    assert torch.equal(launched(others, weight, config)[137], alone[137])
    others = x.clone()
    others[200] = torch.nan
    spoiled = launched(others, weight, config)
    assert spoiled[200].isnan().all()
    spoiled[200] = alone[200]
    assert torch.equal(spoiled, alone)


@pytest.mark.gpu
@CONFIGS
def test_nothing_is_written_beside_the_result_on_a_gpu(config: GatedConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = inputs(200)
    plain = launched(x, weight, config)
    surrounded = torch.full((400, N), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    empty = torch.empty

    def inside(shape: Any, **options: Any) -> Tensor:
        return surrounded[100:300] if shape == (200, N) else empty(shape, **options)

    monkeypatch.setattr(torch, "empty", inside)
    assert torch.equal(gated_product(x, weight, config.tokens, shares=config.shares), plain)
    assert torch.equal(surrounded[100:300], plain)
    assert surrounded[:100].isnan().all()
    assert surrounded[300:].isnan().all()


@pytest.mark.gpu
@CONFIGS
def test_a_graph_on_a_gpu(config: GatedConfig) -> None:
    """Launched in a row, each on what the one before has stored: the weights come early, the tokens must not."""
    x, weight = inputs(256, n=512, k=512, seed=fresh_seed() % 2**31)
    weight *= 1.3  # so that results are about as large as x
    assert_a_graph_repeats(
        x,
        lambda x: gated_product(x, weight, config.tokens, shares=config.shares),
        lambda x: launched(x, weight, config),
    )


@pytest.mark.gpu
@CONFIGS
def test_two_streams_at_once_on_a_gpu(config: GatedConfig) -> None:
    cases = [inputs(256, n=2048, k=2048, seed=seed) for seed in range(2)]
    wanted = [launched(x, weight, config) for x, weight in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[], []]
    for _ in range(30):
        for (x, weight), stream, kept in zip(cases, streams, results, strict=True):
            with torch.cuda.stream(stream):
                kept.append(gated_product(x, weight, config.tokens, shares=config.shares))
    torch.cuda.synchronize()
    for kept, right in zip(results, wanted, strict=True):
        assert all(torch.equal(result, right) for result in kept)
    used = set()
    for stream in streams:
        with torch.cuda.stream(stream):
            used.add(zero_counters(cases[0][0].device).data_ptr())
    assert len(used) == 2


@pytest.mark.gpu
def test_counters_are_not_made_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "_by_stream", {})
    monkeypatch.setattr(counters, "_spare", {})
    device = torch.device("cuda", torch.cuda.current_device())
    with pytest.raises(RuntimeError, match="no counters for this stream"):
        _capture(lambda: zero_counters(device))
    made = zero_counters(device)
    found: list[Tensor] = []
    _capture(lambda: found.append(zero_counters(device)))
    assert found[0].data_ptr() != made.data_ptr()


def _capture(call: Callable[[], object]) -> None:
    number = torch.zeros(1, device=DEVICE)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        number.add_(1)
        call()
