"""Two ranks on CPUs, whole: the answers of one process, whatever is asked for, and nothing left when one dies."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncllm import AsyncEngine, GenerationConfig
from asyncllm.errors import EngineDead, InvalidParameter, UnsupportedModel
from asyncllm.ranks.messages import RemoteError
from tests.checkpoints import build_checkpoint
from tests.quant.formats import awq, write
from tests.ranks.engines import LONG, ranks, settings, soon

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop, pytest.mark.timeout(120)]

WAYS = [
    GenerationConfig(max_new_tokens=8, temperature=0.0),
    GenerationConfig(max_new_tokens=8, top_k=0, temperature=0.9, random_seed=3, logprobs=3),
    GenerationConfig(max_new_tokens=8, top_k=0, top_p=0.9, min_p=0.01, random_seed=4, repetition_penalty=1.2),
    GenerationConfig(max_new_tokens=8, top_k=30, top_p=0.8, random_seed=5, logit_bias={7: 2.0}, prompt_logprobs=1),
]
"""Of sampling: each rank draws some of the rows, from whole logits."""

LISTED_WAYS = [
    GenerationConfig(max_new_tokens=6, temperature=0.0),
    GenerationConfig(max_new_tokens=6, top_k=0, temperature=0.9, random_seed=6),
    GenerationConfig(max_new_tokens=6, top_k=40, top_p=0.9, random_seed=7),
]
"""Those for which ranks tell each other a few tokens of a row."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("llama")
    return [build_checkpoint("llama", root / str(seed), seed=seed, vocab_size=321) for seed in (0, 1)]


async def tokens_of(engine: AsyncEngine, counts: tuple[int, ...] = (1, 4, 9)) -> list[list[int]]:
    found = []
    for ways in (WAYS, LISTED_WAYS):
        tasks = [
            asyncio.create_task(engine.generate(input_ids=[7, 8, 9, 200, 31] * count, gen_config=config).response())
            for count in counts
            for config in ways
        ]
        found += [(await task).token_ids for task in tasks]
    return found


async def test_answers_are_those_of_one_rank(folders: list[Path]) -> None:
    weights = load_file(folders[1] / "model.safetensors")
    found: list[Any] = []
    for tp in (1, 2):
        async with AsyncEngine(str(folders[0]), settings(isolated=False, tp=tp, block_size=4)) as engine:
            before = await tokens_of(engine)
            logits = await engine.get_logits([5, 9, 7])
            score = await engine.get_ppl([5, 6, 7, 8, 9])
            await engine.sleep(level=2)
            await engine.wake()
            assert await tokens_of(engine) == before
            await engine.update_weights(weights)
            after = await tokens_of(engine)
            assert after != before
            assert len(ranks()) == (0 if tp == 1 else 2)
            found.append((before, after, logits, score))
    assert found[0][:2] == found[1][:2]
    torch.testing.assert_close(found[0][2], found[1][2], rtol=1e-4, atol=1e-4)
    assert found[0][3] == pytest.approx(found[1][3], rel=1e-5)
    assert ranks() == []


async def test_four_ranks_of_two_key_heads_give_the_tokens_of_one(folders: list[Path]) -> None:
    found = []
    for tp in (1, 4):
        async with AsyncEngine(str(folders[0]), settings(isolated=False, tp=tp)) as engine:
            found.append(await tokens_of(engine, (2,)))
    assert found[0] == found[1]


async def test_ranks_with_whole_experts_give_the_tokens_of_one(tmp_path: Path) -> None:
    folder, found = str(build_checkpoint("mixtral", tmp_path, vocab_size=321)), []
    for fields in ({"isolated": False}, {"tp": 2, "ep": 2}):
        async with AsyncEngine(folder, settings(**fields)) as engine:
            found.append(await tokens_of(engine, (1, 4)))
    assert found[0] == found[1]
    with pytest.raises(InvalidParameter, match="ep is 4 and tp 2"):
        AsyncEngine(folder, settings(tp=2, ep=4))


@pytest.fixture
def quantized(tmp_path: Path) -> str:
    dense = build_checkpoint("llama", tmp_path / "dense", hidden_size=128, intermediate_size=128)
    return str(write(dense, tmp_path / "model", awq(32)))


async def test_quantized_weights_and_cache_give_the_tokens_of_one_rank(quantized: str) -> None:
    found = []
    for tp in (1, 2):
        async with AsyncEngine(quantized, settings(isolated=False, tp=tp, quant_policy=4)) as engine:
            before = await tokens_of(engine, (2,))
            await engine.sleep(level=2)
            await engine.wake()
            assert await tokens_of(engine, (2,)) == before
            with pytest.raises(InvalidParameter, match="quantized"):
                await engine.update_weights({"model.layers.0.mlp.down_proj.weight": torch.zeros(128, 128)})
            found.append(before)
    assert found[0] == found[1]


async def test_a_rank_that_dies_ends_the_others(folders: list[Path]) -> None:
    """The first one, which has the results; `test_killed` takes the second."""
    async with AsyncEngine(str(folders[0]), settings(tp=2)) as engine:
        tasks = [asyncio.create_task(engine.generate("Hi", LONG).response()) for _ in range(4)]
        await soon(lambda: engine.stats().steps > 3)
        os.kill(min(ranks()), signal.SIGKILL)
        for error in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60):
            assert isinstance(error, EngineDead)
            assert isinstance(error.__cause__, RemoteError)
        await soon(lambda: not ranks())


async def test_numbers_that_cannot_be_divided_are_refused(folders: list[Path]) -> None:
    with pytest.raises(UnsupportedModel, match="tp=3"):
        await AsyncEngine(str(folders[0]), settings(tp=3)).start()
    assert ranks() == []
