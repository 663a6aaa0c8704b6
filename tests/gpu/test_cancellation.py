"""Ten thousand requests, most of them left at a random moment by a random way: nothing stays behind.

All blocks come back, each request ends once, no task is left, and the device holds no more memory after the last
thousands than after the first.
"""

from __future__ import annotations

import asyncio
import gc
import random
from pathlib import Path

import pytest
import torch

from asyncllm import AsyncEngine, GenerationConfig
from asyncllm.engine.requests.generation import Generation
from tests.checkpoints import build_checkpoint
from tests.gpu.engines import DEVICE, device_config

pytestmark = [pytest.mark.gpu, pytest.mark.anyio, pytest.mark.timeout(300)]

REQUESTS = 10_000
NUM_VISITORS = 400
ROUNDS = 5


class Visitor:
    """Sends requests one after another, and leaves each as the dice fall."""

    def __init__(self, engine: AsyncEngine, seed: int) -> None:
        self.engine = engine
        self.draw = random.Random(seed)
        self.wrong: list[str] = []

    async def visit(self, count: int) -> None:
        for _ in range(count):
            leave = self.draw.choice([self.read_all, self.break_off, self.time_out, self.be_cancelled, self.close])
            await leave()

    def generate(self) -> Generation:
        draw = self.draw
        prompt = [draw.randrange(4, 320) for _ in range(draw.choice([1, 20, 70, 190]))]
        config = GenerationConfig(
            max_new_tokens=draw.randint(1, 40),
            ignore_eos=draw.random() < 0.5,
            n=draw.choice([1, 1, 1, 2]),
            top_k=draw.choice([0, 1, 5]),
            repetition_penalty=draw.choice([1.0, 1.0, 1.2]),
            logprobs=draw.choice([None, None, 3]),
        )
        return self.engine.generate(input_ids=prompt, gen_config=config)

    async def read_all(self) -> None:
        response = await self.generate()
        if response.finish_reason not in ("stop", "length"):
            self.wrong.append(f"ended by {response.finish_reason}")

    async def break_off(self) -> None:
        left = self.draw.randrange(6)
        async for _ in self.generate():
            if not left:
                break
            left -= 1

    async def time_out(self) -> None:
        try:
            async with asyncio.timeout(self.draw.random() * 0.05):
                await self.generate()
        except TimeoutError:
            pass

    async def be_cancelled(self) -> None:
        task = asyncio.create_task(self.generate().response())
        await asyncio.sleep(self.draw.choice([0, 0, 0.001, 0.02]))
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is not None:
            self.wrong.append(repr(task.exception()))

    async def close(self) -> None:
        generation = self.generate()
        await generation.start()
        await asyncio.sleep(self.draw.choice([0, 0.001, 0.01]))
        await generation.aclose()


async def settle(engine: AsyncEngine) -> None:
    """Wait until nothing is in flight. Abandoned requests end within a step."""
    async with asyncio.timeout(20):
        while True:
            stats = engine.stats()
            ended = stats.requests_finished + stats.requests_cancelled + stats.requests_failed
            if stats.requests_started == ended and not stats.steps_in_flight:
                return
            await asyncio.sleep(0.01)


def device_memory() -> tuple[int, int]:
    """Bytes that tensors take, and bytes that torch holds."""
    if DEVICE == "cpu":
        return 0, 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    return str(build_checkpoint("llama", tmp_path, max_position_embeddings=512))


async def test_ten_thousand_requests_left_at_random_moments(checkpoint: str) -> None:
    config = device_config(dtype="bfloat16", max_batch_size=128, num_gpu_blocks=400, max_prefill_token_num=512)
    async with AsyncEngine(checkpoint, config) as engine:
        tasks_before = asyncio.all_tasks()
        memory = []
        for round_number in range(ROUNDS):
            visitors = [Visitor(engine, round_number * NUM_VISITORS + index) for index in range(NUM_VISITORS)]
            async with asyncio.TaskGroup() as group:
                for visitor in visitors:
                    group.create_task(visitor.visit(REQUESTS // ROUNDS // NUM_VISITORS))
            assert [wrong for visitor in visitors for wrong in visitor.wrong] == []
            del visitors, visitor
            gc.collect()
            await settle(engine)
            engine.check_idle()
            assert asyncio.all_tasks() == tasks_before
            memory.append(device_memory())
        stats = engine.stats()
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
        assert stats.blocks_held == 0
        assert stats.requests_failed == 0
        assert stats.requests_finished > REQUESTS / 10
        assert stats.requests_cancelled > REQUESTS / 10
        allocated, reserved = zip(*memory, strict=True)
        assert allocated[-1] - allocated[0] < 2**20, f"tensors take {allocated} bytes after each round"
        assert reserved[-1] - reserved[1] < 2**26, f"torch holds {reserved} bytes after each round"
