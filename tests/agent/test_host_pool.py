"""Blocks between a device's pool and the host's: every byte arrives, in the order of the plans."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm.agent.cache import host_pool, pool
from asyncllm.agent.cache.host_pool import BlockTransfers, allocate_host_pool, staging_bytes
from asyncllm.agent.cache.layout import CacheLayout
from asyncllm.agent.cache.pool import HOST_POOL_BYTES, allocate_pool, host_blocks
from asyncllm.config import EngineConfig
from asyncllm.errors import ModelError
from asyncllm.protocol import Batch, SwapPlan
from tests.agent.mixed_cache import mixed_layout
from tests.agent.plain_swaps import swap_blocks
from tests.agent.tiny_model import tiny_agent, tiny_llama

CPU = torch.device("cpu")
NUM_BLOCKS, NUM_HOST_BLOCKS, BLOCK_SIZE = 12, 9, 4


def layout_of(dtype: torch.dtype = torch.float32) -> CacheLayout:
    """Of a model whose layers are alike."""
    return CacheLayout(tiny_llama().cache_specs, BLOCK_SIZE, dtype)


SIZE = layout_of().block_bytes


def pools(layout: CacheLayout) -> tuple[list[Tensor], list[Tensor]]:
    """A pool and its twin on the host, filled at random."""
    pool, host = allocate_pool(layout, NUM_BLOCKS, CPU), allocate_host_pool(layout, NUM_HOST_BLOCKS)
    for part in (*pool, *host):
        part.copy_(torch.randn(part.shape) * 50)
    return pool, host


def random_plan(dice: random.Random) -> SwapPlan:
    """Runs of neighbours and single blocks; a block that goes down may be the place of one that comes up."""
    down, up = dice.randint(0, NUM_HOST_BLOCKS), dice.randint(0, NUM_HOST_BLOCKS)
    first = dice.randint(0, NUM_HOST_BLOCKS - down)
    host = range(first, first + down) if dice.random() < 0.5 else dice.sample(range(NUM_HOST_BLOCKS), down)
    return SwapPlan(
        swap_out=list(zip(dice.sample(range(NUM_BLOCKS), down), host, strict=True)),
        swap_in=list(zip(dice.choices(range(NUM_HOST_BLOCKS), k=up), dice.sample(range(NUM_BLOCKS), up), strict=True)),
    )


def test_plain_copies_move_whole_blocks() -> None:
    (pool,), (host,) = pools(layout_of())
    before, host_before = pool.clone(), host.clone()
    swap_blocks(SwapPlan(swap_out=[(3, 5)], swap_in=[(5, 7), (1, 3)]), [pool], [host])
    assert torch.equal(host[5], before[:, 3])
    assert torch.equal(pool[:, 7], before[:, 3])
    assert torch.equal(pool[:, 3], host_before[1])
    untouched = [block for block in range(NUM_BLOCKS) if block not in (3, 7)]
    assert torch.equal(pool[:, untouched], before[:, untouched])
    assert torch.equal(host[[0, 1, 2, 3, 4, 6, 7, 8]], host_before[[0, 1, 2, 3, 4, 6, 7, 8]])


@pytest.mark.parametrize("layout", [layout_of(), layout_of(torch.bfloat16), mixed_layout()])
@pytest.mark.parametrize("staged", [1, 2, 4, 100])
def test_staged_copies_are_the_plain_ones(staged: int, layout: CacheLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "STAGING_BYTES", staged * layout.block_bytes)
    pool, host = pools(layout)
    expected, host_expected = [part.clone() for part in pool], [part.clone() for part in host]
    transfers = BlockTransfers(pool, host)
    dice = random.Random(staged)
    for _ in range(40):
        plan = random_plan(dice)
        transfers.launch(plan)
        swap_blocks(plan, expected, host_expected)
        assert all(map(torch.equal, pool, expected))
        assert all(map(torch.equal, host, host_expected))


def test_neighbours_go_together() -> None:
    assert list(host_pool._runs([4, 5, 6, 2, 3, 9, 8])) == [(0, 3, 4), (3, 2, 2), (5, 1, 9), (6, 1, 8)]
    assert list(host_pool._runs([])) == []


@pytest.mark.parametrize(("head_dim", "dtype"), [(16, torch.int64), (6, torch.int32), (3, torch.int16)])
def test_words_are_as_wide_as_a_head_allows(head_dim: int, dtype: torch.dtype) -> None:
    assert host_pool._words(torch.zeros(2, head_dim, dtype=torch.bfloat16)).dtype == dtype
    assert host_pool._words(torch.zeros(2, 3, dtype=torch.uint8)).dtype == torch.uint8


def test_staging_takes_memory_only_where_blocks_may_go_to_the_host() -> None:
    assert staging_bytes(EngineConfig(block_size=BLOCK_SIZE), layout_of()) == 0
    config = EngineConfig(block_size=BLOCK_SIZE, num_cpu_blocks=1)
    taken = staging_bytes(config, layout_of())
    assert host_pool.STAGING_BYTES - SIZE < taken <= host_pool.STAGING_BYTES
    assert taken % SIZE == 0


def count(free: int | None = None, num_blocks: int = 10**9, **settings: Any) -> int:
    config = EngineConfig(block_size=BLOCK_SIZE, **settings).checked()
    with pytest.MonkeyPatch.context() as patch:
        if free is not None:
            patch.setattr(pool, "available_memory", lambda device: free)
        return host_blocks(config, layout_of(), num_blocks)


class TestSize:
    def test_none_unless_asked_for(self) -> None:
        assert count() == 0

    @pytest.mark.parametrize("eviction", ["copy", "recompute"])
    def test_a_number_is_taken_as_it_is(self, eviction: str) -> None:
        assert count(num_cpu_blocks=7, num_blocks=2, eviction_type=eviction) == 7

    def test_a_quarter_of_the_free_memory(self) -> None:
        assert count(free=41 * SIZE, eviction_type="copy") == 10

    def test_no_more_than_eight_gigabytes(self) -> None:
        assert count(free=2**40, eviction_type="copy") == HOST_POOL_BYTES // SIZE

    def test_no_more_than_the_device_has(self) -> None:
        assert count(free=2**40, num_blocks=5, eviction_type="copy") == 5

    @pytest.mark.parametrize("settings", [{"num_cpu_blocks": 9}, {"eviction_type": "copy"}])
    def test_what_does_not_fit_is_a_model_error_with_the_numbers(self, settings: dict[str, Any]) -> None:
        with pytest.raises(ModelError, match=r"blocks in host memory take .* MiB are free\. Lower num_cpu_blocks"):
            count(free=3 * SIZE, **settings)

    def test_memory_that_is_refused_is_a_model_error(self) -> None:
        with pytest.raises(ModelError, match="Lower num_cpu_blocks"):
            allocate_host_pool(layout_of(), 2**48)


@torch.inference_mode()
def test_an_agent_swaps_before_it_copies_and_computes() -> None:
    agent = tiny_agent(num_cpu_blocks=5, num_gpu_blocks=6)
    assert (agent.limits.num_host_blocks, agent.limits.min_copied_tokens) == (5, 1)
    (pool,) = agent._pool
    pool.copy_(torch.randn(pool.shape))
    before = pool.clone()
    swaps = SwapPlan(swap_out=[(0, 4)], swap_in=[(4, 1)])
    # A step of copies alone: block 0 goes down, comes up as 1, is copied to 0's neighbour 2, and 0 is written over.
    agent.step(Batch(step=0, starts=[], new_blocks=[], copies=[(1, 2), (3, 0)], decode=[], prefill=[], swaps=swaps))
    assert torch.equal(pool[:, 1], before[:, 0])
    assert torch.equal(pool[:, 2], before[:, 0])
    assert torch.equal(pool[:, 0], before[:, 3])


def test_an_agent_without_host_blocks() -> None:
    assert tiny_agent().limits.num_host_blocks == 0
