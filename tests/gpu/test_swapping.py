"""Swapping on a GPU: blocks arrive whole, whatever else runs, and answers do not depend on it."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import msgspec
import pytest
import torch

from asyncllm import AsyncEngine, GenerationConfig
from asyncllm.agent.cache import host_pool
from asyncllm.agent.cache.host_pool import BlockTransfers, allocate_host_pool
from asyncllm.agent.cache.layout import CacheLayout
from asyncllm.agent.cache.pool import allocate_pool
from asyncllm.errors import ModelError
from asyncllm.protocol import SwapPlan
from tests.agent.mixed_cache import mixed_layout
from tests.agent.plain_swaps import swap_blocks
from tests.agent.test_host_pool import NUM_BLOCKS, NUM_HOST_BLOCKS, layout_of, random_plan
from tests.gpu.engines import DEVICE, answer_all, device_config, random_prompts, wide_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("wide") / "llama"
    return str(wide_checkpoint("llama", folder))


@pytest.mark.parametrize("layout", [layout_of(torch.bfloat16), mixed_layout()])
@pytest.mark.parametrize("staged", [1, 3, 100])
def test_copies_in_flight_are_the_plain_ones(staged: int, layout: CacheLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that go down are written over at once, and nothing waits for anything in between."""
    monkeypatch.setattr(host_pool, "STAGING_BYTES", staged * layout.block_bytes)
    pool = allocate_pool(layout, NUM_BLOCKS, torch.device(DEVICE))
    host = allocate_host_pool(layout, NUM_HOST_BLOCKS)
    for part in (*pool, *host):
        part.copy_(torch.randn(part.shape) * 50)
    expected, host_expected = [part.cpu() for part in pool], [part.clone() for part in host]
    transfers = BlockTransfers(pool, host)
    dice = random.Random(staged)
    for step in range(200):
        plan = random_plan(dice)
        transfers.launch(plan)
        swap_blocks(plan, expected, host_expected)
        written = [block for block, _ in plan.swap_out]
        for part in (*pool, *expected):
            part[:, written] = step
    torch.cuda.synchronize()
    assert all(torch.equal(part.cpu(), right) for part, right in zip(pool, expected, strict=True))
    assert all(map(torch.equal, host, host_expected))


def test_memory_that_cannot_be_pinned_is_a_model_error_and_leaves_no_trace() -> None:
    layout = layout_of(torch.bfloat16)
    pool = allocate_pool(layout, NUM_BLOCKS, torch.device(DEVICE))
    host = allocate_host_pool(layout, NUM_HOST_BLOCKS)
    transfers = BlockTransfers(pool, host)
    with pytest.raises(ModelError, match="Lower num_cpu_blocks"):
        BlockTransfers(pool, host)
    transfers.launch(SwapPlan(swap_out=[(1, 2)], swap_in=[(2, 3)]))
    torch.cuda.synchronize()
    del transfers
    gc.collect()
    BlockTransfers(pool, host)


@pytest.mark.anyio
async def test_swapped_answers_are_those_of_undisturbed_ones(checkpoint: str) -> None:
    prompts = random_prompts(4, 60, 300)
    configs = [
        GenerationConfig(
            max_new_tokens=150, ignore_eos=True, top_k=1 if index % 2 else 0, temperature=1.0, random_seed=index
        )
        for index in range(len(prompts))
    ]
    config = device_config(
        dtype="bfloat16", batch_invariant=True, max_batch_size=32, num_gpu_blocks=512, enable_prefix_caching=False
    )
    async with AsyncEngine(checkpoint, config) as engine:
        expected = [each.token_ids for each in await answer_all(engine, prompts, configs)]
        assert engine.stats().preemptions == 0
    for caching in (False, True):
        tight = msgspec.structs.replace(
            config, num_gpu_blocks=90, num_cpu_blocks=200, eviction_type="copy", enable_prefix_caching=caching
        )
        async with AsyncEngine(checkpoint, tight) as engine:
            found = [each.token_ids for each in await answer_all(engine, prompts, configs)]
            stats = engine.stats()
            assert stats.blocks_swapped_in > 0
            assert stats.host_blocks_held == 0
        assert found == expected
