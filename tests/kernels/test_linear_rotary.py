"""The projection with the rotation behind it: which way it takes, and the kernel against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from asyncllm import kernels
from asyncllm.kernels import PagedKV, Rotation
from asyncllm.kernels.triton.linear import rotary as linear_rotary
from asyncllm.kernels.triton.linear.rotary import TABLES, skinny_rotary
from asyncllm.kernels.triton.linear.small import SkinnyConfig
from tests.kernels.device import DEVICE, fresh_seed, poison, random

BLOCK_SIZE = 16


class Case:
    """Tokens, a weight, angles, and two caches of sevens; one token of three or more has no place."""

    def __init__(
        self,
        tokens: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        k: int,
        *,
        dtype: torch.dtype,
        seed: int = 0,
    ) -> None:
        heads = num_heads + 2 * num_kv_heads
        self.x = random(tokens, k, seed=seed, dtype=dtype)
        self.weight = (random(heads * head_dim, k, seed=seed + 1) / k**0.5).to(dtype)
        generator = torch.Generator().manual_seed(seed + 2)
        positions = torch.randint(0, 8192, (tokens,), generator=generator).to(DEVICE)
        self.rotation: Rotation = kernels.rotation.reference(  # type: ignore[attr-defined]
            positions, (500000.0 ** -(torch.arange(head_dim // 2) * 2 / head_dim)).to(DEVICE)
        )
        num_blocks = -(-tokens // BLOCK_SIZE) + 1
        self.places = torch.randperm(num_blocks * BLOCK_SIZE, generator=generator)[:tokens].to(DEVICE)
        if tokens > 2:
            self.places[1] = -1
        self.shape = (2, num_blocks, num_kv_heads, BLOCK_SIZE, head_dim)
        self.heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}

    def cache(self) -> PagedKV:
        return PagedKV.over(torch.full(self.shape, 7.0, dtype=self.x.dtype, device=DEVICE))

    def launched(self, config: SkinnyConfig, x: Tensor | None = None) -> tuple[Tensor, PagedKV]:
        cache = self.cache()
        poison((len(self.x), self.heads["num_heads"], self.heads["head_dim"]), dtype=self.x.dtype)
        tokens = self.x if x is None else x
        return skinny_rotary(tokens, self.weight, self.rotation, cache, self.places, **self.heads, config=config), cache

    def expected(self) -> tuple[Tensor, Tensor]:
        """q, and the lines of the cache, in float64 and on the CPU."""
        num_heads, num_kv_heads = self.heads["num_heads"], self.heads["num_kv_heads"]
        product = self.x.cpu().double() @ self.weight.cpu().double().t()
        heads = product.view(len(self.x), num_heads + 2 * num_kv_heads, -1)
        angles = Rotation(*(part.cpu().double() for part in self.rotation))
        turned = kernels.apply_rotary(heads[:, : num_heads + num_kv_heads], angles)
        pages = torch.full(self.shape, 7.0, dtype=torch.float64)
        for token, place in enumerate(self.places.tolist()):
            if place >= 0:
                block, offset = divmod(place, BLOCK_SIZE)
                pages[0, block, :, offset] = turned[token, num_heads:]
                pages[1, block, :, offset] = heads[token, num_heads + num_kv_heads :]
        return turned[:, :num_heads], PagedKV.over(pages).lines


def check(case: Case, config: SkinnyConfig) -> None:
    (q, cache), (expected_q, lines) = case.launched(config), case.expected()
    step = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}[q.dtype]
    torch.testing.assert_close(q.cpu().double(), expected_q, atol=step, rtol=step)
    torch.testing.assert_close(cache.lines.cpu().double(), lines, atol=step, rtol=step)
    assert torch.equal(cache.lines.cpu() == 7.0, lines == 7.0), "what has no place is written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("tokens", "heads", "config"),
    [
        (1, (2, 1, 32), SkinnyConfig(rows=16, columns=32)),
        (5, (4, 2, 32), SkinnyConfig(rows=32, columns=32)),
        (17, (3, 1, 64), SkinnyConfig(rows=16, columns=32)),
        (40, (2, 2, 16), SkinnyConfig(rows=16, columns=32)),
    ],
)
def test_results(tokens: int, heads: tuple[int, int, int], config: SkinnyConfig, dtype: torch.dtype) -> None:
    check(Case(tokens, *heads, 160, dtype=dtype), config)


def test_the_reference_is_projection_and_rotation() -> None:
    case = Case(2, 3, 1, 8, 40, dtype=torch.float32)
    x, weight, places = case.x.cpu(), case.weight.cpu(), case.places.cpu()
    angles = Rotation(*(part.cpu() for part in case.rotation))
    caches = [PagedKV.over(torch.zeros(case.shape)) for _ in range(2)]
    plan = kernels.plan_cache_write(places, caches[0])
    q = kernels.linear_rope_fill_kv(x, weight, angles, caches[0], plan, **case.heads)
    wanted = kernels.rope_fill_kv(kernels.linear(x, weight), angles, caches[1], plan, **case.heads)
    assert torch.equal(q, wanted)
    assert torch.equal(caches[0].lines, caches[1].lines)


def test_the_table_decides_by_shape_and_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {(64, 64): ((1, None), (4, SkinnyConfig(rows=16, columns=32)))}
    monkeypatch.setattr(linear_rotary, "_table", lambda device: table)
    used = []
    run = linear_rotary.skinny_rotary
    monkeypatch.setattr(linear_rotary, "skinny_rotary", lambda x, *a, **k: (used.append(len(x)), run(x, *a, **k))[1])

    def both(case: Case) -> None:
        cache = case.cache()
        q = linear_rotary.linear_rope_fill_kv(case.x, case.weight, case.rotation, cache, case.places, **case.heads)
        expected_q, lines = case.expected()
        torch.testing.assert_close(q.cpu().double(), expected_q, atol=3.2e-2, rtol=3.2e-2)
        torch.testing.assert_close(cache.lines.cpu().double(), lines, atol=3.2e-2, rtol=3.2e-2)

    for tokens in range(1, 6):
        both(Case(tokens, 2, 1, 16, 64, dtype=torch.bfloat16))
    assert used == [2, 3, 4]
    used.clear()
    both(Case(2, 6, 1, 8, 64, dtype=torch.bfloat16))
    both(Case(2, 2, 1, 16, 64, dtype=torch.float32))
    assert not used, "heads that a tile does not divide and 32-bit numbers take two kernels"
    half = Case(2, 2, 1, 16, 64, dtype=torch.bfloat16)
    half.rotation = Rotation(*(part[..., :8] for part in half.rotation))
    linear_rotary.linear_rope_fill_kv(half.x, half.weight, half.rotation, half.cache(), half.places, **half.heads)
    assert not used, "so do heads that are turned in part"
    case = Case(2, 2, 1, 16, 64, dtype=torch.bfloat16)
    pages = PagedKV.over(torch.zeros(case.shape, device=DEVICE))
    with pytest.raises(ValueError, match="cache"):
        linear_rotary.linear_rope_fill_kv(case.x, case.weight, case.rotation, pages, case.places, **case.heads)


def test_every_configuration_fits_its_weight() -> None:
    for table in TABLES.values():
        for (n, k), entries in table.items():
            assert [most for most, _ in entries] == sorted({most for most, _ in entries})
            for most, config in entries:
                if config is not None:
                    assert most <= 64
                    assert config.splits == 1
                    assert n % config.rows == k % config.columns == 0


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 33, 64])
def test_results_on_a_gpu(tokens: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for heads, config in (((4, 2, 128), SkinnyConfig(64, 128, stages=5)), ((4, 1, 64), SkinnyConfig())):
            case = Case(tokens, *heads, 1024, dtype=dtype, seed=fresh_seed() % 2**31)
            check(case, config)
            (q, cache), (again, cache_again) = case.launched(config), case.launched(config)
            assert torch.equal(q, again)
            assert torch.equal(cache.lines, cache_again.lines)
            other = case.x.clone()
            other[tokens // 2 :] = torch.nan
            assert torch.equal(case.launched(config, other)[0][: tokens // 2], q[: tokens // 2])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 32, 33, 64, 65, 300])
def test_the_measured_shape_on_a_gpu(tokens: int) -> None:
    """Through the op, in the way that the device's table takes."""
    case = Case(tokens, 32, 8, 128, 4096, dtype=torch.bfloat16, seed=fresh_seed() % 2**31)
    poison((tokens, 32, 128), dtype=torch.bfloat16)
    cache = case.cache()
    q = kernels.linear_rope_fill_kv(case.x, case.weight, case.rotation, cache, case.places, **case.heads)
    expected_q, lines = case.expected()
    torch.testing.assert_close(q.cpu().double(), expected_q, atol=3.2e-2, rtol=3.2e-2)
    torch.testing.assert_close(cache.lines.cpu().double(), lines, atol=3.2e-2, rtol=3.2e-2)
