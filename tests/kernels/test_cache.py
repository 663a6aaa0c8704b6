from __future__ import annotations

import torch

from asyncllm.kernels import PagedKV, copy_blocks, fill_kv_cache, plan_cache_write


def pages(num_blocks: int) -> PagedKV:
    return PagedKV.over(torch.zeros(2, num_blocks, 2, 4, 3))


def test_fill_writes_the_named_slots_and_nothing_else() -> None:
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


def test_copy_blocks_in_every_layer() -> None:
    caches = [pages(4), pages(4)]
    for layer, cache in enumerate(caches):
        for block in range(4):
            cache.k[block], cache.v[block] = 10 * layer + block, -10 * layer - block
    copy_blocks(caches, torch.tensor([0, 1], dtype=torch.int32), torch.tensor([3, 2], dtype=torch.int32))
    for layer, cache in enumerate(caches):
        assert cache.k[:, 0, 0, 0].tolist() == [10 * layer + block for block in (0, 1, 1, 0)]
        assert cache.v[:, 1, 3, 2].tolist() == [-10 * layer - block for block in (0, 1, 1, 0)]


def test_copy_of_no_block_changes_nothing() -> None:
    cache = pages(2)
    copy_blocks([cache], torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))
    assert not cache.k.any()
