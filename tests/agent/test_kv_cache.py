"""The KV pool: sizing rules and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncllm.agent.cache import pool
from asyncllm.agent.cache.layout import CacheLayout
from asyncllm.agent.cache.pool import CPU_POOL_BYTES, allocate_pool, available_memory, pool_blocks
from asyncllm.config import EngineConfig
from asyncllm.errors import ModelError
from asyncllm.layers.cache_spec import PagedKVSpec
from tests.agent.tiny_model import tiny_llama

CPU = torch.device("cpu")
SPECS = tiny_llama().cache_specs
BLOCK_BYTES = 2 * 2 * 2 * 16 * 64 * 4
"""K and V, 2 layers, 2 heads of 16, 64 tokens, 4 bytes."""


def blocks(free: int | None = None, max_position: int = 128, **settings: Any) -> int:
    config = EngineConfig(**settings).checked()
    with pytest.MonkeyPatch.context() as patch:
        if free is not None:
            patch.setattr(pool, "available_memory", lambda device: free)
        layout = CacheLayout(SPECS, config.tokens_per_block, torch.float32)
        return pool_blocks(config, layout, max_position=max_position, device=CPU)


def test_bytes_of_a_block() -> None:
    assert [PagedKVSpec(num_kv_heads=2, head_dim=16)] * 2 == SPECS
    assert CacheLayout(SPECS, 64, torch.float32).block_bytes == BLOCK_BYTES
    assert CacheLayout(SPECS, 16, torch.bfloat16).block_bytes == BLOCK_BYTES // 8


def test_num_gpu_blocks_wins() -> None:
    assert blocks(num_gpu_blocks=3, cache_max_entry_count=50) == 3


def test_an_entry_count_above_one_is_a_number_of_blocks() -> None:
    assert blocks(cache_max_entry_count=50) == 50


def test_a_fraction_of_the_free_memory() -> None:
    assert blocks(free=100 * BLOCK_BYTES, cache_max_entry_count=0.5) == 50


def test_no_more_than_the_batch_can_use() -> None:
    assert blocks(max_batch_size=3, max_position=129) == 9
    assert blocks(max_batch_size=1, max_position=1) == 1


def test_no_more_than_two_gigabytes_on_a_cpu() -> None:
    assert blocks(free=2**40, max_position=2**20) == CPU_POOL_BYTES // BLOCK_BYTES


def test_not_even_one_block_is_a_model_error_with_the_numbers() -> None:
    with pytest.raises(ModelError, match=r"block of 64 tokens takes 0\.\d MiB.*0\.0 MiB"):
        blocks(free=BLOCK_BYTES, cache_max_entry_count=0.9)


def test_available_memory_is_plausible() -> None:
    assert 2**24 < available_memory(CPU) < 2**50


def test_the_pool_is_zero_and_shaped_by_layer() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        (pool,) = allocate_pool(CacheLayout(SPECS, 8, dtype), 5, CPU)
        assert pool.shape == (2 * 2, 5, 2, 8, 16)
        assert pool.dtype == dtype
        assert not pool.any()
        assert pool.is_contiguous()


def test_a_pool_beyond_memory_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="num_gpu_blocks"):
        allocate_pool(CacheLayout(SPECS, 64, torch.float32), 2**48, CPU)
