"""Whole engines over a cache of latents, and over one of latents and index keys: shared, preempted, copied, forked and
kept blocks change no answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig, kernels
from tests.models.parity import Case, folder_of, open_case, random_tokens, reference

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop, pytest.mark.timeout(120)]

DENSE, SPARSE = Case("deepseek_v3", "default"), Case("glm_moe_dsa", "default")
dice = Random(3)
PROMPTS = [[dice.randrange(4, 320) for _ in range(length)] for length in (9, 30, 4, 17)]
GREEDY = GenerationConfig(max_new_tokens=24, ignore_eos=True)
ROOM, TIGHT = 200, 20


@pytest.fixture(scope="module", params=[DENSE, SPARSE], ids=["dense", "sparse"])
def case(request: pytest.FixtureRequest) -> Case:
    """The index of the sparse one chooses 20 tokens."""
    assert isinstance(request.param, Case)
    return request.param


@pytest.fixture(scope="module")
def folder(case: Case) -> Path:
    return folder_of(case)


def new_engine(folder: Path, **fields: Any) -> AsyncEngine:
    settings = {"device_type": "cpu", "block_size": 4, "max_batch_size": 6, "max_prefill_token_num": 16}
    return AsyncEngine(str(folder), EngineConfig(**{**settings, "num_gpu_blocks": ROOM, **fields}))


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[AsyncEngine]:
    async with new_engine(folder) as engine:
        yield engine


def expected(case: Case, prompt: list[int]) -> list[int]:
    """transformers' greedy answer."""
    tokens = list(prompt)
    for _ in range(GREEDY.max_new_tokens or 0):
        tokens.append(int(reference(case, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def answers(case: Case) -> list[list[int]]:
    return [expected(case, prompt) for prompt in PROMPTS]


async def answer_all(engine: AsyncEngine, config: GenerationConfig = GREEDY) -> list[list[int]]:
    responses = await asyncio.gather(*(engine.generate(input_ids=each, gen_config=config) for each in PROMPTS))
    return [response.token_ids for response in responses]


async def test_chunks_and_a_mixed_batch(engine: AsyncEngine, answers: list[list[int]]) -> None:
    assert await answer_all(engine) == answers
    assert engine.stats().preemptions == 0


async def test_a_long_prompt_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host says how long prompts are; a batch-invariant engine computes all of them alike."""
    prompt, seen = random_tokens(4, 70), []
    gather = kernels.gather_lines
    monkeypatch.setattr(kernels, "gather_lines", lambda *args, **options: seen.append(1) or gather(*args, **options))
    for invariant in (False, True):
        async with new_engine(folder_of(DENSE), max_prefill_token_num=128, batch_invariant=invariant) as engine:
            answer = await engine.generate(input_ids=prompt, gen_config=GREEDY)
            assert answer.token_ids == expected(DENSE, prompt)
    # The last layer attends for the sampled token alone.
    assert len(seen) == 1


async def test_shared_blocks(engine: AsyncEngine, case: Case) -> None:
    prompt = random_tokens(9, 31)
    first = await engine.generate(input_ids=prompt, gen_config=GREEDY)
    second = await engine.generate(input_ids=prompt, gen_config=GREEDY)
    assert (first.cached_token_len, second.cached_token_len) == (0, 28)
    assert first.token_ids == second.token_ids == expected(case, prompt)


@pytest.mark.parametrize("fields", [{}, {"eviction_type": "copy", "num_cpu_blocks": 40}], ids=["recompute", "copy"])
async def test_preemption(folder: Path, fields: dict[str, Any], answers: list[list[int]]) -> None:
    async with new_engine(folder, num_gpu_blocks=TIGHT, **fields) as engine:
        assert await answer_all(engine) == answers
        assert engine.stats().preemptions > 0
        if fields:
            assert engine.stats().blocks_swapped_in > 0


async def test_several_answers_to_one_prompt(engine: AsyncEngine, case: Case) -> None:
    """They share the prompt's blocks, of which the last is copied when they part."""
    prompt = PROMPTS[1]
    config = GenerationConfig(max_new_tokens=8, ignore_eos=True, temperature=1.0, top_k=0, random_seed=5, n=3)
    response = await engine.generate(input_ids=prompt, gen_config=config)
    together = [choice.token_ids for choice in response.choices]
    assert len({tuple(each) for each in together}) == 3
    for tokens in together:
        logits = reference(case, [*prompt, *tokens])[len(prompt) - 1 : -1]
        scores = await engine.get_logits([*prompt, *tokens])
        assert (scores[len(prompt) - 1 : -1] - logits).abs().max() < 1e-4


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


def test_bytes_of_a_block() -> None:
    """docs/design/cache.md has the figures."""
    import torch

    from asyncllm.agent.cache.layout import CacheLayout
    from asyncllm.layers.cache_spec import LatentKVSpec
    from asyncllm.layers.sparse_latent_attention import IndexedLatentKVSpec

    for num_layers, token in ((1, 1152), (27, 31_104), (61, 70_272)):
        layout = CacheLayout([LatentKVSpec(512, 64)] * num_layers, 64, torch.bfloat16)
        assert layout.block_bytes == 64 * token
        assert len(layout.parts) == 1
    indexed = CacheLayout([IndexedLatentKVSpec(LatentKVSpec(512, 64), 128)] * 61, 64, torch.bfloat16)
    assert indexed.block_bytes == 64 * 85_888
    tiny = open_case(DENSE)
    assert tiny.cache_specs == [LatentKVSpec(40, 8)] * 2
