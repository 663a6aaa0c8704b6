"""On a GPU: sleep gives the memory back, waking and new weights give the answers of an engine that began so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncllm import AsyncEngine, GenerationConfig
from asyncllm.errors import InvalidParameter, ModelError
from tests.engine.waits import settle, until
from tests.gpu.engines import DEVICE, answer_all, device_config, free_memory, random_prompts, wide_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.anyio, pytest.mark.timeout(240)]

GREEDY = GenerationConfig(max_new_tokens=60, ignore_eos=True)
PROMPTS = random_prompts(3, 8, 200)
BLOCKS = 4096
POOL_BYTES = BLOCKS * 64 * 3 * 2 * 4 * 64 * 2
"""Blocks of 64 tokens, 3 layers, keys and values of 4 heads of 64 numbers of 2 bytes: 805 MB."""
WEIGHT_BYTES = 60 * 2**20
"""Less than the checkpoint has."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("wide")
    return [wide_checkpoint("llama", root / str(seed), seed=seed) for seed in (0, 1)]


async def tokens(engine: AsyncEngine) -> list[list[int]]:
    """From an empty prefix cache on, always by the same steps."""
    return [response.token_ids for response in await answer_all(engine, PROMPTS, GREEDY)]


@pytest.mark.parametrize("num_cpu_blocks", [0, 64])
async def test_sleep_gives_the_memory_back_and_changes_no_answer(folders: list[Path], num_cpu_blocks: int) -> None:
    config = device_config(num_gpu_blocks=BLOCKS, num_cpu_blocks=num_cpu_blocks)
    async with AsyncEngine(str(folders[0]), config) as engine:
        expected = await tokens(engine)
        await engine.sleep()
        # Until then the allocator keeps what the start has measured and compiled with.
        await engine.wake()
        assert await tokens(engine) == expected
        await settle(engine)
        before = free_memory()
        for level in (1, 2, 1):
            await engine.sleep(level)
            asleep = free_memory()
            assert engine.stats().sleep_level == level
            if DEVICE != "cpu":
                assert asleep - before > POOL_BYTES + WEIGHT_BYTES
            await engine.wake()
            assert await tokens(engine) == expected
            await settle(engine)
            assert abs(free_memory() - before) < 2**25, "each time as much"


async def test_parts_wake_one_by_one(folders: list[Path]) -> None:
    async with AsyncEngine(str(folders[0]), device_config(num_gpu_blocks=BLOCKS)) as engine:
        expected = await tokens(engine)
        for level in (1, 2):
            await engine.sleep(level)
            with pytest.raises(InvalidParameter, match="Wake 'weights' first"):
                await engine.wake(["kv_cache"])
            asleep = free_memory()
            await engine.wake(["weights"])
            if DEVICE != "cpu":
                assert WEIGHT_BYTES < asleep - free_memory() < POOL_BYTES
            await engine.wake(["kv_cache"])
            assert await tokens(engine) == expected


async def test_running_requests_go_on_after_it(folders: list[Path]) -> None:
    config = device_config(batch_invariant=True, num_gpu_blocks=256)
    async with AsyncEngine(str(folders[0]), config) as engine:
        expected = await tokens(engine)
    async with AsyncEngine(str(folders[0]), config) as engine:
        tasks = [
            asyncio.create_task(engine.generate(input_ids=prompt, gen_config=GREEDY).response()) for prompt in PROMPTS
        ]
        for steps in (5, 20, 40):
            await until(lambda: engine.stats().steps >= steps)  # noqa: B023
            await engine.sleep()
            await engine.wake()
        assert [(await task).token_ids for task in tasks] == expected
        assert engine.stats().preemptions > 0
        await settle(engine)


@pytest.mark.parametrize("where", [lambda tensor: tensor, lambda tensor: tensor.to(DEVICE)], ids=["host", "device"])
async def test_new_weights_answer_as_their_own_checkpoint(
    folders: list[Path], where: Callable[[Tensor], Tensor]
) -> None:
    """In place: the graphs are those of the start."""
    first, second = (load_file(folder / "model.safetensors") for folder in folders)
    async with AsyncEngine(str(folders[1]), device_config()) as engine:
        expected = await tokens(engine)
    async with AsyncEngine(str(folders[0]), device_config()) as engine:
        before = await tokens(engine)
        assert before != expected
        await engine.update_weights((name, where(tensor)) for name, tensor in second.items())
        assert await tokens(engine) == expected
        await engine.sleep()
        await engine.update_weights({name: where(tensor).float() for name, tensor in first.items()})
        await engine.wake()
        assert await tokens(engine) == before
        await engine.sleep(2)
        await engine.update_weights({name: where(tensor) for name, tensor in second.items()})
        await engine.wake()
        assert await tokens(engine) == expected


async def test_a_device_without_room_lets_it_sleep_on(folders: list[Path]) -> None:
    async with AsyncEngine(str(folders[0]), device_config(num_gpu_blocks=BLOCKS)) as engine:
        expected = await tokens(engine)
        await engine.sleep()
        hog = torch.empty(free_memory() - 2**28, dtype=torch.uint8, device=DEVICE)
        with pytest.raises(ModelError, match="KV"):
            await engine.wake()
        assert engine.stats().sleep_level == 1
        del hog
        torch.cuda.empty_cache()
        await engine.wake()
        assert await tokens(engine) == expected
