"""CacheLayout: layers declare what they keep, and find it in a pool that holds it once."""

from __future__ import annotations

import torch

from asyncllm import kernels
from asyncllm.agent.cache.pool import allocate_pool
from tests.agent.mixed_cache import BLOCK_SIZE, SPECS, Latents, mixed_layout

NUM_BLOCKS = 7
CPU = torch.device("cpu")


def test_equal_parts_of_all_layers_lie_in_one_tensor() -> None:
    layout = mixed_layout()
    shapes = [(part.planes, part.shape, part.dtype) for part in layout.parts]
    assert shapes == [
        (4, (2, BLOCK_SIZE, 8), torch.bfloat16),
        (2, (BLOCK_SIZE, 6), torch.uint8),
        (2, (BLOCK_SIZE, 1), torch.float32),
        (2, (1, BLOCK_SIZE, 8), torch.bfloat16),
    ]
    assert layout.block_bytes == sum(2 * 4 * heads * BLOCK_SIZE for heads in (4, 4, 2)) * 2 + 2 * BLOCK_SIZE * (6 + 4)


def test_layers_see_their_own_and_nothing_else() -> None:
    pool = allocate_pool(mixed_layout(), NUM_BLOCKS, CPU)
    caches = mixed_layout().caches(pool)
    tensors = [tensor for cache in caches for tensor in (cache if isinstance(cache, Latents) else cache[:2])]
    for number, tensor in enumerate(tensors, start=1):
        tensor.fill_(number)
    for number, tensor in enumerate(tensors, start=1):
        assert tensor.eq(number).all()
        assert tensor.shape[0] in (1, NUM_BLOCKS)
    assert all(part.ne(0).all() for part in pool), "no memory is left over"
    assert len(caches) == len(SPECS)


def test_a_block_is_copied_in_all_layers() -> None:
    pool = allocate_pool(mixed_layout(), NUM_BLOCKS, CPU)
    for part in pool:
        part.copy_(torch.randn(part.shape) * 50)
    before = [part.clone() for part in pool]
    for part in pool:
        kernels.copy_blocks(part, torch.tensor([1, 4]), torch.tensor([6, 2]))
    for part, old in zip(pool, before, strict=True):
        assert torch.equal(part[:, [6, 2]], old[:, [1, 4]])
        assert torch.equal(part[:, [0, 1, 3, 4, 5]], old[:, [0, 1, 3, 4, 5]])
