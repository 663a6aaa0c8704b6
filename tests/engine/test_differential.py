"""200 greedy answers are the same to the bit, tokens and log-probabilities, whatever becomes of them on their way.

On a CPU in float32, with the products and the attention of `batch_invariant`: then nothing may differ, while libraries
round differently for different batches. What is ordinary on a CPU is compared in test_swapping.py, by tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from asyncllm import AsyncEngine, GenerationConfig
from asyncllm.engine.stats import EngineStats
from asyncllm.models.decoder import DecoderLM
from asyncllm.types import Response
from tests.agent.test_steps_in_flight import sound_llama
from tests.agent.tiny_model import AheadAgent
from tests.engine.test_swapping import at_rest, new_engine

pytestmark = pytest.mark.timeout(180)

dice = Random(11)
BLOCK_SIZE = 2
BEGINNINGS = [[dice.randrange(256) for _ in range(length)] for length in (0, 1, 2, 5, 8, 12)]
PROMPTS = [dice.choice(BEGINNINGS) + [dice.randrange(256) for _ in range(1 + index % 7)] for index in range(200)]
"""1 to 19 tokens, which end before, at and behind the ends of blocks; many begin alike."""
CONFIG = GenerationConfig(max_new_tokens=7, ignore_eos=True, temperature=0.0, logprobs=2)
SHORT = GenerationConfig(max_new_tokens=2, ignore_eos=True, temperature=0.0, logprobs=2)
"""For the second turns of sessions."""

ROOM = 1000
TIGHT = 40
"""Blocks for three of the longest sequences, where twelve may run."""

Bits = tuple[tuple[int, ...], tuple[tuple[tuple[int, float], ...], ...]]
"""An answer: its tokens, and the log-probabilities at each of them."""


def bits(response: Response) -> Bits:
    assert response.logprobs is not None
    assert len(response.token_ids) == len(response.logprobs) > 0
    return tuple(response.token_ids), tuple(tuple(entry.items()) for entry in response.logprobs)


@pytest.fixture(scope="module")
def model() -> DecoderLM:
    return sound_llama(vocab_size=258, max_position_embeddings=512)


def engine_of(model: DecoderLM, **fields: Any) -> AsyncEngine:
    defaults = {"block_size": BLOCK_SIZE, "max_batch_size": 12, "max_prefill_token_num": 24}
    settings = {**defaults, "enable_prefix_caching": False, **fields}
    return new_engine(model, agent=AheadAgent, batch_invariant=True, **settings)


def answers(model: DecoderLM, prompts: Sequence[list[int]], **fields: Any) -> tuple[list[Bits], EngineStats]:
    """The answers to prompts that are all there before the first step."""

    async def ask_all() -> tuple[list[Bits], EngineStats]:
        async with engine_of(model, **fields) as engine:
            generations = [engine.generate(input_ids=prompt, gen_config=CONFIG) for prompt in prompts]
            for generation in generations:
                await generation.start()
            found = [bits(await generation.response()) for generation in generations]
            return found, await at_rest(engine)

    return asyncio.run(ask_all())


def answers_alone(model: DecoderLM, prompts: Sequence[list[int]], config: GenerationConfig = CONFIG) -> list[Bits]:
    """One after the other; nothing is left of an answer when the next one begins."""

    async def ask_each() -> list[Bits]:
        async with engine_of(model, num_gpu_blocks=ROOM) as engine:
            found = [bits(await engine.generate(input_ids=prompt, gen_config=config)) for prompt in prompts]
            stats = engine.stats()
            assert (stats.preemptions, stats.cached_tokens) == (0, 0)
            assert stats.steps >= sum(len(tokens) for tokens, _ in found), "no two rows shared a step"
            return found

    return asyncio.run(ask_each())


@pytest.fixture(scope="module")
def alone(model: DecoderLM) -> list[Bits]:
    return answers_alone(model, PROMPTS)


def test_the_answers_depend_on_their_prompts(alone: list[Bits]) -> None:
    assert len(set(alone)) > 150


def test_batched(model: DecoderLM, alone: list[Bits]) -> None:
    found, stats = answers(model, PROMPTS, num_gpu_blocks=ROOM)
    assert found == alone
    assert stats.preemptions == 0
    assert stats.steps < len(PROMPTS) * CONFIG.max_new_tokens / 4, "many rows shared a step"


def test_preempted_and_computed_again(model: DecoderLM, alone: list[Bits]) -> None:
    found, stats = answers(model, PROMPTS, num_gpu_blocks=TIGHT)
    assert found == alone
    assert stats.preemptions > 10
    assert stats.blocks_swapped_out == 0
    assert stats.prefill_tokens > sum(map(len, PROMPTS)), "tokens were computed again"


def test_preempted_and_swapped(model: DecoderLM, alone: list[Bits]) -> None:
    found, stats = answers(model, PROMPTS, num_gpu_blocks=TIGHT, eviction_type="copy", num_cpu_blocks=400)
    assert found == alone
    assert stats.preemptions > 10
    assert stats.swap_fallbacks == 0
    assert 20 < stats.blocks_swapped_in == stats.blocks_swapped_out


def test_with_cached_beginnings_that_are_evicted_all_the_time(model: DecoderLM, alone: list[Bits]) -> None:
    async def ask_all() -> tuple[list[Bits], EngineStats, int]:
        async with engine_of(model, num_gpu_blocks=TIGHT, enable_prefix_caching=True) as engine:
            evicted: list[int] = []
            engine.running().scheduler.blocks.on_evict = lambda _, block: evicted.append(block)
            generations = [engine.generate(input_ids=prompt, gen_config=CONFIG) for prompt in PROMPTS]
            for generation in generations:
                await generation.start()
            found = [bits(await generation.response()) for generation in generations]
            return found, engine.stats(), len(evicted)

    found, stats, num_evicted = asyncio.run(ask_all())
    assert found == alone
    assert num_evicted > 10 * TIGHT
    assert stats.cached_tokens > 50 * BLOCK_SIZE
    assert stats.preemptions > 10


def test_resumed_in_a_session_after_its_blocks_were_evicted(model: DecoderLM, alone: list[Bits]) -> None:
    tails = [[dice.randrange(256) for _ in range(1 + number % 5)] for number in range(len(PROMPTS))]
    conversations = [
        prompt + list(tokens) + tail for prompt, (tokens, _), tail in zip(PROMPTS, alone, tails, strict=True)
    ]

    async def talk() -> tuple[list[Bits], list[Response]]:
        async with engine_of(model, num_gpu_blocks=TIGHT, enable_prefix_caching=True) as engine:

            async def turns(new: Sequence[list[int]], config: GenerationConfig, **keywords: bool) -> list[Response]:
                generations = [
                    engine.generate(input_ids=ids, gen_config=config, session_id=number, **keywords)
                    for number, ids in enumerate(new)
                ]
                for generation in generations:
                    await generation.start()
                return [await generation.response() for generation in generations]

            first = await turns(PROMPTS, CONFIG, sequence_end=False)
            second = await turns(tails, SHORT, sequence_start=False)
            return [bits(response) for response in first], second

    first, second = asyncio.run(talk())
    assert first == alone
    assert [bits(response) for response in second] == answers_alone(model, conversations, SHORT)
    assert all(response.history_token_len > 0 for response in second)
    forgotten = sum(
        response.cached_token_len < response.history_token_len // BLOCK_SIZE * BLOCK_SIZE for response in second
    )
    assert forgotten > 150
