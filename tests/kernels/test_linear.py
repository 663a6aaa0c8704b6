"""Products with a weight: the Triton kernels against float64, what they compile to, and batch invariance."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels.triton import linear as launchers
from asyncllm.kernels.triton import linear_invariant, linear_small
from asyncllm.kernels.triton.linear_small import GemvConfig, RmsNorm, SkinnyConfig, gemv, skinny
from tests.kernels import offline

FORMS = ["plain", "bias", "residual", "norm", "norm-float32", "gated", "norm-gated-residual"]
EPS = 1e-5


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)


def options(
    form: str, tokens: int, n: int, k: int, dtype: torch.dtype, seed: int, device: str = "cpu"
) -> dict[str, Any]:
    """Keyword arguments of `gemv` and `skinny`; n is the number of outputs."""
    weight_dtype = torch.float32 if "float32" in form else dtype
    norm_weight = 1 + 0.1 * random(k, seed=seed + 3, device=device)
    return {
        "bias": random(n, seed=seed + 1, dtype=dtype, device=device) if "bias" in form else None,
        "residual": random(tokens, n, seed=seed + 2, dtype=dtype, device=device) if "residual" in form else None,
        "norm": RmsNorm(norm_weight.to(weight_dtype), EPS) if "norm" in form else None,
        "gated": "gated" in form,
    }


def expected(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, norm: Any, gated: bool) -> Tensor:
    """The separate ops, each rounding its result; the product alone is exact."""
    if norm is not None:
        x = kernels.rms_norm(x, norm.weight, norm.eps)
    y = x.double() @ weight.double().T
    if bias is not None:
        y += bias.double()
    rounded = y.to(x.dtype)
    if gated:
        rounded = kernels.silu_mul(rounded)
    return (rounded if residual is None else rounded + residual).double()


def assert_close(actual: Tensor, wanted: Tensor) -> None:
    """Within two roundings of the result's dtype, which is all that a different order of summation may cost."""
    step = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[actual.dtype]
    torch.testing.assert_close(actual.double(), wanted, atol=step, rtol=step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_without_tensor_cores(form: str, dtype: torch.dtype) -> None:
    n, k = 8, 96
    for tokens in range(1, 5):
        keys = options(form, tokens, n, k, dtype, seed=tokens)
        x = random(tokens, k, seed=10 + tokens, dtype=dtype)
        weight = (random(2 * n if keys["gated"] else n, k, seed=9) / 10).to(dtype)
        assert_close(gemv(x, weight, config=GemvConfig(4, 32), **keys), expected(x, weight, **keys))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_with_tensor_cores(form: str, dtype: torch.dtype) -> None:
    n, k = 32, 160
    for tokens, splits in [(1, 1), (5, 3), (17, 2), (40, 5)]:
        keys = options(form, tokens, n, k, dtype, seed=tokens)
        x = random(tokens, k, seed=10 + tokens, dtype=dtype)
        weight = (random(2 * n if keys["gated"] else n, k, seed=9) / 10).to(dtype)
        y = skinny(x, weight, config=SkinnyConfig(rows=16, columns=32, splits=splits), **keys)
        assert_close(y, expected(x, weight, **keys))


def test_a_split_sum_leaves_its_counters_at_zero_and_repeats() -> None:
    x, weight = random(3, 256, dtype=torch.bfloat16), random(48, 256, seed=1, dtype=torch.bfloat16)
    config = SkinnyConfig(rows=16, columns=32, splits=3)
    first = skinny(x, weight, config=config)
    assert not linear_small._counters(x.device).any()
    assert torch.equal(skinny(x, weight, config=config), first)


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
        assert_close(launchers.linear(x, weight, bias), expected(x, weight, bias, None, None, False))
        assert used == ([] if name is None else [name])
    used.clear()
    x = random(2, 2, 64, seed=3, dtype=torch.bfloat16)
    assert launchers.linear(x, weight).shape == (2, 2, 16)
    assert used == ["skinny"]
    for other in (random(2, 64), random(2, 128, dtype=torch.bfloat16)[:, ::2]):
        launchers.linear(other, weight.to(other.dtype))
    launchers.linear(random(1, 32, dtype=torch.bfloat16), weight[:, :32])
    assert used == ["skinny"], "float32, gaps between elements and unknown shapes go to the library"


def test_every_configuration_divides_its_weight() -> None:
    for table in launchers.TABLES.values():
        for (n, k), entries in table.items():
            assert [most for most, _ in entries] == sorted({most for most, _ in entries})
            for most, config in entries:
                assert most <= (4 if isinstance(config, GemvConfig) else 64)
                assert n % config.rows == k % config.columns == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_invariant_reference(dtype: torch.dtype) -> None:
    x, weight, bias = random(2, 3, 40, dtype=dtype), random(7, 40, seed=1, dtype=dtype), random(7, seed=2, dtype=dtype)
    y = kernels.linear_invariant(x, weight, bias)
    assert_close(y, expected(x, weight, bias, None, None, False))
    assert torch.equal(kernels.linear_invariant(x[1, 1:2], weight, bias), y[1, 1:2])
    assert kernels.linear_invariant(x[:0], weight).shape == (0, 3, 7)


@pytest.mark.parametrize(("tokens", "n", "k"), [(1, 64, 128), (5, 70, 40), (33, 130, 96), (140, 33, 24)])
def test_invariant_kernel_on_odd_shapes(tokens: int, n: int, k: int) -> None:
    x, weight = random(tokens, k, dtype=torch.bfloat16), (random(n, k, seed=1) / 8).bfloat16()
    bias = random(n, seed=2, dtype=torch.bfloat16)
    assert_close(launchers.linear_invariant(x, weight, bias), expected(x, weight, bias, None, None, False))
    assert_close(launchers.linear_invariant(x, weight), expected(x, weight, None, None, None, False))


def test_invariant_kernel_takes_any_leading_axes() -> None:
    x, weight = random(2, 8, 32)[:, ::4], random(5, 32, seed=1)
    assert_close(launchers.linear_invariant(x, weight), expected(x, weight, None, None, None, False))
    assert launchers.linear_invariant(x[:0], weight).shape == (0, 2, 5)


def test_wide_tiles_only_where_they_occupy_the_device() -> None:
    sizes = [linear_invariant.choose_tile(tokens, 4096, 132).tokens for tokens in (1, 16, 17, 64, 65, 256, 8192)]
    assert sizes == [16, 16, 32, 64, 128, 128, 256]


def test_kernels_compile_to_what_they_are_meant_to_be() -> None:
    found = offline.compiled("compile_linear")
    for name, case in found.items():
        assert case.spilled_bytes == 0, name
        assert case.shared_bytes <= offline.MAX_SHARED_BYTES, name
        if name.startswith("gemv"):
            assert case.wgmma == case.mma == 0, name
            assert case.registers <= 168, name
        else:
            # mma.sync would sum in another order than wgmma.
            assert case.wgmma >= 4, name
            assert case.mma == 0, name
            assert case.async_copies >= 32, name
    # Two programs fit into one processor: one computes while the other's first loads are under way.
    for name in ("skinny-16", "skinny-16-split", "skinny-32"):
        assert found[name].shared_bytes <= offline.MAX_SHARED_BYTES // 2, name


def poisoned(tokens: int, n: int) -> None:
    """Leave NaN in the memory that the next output of this size is allocated in."""
    torch.full((tokens, n), torch.nan, dtype=torch.bfloat16, device="cuda")


def fresh_seed() -> int:
    seed = int.from_bytes(os.urandom(3), "little")
    print(f"seed {seed}")
    return seed


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["bias", "norm-float32", "norm-gated-residual"])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 16, 17, 33, 64])
def test_forms_on_a_gpu(tokens: int, form: str) -> None:
    seed = fresh_seed()
    n, k = 1536, 4096
    keys = options(form, tokens, n, k, torch.bfloat16, seed, "cuda")
    x = random(tokens, k, seed=seed, dtype=torch.bfloat16, device="cuda")
    weight = (random(2 * n if keys["gated"] else n, k, seed=seed + 5, device="cuda") / 64).bfloat16()
    configs: list[Any] = [SkinnyConfig(stages=3), SkinnyConfig(stages=3, splits=3)]
    configs += [GemvConfig(4, 1024)] if tokens <= 4 else []
    for config in configs:
        run: Any = gemv if isinstance(config, GemvConfig) else skinny
        poisoned(tokens, n)
        y = run(x, weight, config=config, **keys)
        assert_close(y, expected(x, weight, **keys))
        poisoned(tokens, n)
        assert torch.equal(run(x, weight, config=config, **keys), y), "two runs differ"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "k", "dtype"),
    [
        (4096, 4096, torch.bfloat16),
        (4096, 14336, torch.bfloat16),
        (1000, 520, torch.bfloat16),
        (77, 200, torch.float16),
    ],
)
def test_rows_have_the_same_bits_in_any_batch(n: int, k: int, dtype: torch.dtype) -> None:
    seed = fresh_seed()
    x = random(2100, k, seed=seed, dtype=dtype, device="cuda")
    weight = (random(n, k, seed=seed + 1, device="cuda") / k**0.5).to(dtype)
    whole = kernels.linear_invariant(x, weight)
    assert_close(whole[:32], expected(x[:32], weight, None, None, None, False))
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
