"""Writing and copying pages: the references, and the launchers against them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from asyncllm.kernels import PagedKV, copy_blocks, fill_kv_cache, plan_cache_write
from asyncllm.kernels.triton import cache as launchers
from tests.kernels import offline
from tests.kernels.device import DEVICE, fresh_seed, random


def pages(num_blocks: int) -> PagedKV:
    return PagedKV.over(torch.zeros(2, num_blocks, 2, 4, 3))


def test_fill_writes_the_named_places_and_nothing_else() -> None:
    cache = pages(5)
    k, v = torch.randn(2, 3, 2, 3, generator=torch.Generator().manual_seed(0))
    fill_kv_cache(torch.cat([k, v], 1), cache, plan_cache_write(torch.tensor([17, 3, 4]), cache))
    for token, (block, offset) in enumerate([(4, 1), (0, 3), (1, 0)]):
        assert torch.equal(cache.k[block, :, offset], k[token])
        assert torch.equal(cache.v[block, :, offset], v[token])
        cache.k[block, :, offset] = 0
        cache.v[block, :, offset] = 0
    assert not cache.k.any()
    assert not cache.v.any()


def numbered_pool(device: torch.device) -> Tensor:
    """[2 layers, 2, 4 blocks, 2, 4, 3]: every number of a block is 10 * layer + block, negative among the values."""
    numbers = 10.0 * torch.arange(2)[:, None, None] + torch.arange(4)
    pool = numbers * torch.tensor([1.0, -1.0])[:, None]
    return pool[..., None, None, None].repeat(1, 1, 1, 2, 4, 3).to(device)


@pytest.mark.parametrize("copy", [copy_blocks, launchers.copy_blocks])
def test_copy_blocks_in_every_layer(copy: object) -> None:
    assert callable(copy)
    pool = numbered_pool(DEVICE)
    pairs = torch.tensor([[0, 3], [1, 2]], dtype=torch.int32, device=DEVICE)
    copy(pool.flatten(0, 1), pairs[:, 0], pairs[:, 1])
    expected = numbered_pool(DEVICE)[:, :, [0, 1, 1, 0]]
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("copy", [copy_blocks, launchers.copy_blocks])
def test_copy_of_no_block_changes_nothing(copy: object) -> None:
    assert callable(copy)
    pool = numbered_pool(DEVICE)
    none = torch.tensor([], dtype=torch.int64, device=DEVICE)
    copy(pool.flatten(0, 1), none, none)
    assert torch.equal(pool, numbered_pool(DEVICE))


@pytest.mark.parametrize(
    ("places", "kv_heads", "block_size", "head_dim"),
    [([17, 3, 4, 9, 19], 2, 4, 8), ([6, 2, 7], 3, 5, 10), ([5], 1, 16, 16)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fill_launcher(places: list[int], kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> None:
    kv = random(len(places), 2 * kv_heads, head_dim, dtype=dtype)
    caches = [PagedKV.over(torch.full((2, 5, kv_heads, block_size, head_dim), 7.0).to(DEVICE, dtype)) for _ in "ab"]
    places = torch.tensor(places, device=DEVICE)
    fill_kv_cache.reference(kv, caches[0], plan_cache_write.reference(places, caches[0]))
    launchers.fill_kv_cache(kv, caches[1], launchers.plan_cache_write(places, caches[1]))
    assert torch.equal(caches[0].lines, caches[1].lines)
    # A part of each token's heads, as keys and values lie behind the queries.
    caches[1].lines.fill_(7.0)
    apart = torch.cat([random(len(places), 3, head_dim, seed=1, dtype=dtype), kv], 1)[:, 3:]
    for fill, cache in ((launchers.fill_kv_cache, caches[1]), (fill_kv_cache.reference, caches[0])):
        plan = launchers.plan_cache_write if cache is caches[1] else plan_cache_write.reference
        fill(apart, cache, plan(places, cache))
    assert torch.equal(caches[0].lines, caches[1].lines)


def test_fill_launcher_writes_nothing_for_padding() -> None:
    cache = PagedKV.over(torch.zeros(2, 3, 2, 4, 8, device=DEVICE))
    places = torch.tensor([-1, 9, -1], device=DEVICE)
    kv = random(3, 4, 8)
    launchers.fill_kv_cache(kv, cache, places)
    assert torch.equal(cache.k[2, :, 1], kv[1, :2])
    assert torch.equal(cache.v[2, :, 1], kv[1, 2:])
    assert cache.lines.count_nonzero() == kv[1].count_nonzero()


def test_a_cache_of_another_dtype_is_refused() -> None:
    cache = PagedKV.over(torch.zeros(2, 3, 2, 4, 8, device=DEVICE))
    with pytest.raises(ValueError, match="float32"):
        launchers.fill_kv_cache(random(1, 4, 8, dtype=torch.bfloat16), cache, torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("name", ["fill_kv_cache 128", "copy_blocks"])
def test_compiled(name: str, compile_kernels: offline.Compile) -> None:
    kernel = compile_kernels("compile_pointwise")[name]
    assert kernel.spilled_bytes == 0
    assert kernel.registers <= 64


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 33, 4097])
def test_fill_on_gpu(tokens: int) -> None:
    generator = torch.Generator().manual_seed(fresh_seed())
    places = torch.randperm(128 * 64, generator=generator)[:tokens].to(DEVICE)
    places[::5] = -1
    kv = torch.randn(tokens, 16, 128, generator=generator).to(DEVICE, torch.bfloat16)
    pages = torch.full((2, 128, 8, 64, 128), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    cache = PagedKV.over(pages.clone())
    launchers.fill_kv_cache(kv, cache, places)
    written = places >= 0
    blocks, offsets = places[written] // 64, places[written] % 64
    assert torch.equal(cache.k[blocks, :, offsets], kv[written, :8])
    assert torch.equal(cache.v[blocks, :, offsets], kv[written, 8:])
    assert cache.lines.isnan().all(-1).sum() == cache.lines.shape[0] - 16 * int(written.sum())


@pytest.mark.gpu
def test_copy_on_gpu_reaches_far_blocks() -> None:
    """Offsets beyond 2**31 numbers: the last block of a pool of 4.8 GiB."""
    pool = torch.zeros(4, 9200, 8, 64, 128, dtype=torch.bfloat16, device=DEVICE)
    pool[:, 1] = random(4, 8, 64, 128, dtype=torch.bfloat16)
    ends = torch.tensor([[1, 9199], [3, 7]], device=DEVICE)
    launchers.copy_blocks(pool, ends[:, 0], ends[:, 1])
    assert torch.equal(pool[:, 9199], pool[:, 1])
    assert not pool[:, 7].any()
