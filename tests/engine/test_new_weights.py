"""Whole engines on a CPU in float32: after new weights, or a sleep, answers are those of an engine that began so."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig
from asyncllm.agent.executor import StepExecutor
from asyncllm.agent.model_agent import ModelAgent
from asyncllm.errors import InvalidParameter
from asyncllm.testing import ByteTokenizer, FakeTemplate
from asyncllm.types import Response
from tests.agent.tiny_model import AheadAgent
from tests.checkpoints import build_checkpoint
from tests.engine.waits import settle, until

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop, pytest.mark.timeout(120)]

dice = Random(5)
PROMPTS = [[dice.randrange(256) for _ in range(length)] for length in (9, 41, 4, 17, 33)]
GREEDY = GenerationConfig(max_new_tokens=24, ignore_eos=True)
SAMPLED = GenerationConfig(max_new_tokens=24, ignore_eos=True, top_k=0, temperature=1.0, random_seed=1)

AGENTS = pytest.mark.parametrize("agent", [ModelAgent, AheadAgent])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("llama")
    return [
        build_checkpoint("llama", root / str(seed), seed=seed, max_position_embeddings=4096, vocab_size=320)
        for seed in (0, 1)
    ]


@pytest.fixture(scope="module")
def weights(folders: list[Path]) -> dict[str, Tensor]:
    """Of the second checkpoint."""
    return load_file(folders[1] / "model.safetensors")


def new_engine(folder: Path, *, agent: type[ModelAgent] = ModelAgent, **fields: Any) -> AsyncEngine:
    settings = {"device_type": "cpu", "block_size": 4, "max_batch_size": 6, "num_gpu_blocks": 400, **fields}
    config = EngineConfig(**{"max_prefill_token_num": 16, **settings})
    executor = StepExecutor(lambda: agent(config.checked(), folder))
    return AsyncEngine("tiny", config, executor=executor, tokenizer=ByteTokenizer(), chat_template=FakeTemplate())


async def answer(engine: AsyncEngine, prompt: list[int], config: GenerationConfig = GREEDY) -> list[int]:
    return (await engine.generate(input_ids=prompt, gen_config=config)).token_ids


def start_all(engine: AsyncEngine) -> list[asyncio.Task[Response]]:
    return [
        asyncio.create_task(engine.generate(input_ids=prompt, gen_config=config).response())
        for prompt in PROMPTS
        for config in (GREEDY, SAMPLED)
    ]


async def answers(engine: AsyncEngine) -> list[list[int]]:
    return [(await task).token_ids for task in start_all(engine)]


@AGENTS
async def test_answers_are_those_of_the_second_checkpoint(
    folders: list[Path], weights: dict[str, Tensor], agent: Any
) -> None:
    """Although the prompts were answered before, and their blocks are cached."""
    async with new_engine(folders[1], agent=agent) as engine:
        expected = await answers(engine)
    async with new_engine(folders[0], agent=agent) as engine:
        before = await answers(engine)
        assert all(old != new for old, new in zip(before, expected, strict=True))
        await engine.update_weights(weights)
        assert await answers(engine) == expected
        await engine.update_weights(load_file(folders[0] / "model.safetensors").items())
        assert await answers(engine) == before
        await settle(engine)


@AGENTS
async def test_what_the_host_has_cached_is_not_used(
    folders: list[Path], weights: dict[str, Tensor], agent: Any
) -> None:
    async with new_engine(folders[1], agent=agent) as engine:
        expected = await answer(engine, PROMPTS[1])
    async with new_engine(folders[0], agent=agent, num_gpu_blocks=20, num_cpu_blocks=200) as engine:
        await answers(engine)
        before = engine.stats().blocks_swapped_in
        await answer(engine, PROMPTS[1])
        assert engine.stats().blocks_swapped_in > before, "the host has it"
        await answers(engine)
        await engine.update_weights(weights)
        assert engine.stats().host_blocks_cached == 0
        assert await answer(engine, PROMPTS[1]) == expected


async def test_swapped_sequences_are_computed_again(folders: list[Path]) -> None:
    async with new_engine(folders[0]) as engine:
        expected = await answers(engine)
    config = {"num_gpu_blocks": 30, "num_cpu_blocks": 200, "eviction_type": "copy"}
    async with new_engine(folders[0], **config) as engine:
        tasks = start_all(engine)
        for level in (1, 2, 1):
            await until(lambda: engine.stats().swapped)
            await engine.sleep(level)
            stats = engine.stats()
            assert (stats.swapped, stats.host_blocks_held, stats.blocks_held) == (0, 0, 0)
            await engine.wake()
        assert [(await task).token_ids for task in tasks] == expected
        await settle(engine)


async def test_a_sessions_next_turn_is_the_new_models(folders: list[Path], weights: dict[str, Tensor]) -> None:
    async with new_engine(folders[0]) as engine, new_engine(folders[1]) as second, engine.session() as session:
        await session.chat("a first turn of some length", GREEDY)
        fork = session.fork()
        stale = await fork.chat("the next", GREEDY)
        await engine.update_weights(weights)
        turn = session.chat("the next", GREEDY)
        response = await turn
        assert response.cached_token_len == 0
        assert response.token_ids == await answer(second, turn.prompt_token_ids)
        assert response.token_ids != stale.token_ids


@AGENTS
async def test_a_running_request_goes_on_from_its_tokens_and_a_waiting_one_has_the_new_model(
    folders: list[Path], weights: dict[str, Tensor], agent: Any
) -> None:
    long = GenerationConfig(max_new_tokens=100, ignore_eos=True)
    async with new_engine(folders[0], agent=agent, max_batch_size=1) as engine, new_engine(folders[1]) as second:
        old = await answer(engine, PROMPTS[0], long)
        running = engine.generate(input_ids=PROMPTS[0], gen_config=long)
        tokens = (await anext(running)).token_ids
        waiting = asyncio.create_task(answer(engine, PROMPTS[1]))
        while len(tokens) < 10:
            tokens += (await anext(running)).token_ids
        await engine.update_weights(weights)
        tokens += [token async for chunk in running for token in chunk.token_ids]
        kept = next(index for index in range(100) if tokens[index] != old[index])
        assert kept >= 10
        # The two models may agree on some tokens after the change.
        while tokens[kept:] != (await answer(second, PROMPTS[0] + tokens[:kept], long))[: 100 - kept]:
            kept -= 1
            assert kept >= 10, "the answer does not go on as the second model goes on from any of its first tokens"
        assert await waiting == await answer(second, PROMPTS[1])


async def test_scores_are_of_one_model(folders: list[Path], weights: dict[str, Tensor]) -> None:
    """A prompt in many chunks, with new weights in the midst of it."""
    prompt = PROMPTS[1] * 40
    async with new_engine(folders[1], num_gpu_blocks=1000) as engine:
        expected = await engine.get_ppl(prompt)
        hidden = await engine.embed(prompt, pooling="mean")
    async with new_engine(folders[0], num_gpu_blocks=1000) as engine:
        for score, value in ((engine.get_ppl(prompt), expected), (engine.embed(prompt, pooling="mean"), hidden)):
            steps = engine.stats().steps
            task = asyncio.create_task(score)  # type: ignore[arg-type, var-annotated]
            await until(lambda: engine.stats().steps > steps + 5)  # noqa: B023
            await engine.update_weights(weights)
            assert not task.done(), "it was too late"
            found = await task
            if isinstance(value, float):
                assert found == value
            else:
                assert found.values == value.values
            await engine.update_weights(load_file(folders[0] / "model.safetensors"))


async def test_weights_that_do_not_fit_disturb_no_request(folders: list[Path], weights: dict[str, Tensor]) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    async with new_engine(folders[0]) as engine:
        expected = await answers(engine)
        tasks = start_all(engine)
        await until(lambda: engine.stats().running)
        for wrong in (weights[name][1:], weights[name].int(), None):
            with pytest.raises(InvalidParameter, match=name):
                await engine.update_weights({**weights, name: wrong})
        with pytest.raises(InvalidParameter, match="nobody"):
            await engine.update_weights({**weights, "nobody.weight": weights[name]})
        assert [(await task).token_ids for task in tasks] == expected
        stats = engine.stats()
        assert (stats.preemptions, stats.weight_updates) == (0, 0)
        assert stats.blocks_cached > 0


@AGENTS
@pytest.mark.parametrize("level", [1, 2])
async def test_a_sleep_changes_no_answer(folders: list[Path], agent: Any, level: int) -> None:
    several = GenerationConfig(max_new_tokens=20, n=3, top_k=0, temperature=1.0, random_seed=4, ignore_eos=True)
    async with new_engine(folders[0], agent=agent, max_batch_size=4) as engine:
        expected = await answers(engine)
        choices = (await engine.generate(input_ids=PROMPTS[3], gen_config=several)).choices
    async with new_engine(folders[0], agent=agent, max_batch_size=4) as engine:
        tasks = start_all(engine)
        siblings = asyncio.create_task(engine.generate(input_ids=PROMPTS[3], gen_config=several).response())
        for steps in range(8, 64, 8):
            await until(lambda: engine.stats().steps >= steps)  # noqa: B023
            await engine.sleep(level)
            stats = engine.stats()
            assert (stats.running, stats.blocks_free) == (0, stats.blocks_total)
            await engine.wake()
        assert [(await task).token_ids for task in tasks] == expected
        assert [choice.token_ids for choice in (await siblings).choices] == [each.token_ids for each in choices]
        await settle(engine)


async def test_new_weights_while_it_sleeps(folders: list[Path], weights: dict[str, Tensor]) -> None:
    async with new_engine(folders[1]) as engine:
        expected = await answers(engine)
    async with new_engine(folders[0]) as engine:
        tasks = start_all(engine)
        await engine.sleep(2)
        with pytest.raises(InvalidParameter, match="Pass all of them"):
            await engine.update_weights(dict(list(weights.items())[:2]))
        await engine.update_weights(weights)
        await engine.wake()
        found = [(await task).token_ids for task in tasks]
        assert found == expected
