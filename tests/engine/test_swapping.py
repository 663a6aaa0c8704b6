"""Whole engines on a CPU in float32: no answer depends on whether, how or when its sequences are preempted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig
from asyncllm.agent.executor import StepExecutor
from asyncllm.agent.model_agent import ModelAgent
from asyncllm.engine.requests.generation import Generation
from asyncllm.engine.schedule.sequence import SequenceState
from asyncllm.engine.stats import EngineStats
from asyncllm.models.decoder import DecoderLM
from asyncllm.testing import ByteTokenizer, FakeTemplate
from asyncllm.types import Response
from tests.agent.test_steps_in_flight import sound_llama
from tests.agent.tiny_model import AheadAgent
from tests.engine.test_async_engine import until

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop, pytest.mark.timeout(120)]

BLOCK_SIZE = 4
ROOM = 400
"""Blocks enough for everybody."""
TIGHT = 24
"""Blocks of which any two of the requests below take more than half."""

dice = Random(5)
PROMPTS = [[dice.randrange(256) for _ in range(length)] for length in (9, 21, 4, 17, 13, 30)]
GREEDY = GenerationConfig(max_new_tokens=30, ignore_eos=True)
SAMPLED = GenerationConfig(max_new_tokens=30, ignore_eos=True, top_k=0, temperature=1.0, random_seed=1)
"""Less likely tokens follow from fewer contexts."""


@pytest.fixture(scope="module")
def model() -> DecoderLM:
    """Its next token depends on all tokens before it, unlike that of models which soon repeat themselves."""
    return sound_llama(vocab_size=258, max_position_embeddings=512)


def new_engine(model: DecoderLM, *, agent: type[ModelAgent] = ModelAgent, **fields: Any) -> AsyncEngine:
    settings = {"device_type": "cpu", "block_size": BLOCK_SIZE, "max_batch_size": 6, "max_prefill_token_num": 16}
    config = EngineConfig(**{**settings, **fields})
    executor = StepExecutor(lambda: agent(config.checked(), Path("tiny"), model=model))
    return AsyncEngine("tiny", config, executor=executor, tokenizer=ByteTokenizer(), chat_template=FakeTemplate())


def ask(engine: AsyncEngine, prompt: list[int]) -> Generation:
    """Prompts of odd lengths are answered greedily."""
    return engine.generate(input_ids=prompt, gen_config=GREEDY if len(prompt) % 2 else SAMPLED)


async def answer_all(engine: AsyncEngine, prompts: Sequence[list[int]] = PROMPTS) -> list[Response]:
    """All requests are there before the first step."""
    generations = [ask(engine, prompt) for prompt in prompts]
    for generation in generations:
        await generation.start()
    return [await generation.response() for generation in generations]


async def reach(engine: AsyncEngine, num_steps: int, task: asyncio.Task[Response]) -> None:
    """Wait for so many steps, or for the task's end, and see them in the turn of the event loop after they began."""
    while engine.stats().steps < num_steps and not task.done():
        time.sleep(0.0002)  # noqa: ASYNC251 - the step's thread gets the interpreter, and no turn goes unseen
        await asyncio.sleep(0)


async def at_rest(engine: AsyncEngine) -> EngineStats:
    """What is held when the last step in flight has been read."""
    await until(lambda: not engine.stats().steps_in_flight)
    engine.check_idle()
    return engine.stats()


def tokens(responses: Sequence[Response]) -> list[list[int]]:
    return [response.token_ids for response in responses]


async def answers_with_room(model: DecoderLM) -> list[list[int]]:
    async with new_engine(model, num_gpu_blocks=ROOM) as engine:
        answers = tokens(await answer_all(engine))
        assert engine.stats().preemptions == 0
    return answers


@pytest.mark.parametrize("agent", [ModelAgent, AheadAgent])
@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no_cache"])
async def test_alone_together_computed_again_and_swapped(
    model: DecoderLM, agent: type[ModelAgent], caching: bool
) -> None:
    async with new_engine(model, num_gpu_blocks=ROOM) as engine:
        alone = [tokens(await answer_all(engine, [prompt]))[0] for prompt in PROMPTS]
        assert tokens(await answer_all(engine)) == alone
    found = {}
    for name, fields in {
        "computed again": {},
        "swapped": {"eviction_type": "copy", "num_cpu_blocks": 200},
        "some swapped": {"eviction_type": "copy", "num_cpu_blocks": 14},
        "sized by itself": {"eviction_type": "copy"},
    }.items():
        async with new_engine(
            model, agent=agent, num_gpu_blocks=TIGHT, enable_prefix_caching=caching, **fields
        ) as engine:
            assert tokens(await answer_all(engine)) == alone, name
            found[name] = await at_rest(engine)
    assert all(stats.preemptions > 0 for stats in found.values())
    assert found["computed again"].blocks_swapped_out == found["computed again"].host_blocks_total == 0
    assert found["swapped"].swap_fallbacks == 0 < found["some swapped"].swap_fallbacks
    assert 0 < found["swapped"].blocks_swapped_in <= found["swapped"].blocks_swapped_out
    assert found["swapped"].prefill_tokens < found["computed again"].prefill_tokens
    assert (found["swapped"].host_blocks_total, found["sized by itself"].host_blocks_total) == (200, TIGHT)
    for stats in found.values():
        assert stats.host_blocks_held == stats.swapped == 0
        assert stats.host_blocks_free + stats.host_blocks_cached == stats.host_blocks_total


@pytest.mark.parametrize("agent", [ModelAgent, AheadAgent])
async def test_cancelled_in_every_state(model: DecoderLM, agent: type[ModelAgent]) -> None:
    """The newest request, which is preempted again and again, leaves after any number of steps."""
    expected = await answers_with_room(model)
    seen = set()
    for num_steps in (*range(5), *range(8, 80, 6)):
        async with new_engine(
            model,
            agent=agent,
            num_gpu_blocks=TIGHT,
            num_cpu_blocks=60,
            eviction_type="copy",
            max_batch_size=3,
        ) as engine:
            others = [ask(engine, prompt) for prompt in PROMPTS[1:3]]
            victim = ask(engine, PROMPTS[5])
            for generation in (*others, victim):
                await generation.start()
            tasks = [asyncio.create_task(generation.response()) for generation in others]
            await reach(engine, num_steps, tasks[0])
            seen |= {
                sequence.state
                for request in engine.running().requests
                for sequence in request.sequences
                if request.prompt_ids == PROMPTS[5]
            }
            await victim.aclose()
            answers = tokens([await task for task in tasks])
            assert answers == expected[1:3], num_steps
            stats = await at_rest(engine)
            assert (stats.blocks_held, stats.host_blocks_held, stats.swapped, stats.waiting) == (0, 0, 0, 0)
    assert seen >= {*SequenceState} - {SequenceState.FINISHED}


async def test_every_kind_of_request(model: DecoderLM) -> None:
    """Several answers to a prompt, seeds, penalties, which need the whole history, log-probabilities, and logits."""
    configs = [
        GenerationConfig(max_new_tokens=20, ignore_eos=True, n=3, top_k=0, temperature=1.0, random_seed=3),
        GenerationConfig(max_new_tokens=24, ignore_eos=True, repetition_penalty=1.5, frequency_penalty=0.5),
        GenerationConfig(max_new_tokens=18, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    ]

    async def answers(**fields: Any) -> tuple[Any, int]:
        async with new_engine(model, **fields) as engine:
            generations = [
                engine.generate(input_ids=prompt, gen_config=config)
                for config in configs
                for prompt in (PROMPTS[1], PROMPTS[3])
            ]
            for generation in generations:
                await generation.start()
            responses = [await generation.response() for generation in generations]
            found = [
                (
                    response.token_ids,
                    [choice.token_ids for choice in response.choices],
                    [list(entry) for entry in response.logprobs or []],
                    [entry and list(entry) for entry in response.prompt_logprobs or []],
                )
                for response in responses
            ]
            return found, engine.stats().blocks_swapped_in

    expected, _ = await answers(num_gpu_blocks=ROOM)
    swapped, num_swapped = await answers(num_gpu_blocks=TIGHT, eviction_type="copy", num_cpu_blocks=100)
    assert num_swapped > 0
    assert swapped == expected


async def test_sessions(model: DecoderLM) -> None:
    """Conversations that displace each other, on the device and on the host."""
    config = GenerationConfig(max_new_tokens=12, ignore_eos=True)

    async def talk(**fields: Any) -> tuple[list[list[str]], int]:
        async with new_engine(model, **fields) as engine:
            sessions = [engine.session() for _ in range(4)]
            turns = []
            for turn in ("one", "two", "three"):
                # One after another in the queue, together in the steps.
                generations = [session.chat(f"{turn} {number}", config) for number, session in enumerate(sessions)]
                for generation in generations:
                    await generation.start()
                turns.append([(await generation.response()).text for generation in generations])
            fork = sessions[0].fork()
            turns.append([(await fork.chat("four", config)).text, (await sessions[0].chat("four", config)).text])
            stats = engine.stats()
            for session in (*sessions, fork):
                session.close()
            engine.check_idle()
            return turns, stats.blocks_swapped_in

    expected, _ = await talk(num_gpu_blocks=ROOM)
    assert expected[3][0] == expected[3][1]
    for fields in ({"eviction_type": "copy", "num_cpu_blocks": 60}, {"num_cpu_blocks": 60}):
        found, num_swapped = await talk(num_gpu_blocks=40, **fields)
        assert found == expected
        assert num_swapped > 0


async def test_an_evicted_prompt_is_found_on_the_host(model: DecoderLM) -> None:
    async with new_engine(model, num_gpu_blocks=TIGHT, num_cpu_blocks=100) as engine:
        first = [(await answer_all(engine, [prompt]))[0] for prompt in PROMPTS]
        before = engine.stats()
        assert before.host_blocks_cached > 0
        again = [(await answer_all(engine, [prompt]))[0] for prompt in PROMPTS]
        after = engine.stats()
    assert tokens(again) == tokens(first)
    for prompt, response in zip(PROMPTS, again, strict=True):
        assert response.cached_token_len == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert after.blocks_swapped_in > before.blocks_swapped_in == 0
    assert after.prefill_tokens - before.prefill_tokens < before.prefill_tokens
