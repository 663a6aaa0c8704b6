"""Whole engines over a cache of states: shared, preempted, copied, forked and kept blocks change no answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig
from asyncllm.agent.cache.layout import CacheLayout
from asyncllm.agent.cache.pool import pool_blocks
from asyncllm.testing.fake_device import StepViolation
from tests.engine.driver import Driver
from tests.models.parity import Case, folder_of, open_case, random_tokens, reference

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop, pytest.mark.timeout(120)]

CASE = Case("lfm2", "default")
dice = Random(3)
PROMPTS = [[dice.randrange(4, 320) for _ in range(length)] for length in (9, 30, 4, 17)]
GREEDY = GenerationConfig(max_new_tokens=12, ignore_eos=True)
ROOM, TIGHT = 200, 17


@pytest.fixture(scope="module")
def folder() -> Path:
    return folder_of(CASE)


def new_engine(folder: Path, **fields: Any) -> AsyncEngine:
    settings = {"device_type": "cpu", "block_size": 4, "max_batch_size": 6, "max_prefill_token_num": 16}
    return AsyncEngine(str(folder), EngineConfig(**{**settings, "num_gpu_blocks": ROOM, **fields}))


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[AsyncEngine]:
    async with new_engine(folder) as engine:
        yield engine


def expected(prompt: list[int]) -> list[int]:
    """transformers' greedy answer."""
    tokens = list(prompt)
    for _ in range(GREEDY.max_new_tokens or 0):
        tokens.append(int(reference(CASE, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def answers() -> list[list[int]]:
    return [expected(prompt) for prompt in PROMPTS]


async def answer_all(engine: AsyncEngine) -> list[list[int]]:
    responses = await asyncio.gather(*(engine.generate(input_ids=each, gen_config=GREEDY) for each in PROMPTS))
    return [response.token_ids for response in responses]


async def test_chunks_and_a_mixed_batch(engine: AsyncEngine, answers: list[list[int]]) -> None:
    assert await answer_all(engine) == answers


async def test_what_follows_a_cached_beginning_starts_from_the_state_at_its_border(engine: AsyncEngine) -> None:
    prompt = random_tokens(9, 31)
    first = await engine.generate(input_ids=prompt, gen_config=GREEDY)
    second = await engine.generate(input_ids=prompt, gen_config=GREEDY)
    assert (first.cached_token_len, second.cached_token_len) == (0, 28)
    assert first.token_ids == second.token_ids == expected(prompt)


@pytest.mark.parametrize("fields", [{}, {"eviction_type": "copy", "num_cpu_blocks": 40}], ids=["recompute", "copy"])
async def test_preemption(folder: Path, fields: dict[str, Any], answers: list[list[int]]) -> None:
    async with new_engine(folder, num_gpu_blocks=TIGHT, **fields) as engine:
        assert await answer_all(engine) == answers
        assert engine.stats().preemptions > 0
        if fields:
            assert engine.stats().blocks_swapped_in > 0


@pytest.mark.parametrize("caching", [True, False])
async def test_several_answers_to_one_prompt(folder: Path, caching: bool) -> None:
    """They share the full blocks of the prompt, and compute what is behind them anew."""
    prompt = PROMPTS[1]
    config = GenerationConfig(
        max_new_tokens=8, ignore_eos=True, temperature=1.0, top_k=0, random_seed=5, n=3, logprobs=1
    )
    async with new_engine(folder, enable_prefix_caching=caching) as engine:
        response = await engine.generate(input_ids=prompt, gen_config=config)
    assert len({tuple(choice.token_ids) for choice in response.choices}) == 3
    for choice in response.choices:
        tokens = [*prompt, *choice.token_ids]
        scores = reference(CASE, tokens)[len(prompt) - 1 : -1].log_softmax(-1)
        for token, row, found in zip(choice.token_ids, scores, choice.logprobs or [], strict=True):
            assert abs(found[token] - float(row[token])) < 1e-4


async def test_a_session_and_its_fork(folder: Path) -> None:
    """Turns on kept blocks, and the same turns on none."""
    answers = []
    for kept in (True, False):
        async with new_engine(folder, enable_prefix_caching=kept) as engine:
            session = engine.session()
            await session.chat("Once upon a time there was a small engine.", GREEDY, do_preprocess=False)
            fork = session.fork()
            turns = [each.chat("Tell me of the sea.", GREEDY, do_preprocess=False) for each in (session, fork)]
            second = [await each.response() for each in turns]
            assert [each.cached_token_len > 0 for each in second] == [kept, kept]
            answers += [each.token_ids for each in second]
    assert answers == [answers[0]] * 4


@pytest.mark.parametrize("keeps_state", [True, False])
def test_the_fake_device_finds_a_state_that_has_gone_on(keeps_state: bool) -> None:
    """A sibling's last block is copied where blocks hold lines alone, and a device with states takes it for a fault."""
    driver = Driver(num_blocks=40, block_size=4, num_slots=6, max_batch_size=4, keeps_state=True)
    driver.scheduler.sharing._keeps_state = keeps_state
    driver.submit([1, 2, 3, 4, 5, 6], 6, seeds=[1, 2, 3])
    if keeps_state:
        driver.drain()
    else:
        with pytest.raises(StepViolation, match="from a state of block"):
            driver.drain()


@pytest.mark.parametrize(("family", "warned"), [("qwen3_next", True), ("lfm2", False)])
def test_states_that_outweigh_their_blocks_are_told_of(
    family: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    specs = open_case(Case(family, "default")).cache_specs
    layout = CacheLayout(specs, 16, torch.float32)
    pool_blocks(EngineConfig(), layout, max_position=128, device=torch.device("cpu"))
    assert ("A larger block_size" in caplog.text) == warned
    assert 0 < layout.state_bytes < layout.block_bytes
