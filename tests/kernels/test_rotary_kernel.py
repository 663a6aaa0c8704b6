"""The launchers of rotary embedding against the references."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels import PagedKV, Rotation
from asyncllm.kernels.triton import rotary as launchers
from tests.kernels import offline
from tests.kernels.device import DEVICE, assert_repeatable, fresh_seed, poison, random


def frequencies(pairs: int, theta: float = 500000.0) -> Tensor:
    return (theta ** -(torch.arange(pairs) / pairs)).to(DEVICE)


@pytest.mark.parametrize("pairs", [4, 5])
@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_rotation(pairs: int, factor: float) -> None:
    positions = torch.tensor([0, 3, 131071, 1000003], device=DEVICE)
    actual = launchers.rotation(positions, frequencies(pairs), factor)
    expected = kernels.rotation.reference(positions, frequencies(pairs), factor)
    for mine, other in zip(actual, expected, strict=True):
        assert mine.shape == (4, 1, 2 * pairs)
        torch.testing.assert_close(mine, other, atol=3e-7, rtol=3e-7)


def test_rotation_with_frequencies_of_each_token() -> None:
    positions = torch.tensor([7, 9, 2000], device=DEVICE)
    own = frequencies(8) * torch.tensor([1.0, 0.5, 0.25], device=DEVICE)[:, None]
    actual, expected = launchers.rotation(positions, own), kernels.rotation.reference(positions, own)
    torch.testing.assert_close(actual.sin, expected.sin, atol=3e-7, rtol=3e-7)
    torch.testing.assert_close(actual.cos, expected.cos, atol=3e-7, rtol=3e-7)


class Case:
    """A packed qkv with rotation, places and two equal caches full of sevens."""

    def __init__(
        self,
        tokens: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        turned: int,
        *,
        dtype: torch.dtype = torch.float32,
        weights: torch.dtype | None = None,
        interleaved: bool = False,
        block_size: int = 4,
        num_blocks: int = 5,
        seed: int = 0,
    ) -> None:
        heads = num_heads + 2 * num_kv_heads
        self.qkv = random(tokens, heads * head_dim, seed=seed, dtype=dtype)
        generator = torch.Generator().manual_seed(seed + 1)
        positions = torch.randint(0, 8192, (tokens,), generator=generator).to(DEVICE)
        self.rotation: Rotation = kernels.rotation.reference(positions, frequencies(turned // 2))
        self.places = torch.randperm(num_blocks * block_size, generator=generator)[:tokens].to(DEVICE)
        self.shape = (2, num_blocks, num_kv_heads, block_size, head_dim)
        self.arguments: dict[str, Any] = {
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "eps": 1e-5,
            "interleaved": interleaved,
        }
        if weights is not None:
            self.arguments["q_norm"] = random(head_dim, seed=seed + 2, dtype=weights)
            self.arguments["k_norm"] = random(head_dim, seed=seed + 3, dtype=weights)

    def cache(self) -> PagedKV:
        return PagedKV.over(torch.full(self.shape, 7.0, dtype=self.qkv.dtype, device=DEVICE))

    def launched(self) -> tuple[Tensor, PagedKV]:
        cache = self.cache()
        return launchers.rope_fill_kv(self.qkv, self.rotation, cache, self.places, **self.arguments), cache

    def expected(self) -> tuple[Tensor, PagedKV]:
        """By the reference in float32, but with the norm's rounding to the dtype of qkv. On the CPU: the ops that it is
        made of would be launched where the tensors are on a GPU."""
        pages = torch.full(self.shape, 7.0, dtype=self.qkv.dtype)
        cache = PagedKV.over(pages)
        arguments = {name: each.cpu() if isinstance(each, Tensor) else each for name, each in self.arguments.items()}
        rotation = Rotation(*(part.cpu() for part in self.rotation))
        plan = kernels.plan_cache_write(self.places.cpu(), cache)
        q = kernels.rope_fill_kv(self.qkv.cpu(), rotation, cache, plan, **arguments)
        return q.to(DEVICE), PagedKV.over(pages.to(DEVICE))


SHAPES = pytest.mark.parametrize(
    ("tokens", "num_heads", "num_kv_heads", "head_dim", "turned"),
    [(3, 4, 2, 8, 8), (5, 3, 1, 16, 16), (1, 2, 2, 10, 10), (4, 6, 2, 16, 8), (2, 2, 1, 20, 12)],
)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def check(case: Case) -> None:
    (q, cache), (expected_q, expected_cache) = case.launched(), case.expected()
    tolerance = TOLERANCE[q.dtype]
    # A normed number on the edge between two of its type may fall to either side, and turning may leave little of it.
    atol = 16 * tolerance if "q_norm" in case.arguments else tolerance
    assert q.is_contiguous()
    torch.testing.assert_close(q, expected_q, atol=atol, rtol=tolerance)
    torch.testing.assert_close(cache.k, expected_cache.k, atol=atol, rtol=tolerance)
    assert torch.equal(cache.v, expected_cache.v)
    unwritten = expected_cache.lines == 7.0
    assert torch.equal(cache.lines == 7.0, unwritten)


@SHAPES
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
def test_rope_fill_kv(
    tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, turned: int, interleaved: bool
) -> None:
    check(Case(tokens, num_heads, num_kv_heads, head_dim, turned, interleaved=interleaved))


@SHAPES
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
def test_rope_fill_kv_with_norms(
    tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, turned: int, interleaved: bool
) -> None:
    check(Case(tokens, num_heads, num_kv_heads, head_dim, turned, interleaved=interleaved, weights=torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [None, "own", torch.float32], ids=["plain", "own", "float32"])
def test_rope_fill_kv_in_half_precision(dtype: torch.dtype, weights: Any) -> None:
    check(Case(3, 4, 2, 16, 16, dtype=dtype, weights=dtype if weights == "own" else weights))


def test_padding_is_not_written() -> None:
    case = Case(4, 2, 1, 8, 8)
    case.places[1] = -1
    q, cache = case.launched()
    assert torch.isfinite(q).all()
    written = case.places[[0, 2, 3]]
    blocks, offsets = written // 4, written % 4
    assert (cache.v[blocks, :, offsets] != 7.0).all()
    assert (cache.lines == 7.0).all(-1).sum() == cache.lines.shape[0] - 3 * 2


def test_infinite_values_keep_their_neighbours() -> None:
    """A value is copied, not multiplied: infinity in one feature leaves the others as they are."""
    case = Case(1, 2, 1, 8, 8)
    case.qkv[0, -8] = torch.inf
    _, cache = case.launched()
    value = cache.v[case.places // 4, 0, case.places % 4][0]
    assert value[0] == torch.inf
    assert torch.equal(value[1:], case.qkv[0, -7:])


@pytest.mark.parametrize("name", ["128", "128 normed", "128 partial", "128 interleaved", "256", "80 normed"])
def test_compiled_rope(name: str, compile_kernels: offline.Compile) -> None:
    kernel = compile_kernels("compile_pointwise")[f"rope {name}"]
    assert kernel.spilled_bytes == 0
    assert kernel.registers <= 64
    assert kernel.shared_bytes == 0


def test_compiled_rotation_keeps_the_exact_sine(compile_kernels: offline.Compile) -> None:
    """Angles go up to 1e6: the reduction by pi/2 of such angles needs a little local memory, an approximation none."""
    kernel = compile_kernels("compile_pointwise")["rotation 128"]
    assert 0 < kernel.spilled_bytes <= 64


@pytest.mark.gpu
def test_rotation_on_gpu_against_float64() -> None:
    generator = torch.Generator().manual_seed(fresh_seed())
    positions = torch.randint(0, 2**20, (4096,), generator=generator).to(DEVICE)
    poison((2, 4096, 1, 128), dtype=torch.float32)
    cos, sin = kernels.rotation(positions, frequencies(64))
    angles = (positions.float()[:, None] * frequencies(64)).double()
    for table, sign, exact in ((cos, 1, angles.cos()), (sin, -1, angles.sin())):
        torch.testing.assert_close(table[:, 0, :64].double(), sign * exact, atol=2e-7, rtol=0)
        torch.testing.assert_close(table[:, 0, 64:].double(), exact, atol=2e-7, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 257, 2048])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((32, 8, 128, 128), {}),
        ((32, 8, 128, 128), {"weights": torch.bfloat16}),
        ((32, 8, 128, 64), {"interleaved": True}),
        ((16, 8, 256, 256), {"weights": torch.float32}),
        ((32, 32, 80, 80), {}),
        ((32, 32, 80, 32), {}),
    ],
    ids=["llama", "qwen3", "pairs", "256", "80", "phi2"],
)
def test_rope_fill_kv_on_gpu(tokens: int, shape: tuple[int, int, int, int], options: dict[str, Any]) -> None:
    blocks = -(-tokens // 64) + 3
    case = Case(tokens, *shape, dtype=torch.bfloat16, block_size=64, num_blocks=blocks, seed=fresh_seed(), **options)
    poison((tokens, shape[0], shape[2]), dtype=torch.bfloat16)
    check(case)
    assert_repeatable(lambda: case.launched()[0])


@pytest.mark.gpu
def test_a_row_does_not_depend_on_the_batch() -> None:
    case = Case(300, 32, 8, 128, 128, dtype=torch.bfloat16, weights=torch.bfloat16, block_size=64, num_blocks=8)
    whole, _ = case.launched()
    alone = launchers.rope_fill_kv(
        case.qkv[77:78],
        Rotation(*(part[77:78] for part in case.rotation)),
        case.cache(),
        case.places[77:78],
        **case.arguments,
    )
    assert torch.equal(whole[77:78], alone)


@pytest.mark.gpu
def test_far_blocks_on_gpu() -> None:
    """Lines beyond 2**31 numbers from the first."""
    pages = torch.zeros(2, 36000, 8, 64, 128, dtype=torch.bfloat16, device=DEVICE)
    case = Case(1, 32, 8, 128, 128, dtype=torch.bfloat16)
    cache = PagedKV.over(pages)
    place = 36000 * 64 - 1
    launchers.rope_fill_kv(case.qkv, case.rotation, cache, torch.tensor([place], device=DEVICE), **case.arguments)
    value = case.qkv[0, -8 * 128 :].view(8, 128)
    assert torch.equal(cache.v[-1, :, -1], value)
    assert math.isfinite(float(cache.k[-1, :, -1].float().abs().max()))
