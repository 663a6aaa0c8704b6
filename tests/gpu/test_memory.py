"""Closing an engine gives the device's memory back; running out of it inside a prompt fails that prompt alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import AsyncEngine, GenerationConfig
from asyncllm.errors import RequestFailed
from asyncllm.models.decoder import DecoderLM
from tests.checkpoints import build_checkpoint
from tests.engine.waits import until
from tests.gpu.engines import DEVICE, answer_all, device_config, free_memory, random_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.anyio, pytest.mark.timeout(180)]

GREEDY = GenerationConfig(max_new_tokens=150, ignore_eos=True)
VOCAB = 320
MARK = 319
"""A token that only the prompt has that is to fail."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("models") / "llama"
    return str(build_checkpoint("llama", folder, max_position_embeddings=2048))


async def test_close_gives_the_memory_back(checkpoint: str) -> None:
    """Compiled kernels and libraries' workspaces stay with the process, so the first engine does not count."""
    before = 0
    for turn in range(4):
        engine = AsyncEngine(checkpoint, device_config(num_gpu_blocks=2**16, dtype="float32"))
        await engine.start()
        await answer_all(engine, random_prompts(turn, 8, 200, vocab_size=MARK), GREEDY)
        during = free_memory()
        await engine.close()
        del engine
        after = free_memory()
        if turn == 0:
            before = after
        if DEVICE != "cpu":
            # 65,536 blocks of 64 tokens, 2 layers, keys and values of 2 heads of 16 numbers of 4 bytes.
            assert after - during > 2**16 * 64 * 2 * 2 * 2 * 16 * 4
        assert abs(after - before) < 2**25, f"{before - after} bytes are not free any more after engine {turn}"


async def test_an_engine_that_fails_to_start_gives_the_memory_back(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncEngine(checkpoint, device_config()) as engine:
        await engine.generate(input_ids=[5], gen_config=GREEDY)
    del engine
    before = free_memory()

    def fail(*args: Any) -> None:
        raise torch.OutOfMemoryError("out of memory, says the test")

    monkeypatch.setattr(DecoderLM, "_layers", fail)
    with pytest.raises(Exception, match="out of memory"):
        async with AsyncEngine(checkpoint, device_config(num_gpu_blocks=2**16)) as engine:
            await engine.generate(input_ids=[5], gen_config=GREEDY)
    assert before - free_memory() < 2**25


def run_out_of_memory(monkeypatch: pytest.MonkeyPatch, where: Callable[[torch.Tensor], bool]) -> list[int]:
    """From now on a forward pass over input ids for which `where` holds raises. Returns their growing counts."""
    layers = DecoderLM._layers
    failed: list[int] = []

    def limited(self: DecoderLM, inputs: Any, *rest: Any) -> Any:
        if where(inputs.input_ids):
            failed.append(len(inputs.input_ids))
            raise torch.OutOfMemoryError("out of memory, says the test")
        return layers(self, inputs, *rest)

    monkeypatch.setattr(DecoderLM, "_layers", limited)
    return failed


async def test_a_chunk_that_does_not_fit_is_computed_in_halves(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt * 20 for prompt in random_prompts(7, 3, 9, vocab_size=MARK)]
    prompts.append(random_prompts(8, 1, 2, vocab_size=MARK)[0] * 150)
    config = device_config(dtype="float32", max_prefill_token_num=400)
    async with AsyncEngine(checkpoint, config) as engine:
        expected = await answer_all(engine, prompts, GREEDY)
    async with AsyncEngine(checkpoint, config) as engine:
        failed = run_out_of_memory(monkeypatch, lambda ids: len(ids) > 220)
        actual = await answer_all(engine, prompts, GREEDY)
        assert failed
        assert engine.stats().requests_failed == 0
    assert [each.token_ids for each in actual] == [each.token_ids for each in expected]


async def test_a_prompt_that_does_not_fit_in_halves_fails_alone(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1,200 tokens in one step, as a chunk of 1,024 or fewer is computed by a graph, which has its memory; beside
    whole answers, as streams are not kept waiting for so many."""
    prompts = random_prompts(9, 5, 200, vocab_size=MARK)
    config = device_config(dtype="float32")
    async with AsyncEngine(checkpoint, config) as engine:
        expected = await answer_all(engine, prompts, GREEDY)
    async with AsyncEngine(checkpoint, config) as engine:
        failed = run_out_of_memory(monkeypatch, lambda ids: int((ids == MARK).sum()) > 50)
        running = asyncio.create_task(answer_all(engine, prompts, GREEDY))
        await until(lambda: engine.stats().prefill_tokens == sum(map(len, prompts)))
        # All prompts are computed; from here on they are decode rows beside the one that fails.
        with pytest.raises(RequestFailed, match="memory"):
            await engine.generate(input_ids=[MARK] * 1200, gen_config=GREEDY)
        assert len(failed) == 2
        assert failed[1] < failed[0]
        assert [each.token_ids for each in await running] == [each.token_ids for each in expected]

        # The engine and the failed prompt's blocks are of use again.
        monkeypatch.undo()
        assert (await engine.generate(input_ids=[MARK] * 1200, gen_config=GREEDY)).finish_reason == "length"
        stats = engine.stats()
        assert (stats.requests_failed, stats.blocks_held) == (1, 0)


async def test_cancelling_a_start_gives_the_memory_back(checkpoint: str) -> None:
    async with AsyncEngine(checkpoint, device_config()) as engine:
        await engine.generate(input_ids=[5], gen_config=GREEDY)
    del engine
    before = free_memory()
    for delay in (0.0, 0.1, 0.4):
        engine = AsyncEngine(checkpoint, device_config(num_gpu_blocks=2**16))
        starting = asyncio.create_task(engine.start())
        await asyncio.sleep(delay)
        starting.cancel()
        await asyncio.wait([starting])
        await engine.close()
        del engine, starting
    for _ in range(100):
        # The loads overlapped, and each thread that multiplies matrices at the same time gets a workspace that stays.
        if before - free_memory() < 2**28:
            return
        await asyncio.sleep(0.1)  # loading ends in its own thread
    raise AssertionError(f"{before - free_memory()} bytes are not free any more")
