"""Tokens that a grammar forces take no step each, and are those that steps would have drawn."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig, Response
from asyncllm.text.grammars.bridge import GrammarProgress
from tests.engine.driver import Driver, expected_answer

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

FORM = {
    "type": "object",
    "properties": {
        "temperature": {"type": "integer", "minimum": 0, "maximum": 99},
        "conditions": {"enum": ["sunny with clouds", "sunny without clouds", "rain"]},
        "reference": {"const": "as told by the weather station"},
        "is_certain": {"type": "boolean"},
    },
    "required": ["temperature", "conditions", "reference", "is_certain"],
    "additionalProperties": False,
}
HELD: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": {"schema": FORM}}}
QUESTION = "What is the weather?"
SETTINGS: dict[str, Any] = {"block_size": 16, "session_len": 256, "max_prefill_token_num": 64}


@contextmanager
def step_by_step() -> Iterator[None]:
    """As if nothing was ever forced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrammarProgress, "forced", lambda self: [])
        yield


async def answers(llm: AsyncEngine, configs: list[GenerationConfig]) -> tuple[list[Any], int]:
    """What is answered, and in how many steps."""
    before = llm.stats().steps
    responses = await asyncio.gather(*(llm.generate(QUESTION, config) for config in configs))
    llm.check_idle()
    told = [said(choice) for response in responses for choice in response.choices or (response,)]
    return told, llm.stats().steps - before


def said(response: Response) -> tuple[Any, ...]:
    return (
        response.token_ids,
        response.text,
        response.finish_reason,
        response.generate_token_len,
        len(response.logprobs or ()),
    )


def held(**fields: Any) -> GenerationConfig:
    return GenerationConfig(**{**HELD, "temperature": 1.0, "top_k": 0, "max_new_tokens": 100, **fields})


ROOMS: dict[str, dict[str, Any]] = {
    "rows wait": {"max_batch_size": 4, "num_gpu_blocks": 40},
    "rows are preempted": {"num_gpu_blocks": 10, "session_len": 128},
    "blocks are short": {"block_size": 4, "num_gpu_blocks": 36, "session_len": 128},
    "chunks are narrow": {"max_prefill_token_num": 3},
    "prompts are rare": {"prefill_interval": 4},
}


@pytest.mark.parametrize("name", ROOMS)
async def test_the_tokens_are_those_of_single_steps(name: str) -> None:
    free = GenerationConfig(max_new_tokens=20, ignore_eos=True, temperature=1.0, random_seed=5)
    configs = [*(held(random_seed=seed) for seed in range(2)), free]
    async with AsyncEngine("tiny-chat", EngineConfig(**{**SETTINGS, **ROOMS[name]})) as llm:
        hurried, steps = await answers(llm, configs)
        with step_by_step():
            drawn, most_steps = await answers(llm, configs)
    assert hurried == drawn
    assert steps < most_steps


async def test_they_are_so_whatever_else_is_asked_for() -> None:
    cases: dict[str, dict[str, Any]] = {
        "nothing": {},
        "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3},
        "bad words": {"bad_words": ["rain"]},
        "log-probabilities": {"logprobs": 2},
        "several answers": {"n": 3},
        "stop word": {"stop_words": ["told by"]},
        "stop word kept": {"stop_words": ["weath"], "include_stop_str_in_output": True},
        "least tokens": {"min_new_tokens": 80, "ignore_eos": True, "max_new_tokens": 90},
        **{f"at most {most}": {"temperature": 0.0, "max_new_tokens": most} for most in (1, 18, 27)},
    }
    configs = [held(random_seed=3, **case) for case in cases.values()]
    async with AsyncEngine("tiny-chat", EngineConfig(**SETTINGS)) as llm:
        hurried, _ = await answers(llm, configs)
        with step_by_step():
            drawn, _ = await answers(llm, configs)
        _, steps_with_logprobs = await answers(llm, configs[3:4])
    assert hurried == drawn
    assert [said[2] for said in hurried[-3:]] == ["length"] * 3
    # The log-probabilities of each are those of a step of its own.
    assert steps_with_logprobs >= len(hurried[3][0]) == hurried[3][4]


async def test_a_session_goes_on_behind_them_and_finds_blocks() -> None:
    async def turns() -> list[Any]:
        async with AsyncEngine("tiny-chat", EngineConfig(**SETTINGS)) as llm, llm.session() as session:
            config = GenerationConfig(**HELD, temperature=0.0, stop_words=["station"])
            first = await session.chat(QUESTION, config)
            second = await session.chat("Hello", GenerationConfig(temperature=0.0, max_new_tokens=20))
            assert second.cached_token_len > 0
            return [said(first), said(second), second.history_token_len]

    hurried = await turns()
    with step_by_step():
        assert await turns() == hurried


async def test_a_stream_carries_each_token_once() -> None:
    async with AsyncEngine("tiny-chat", EngineConfig(**SETTINGS)) as llm:
        config = GenerationConfig(**HELD, temperature=0.0, max_new_tokens=120)
        chunks = [chunk async for chunk in llm.generate(QUESTION, config)]
        whole = await llm.generate(QUESTION, config)
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert max(len(chunk.token_ids) for chunk in chunks) > 2


def test_a_run_of_them_takes_one_step_more_than_those_in_flight() -> None:
    driver = Driver(forces=lambda history: 9 if len(history) == 4 else 0)
    request = driver.submit([1, 2, 3], 16)
    driver.drain()
    assert driver.answers(request) == [expected_answer([1, 2, 3], 16)]
    # The prompt with its token, two in flight behind it, the nine in one, and the other tokens.
    assert [len(row.tokens) for batch in driver.batches for row in batch.prefill] == [3, 9]
    assert len(driver.batches) < 16 - 9 + 4
    assert driver.scheduler.counts.sampled_tokens == 16


@pytest.mark.parametrize(("others", "taken"), [(0, True), (18, True), (19, False)])
def test_a_run_has_to_save_a_step_for_every_five_rows(others: int, taken: bool) -> None:
    """Of 4 tokens with one step in flight, which saves 3."""
    driver = Driver(
        num_slots=24,
        max_batch_size=24,
        num_blocks=256,
        forces=lambda history: 4 if history[0] == 7 and len(history) == 4 else 0,
    )
    rest = [driver.submit([1, number % 8, 3], 24) for number in range(others)]
    request = driver.submit([7, 2, 3], 16)
    driver.drain()
    assert driver.answers(request) == [expected_answer([7, 2, 3], 16)]
    for number, other in enumerate(rest):
        assert driver.answers(other) == [expected_answer([1, number % 8, 3], 24)]
    assert any(row.forced for batch in driver.batches for row in batch.prefill) == taken
    driver.check_drained()
