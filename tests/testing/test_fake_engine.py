"""The fake engine behaves as the real one, because it is, and says what its script says."""

from __future__ import annotations

import asyncio

import pytest

from asyncllm import EngineDead, GenerationConfig, RequestFailed
from asyncllm.testing import FakeEngine, FakePipeline

pytestmark = pytest.mark.anyio


async def test_echo_script_mapping_and_function() -> None:
    async with FakeEngine() as llm:
        assert (await llm.generate("héllo 😀")).text == "héllo 😀"
    async with FakeEngine("always") as llm:
        assert (await llm.generate("anything")).text == "always"
    async with FakeEngine({"ping": "pong"}) as llm:
        assert [(await llm.generate(prompt)).text for prompt in ("ping", "else")] == ["pong", "else"]
    async with FakeEngine(str.upper) as llm:
        assert (await llm.generate("shout")).text == "SHOUT"


async def test_it_streams_token_by_token() -> None:
    async with FakeEngine("pong", delay_per_token=0.002) as llm:
        chunks = [chunk async for chunk in llm.generate("ping")]
    assert "".join(chunk.text for chunk in chunks) == "pong"
    assert len(chunks) >= 4
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "stop"


async def test_sessions_answer_the_last_message() -> None:
    async with FakeEngine(lambda text: f"you said {text}") as llm, llm.session() as session:
        await session.chat("one")
        await session.chat("two")
        assert session.history == [("one", "you said one"), ("two", "you said two")]


async def test_batches_and_length() -> None:
    async with FakeEngine() as llm:
        answers = await llm.batch_infer(["abcdef", "xyz"], GenerationConfig(max_new_tokens=4))
    assert isinstance(answers, list)
    assert [(answer.text, answer.finish_reason) for answer in answers] == [("abcd", "length"), ("xyz", "stop")]


async def test_cancelling_is_the_abort() -> None:
    async with FakeEngine("long " * 100, delay_per_token=0.002) as llm:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await llm.generate("go")
        assert (await llm.generate("again", GenerationConfig(max_new_tokens=4))).text == "long"


async def test_faults() -> None:
    async with FakeEngine(row_failure=lambda history: "no luck" if 120 in history else None) as llm:
        with pytest.raises(RequestFailed, match="no luck"):
            await llm.generate("x")
        assert (await llm.generate("y")).text == "y"
    llm = FakeEngine(fail_at=0)
    await llm.start()
    with pytest.raises(EngineDead):
        await llm.generate("x")
    await llm.close()


async def test_embeddings_are_made_up_and_always_the_same() -> None:
    vectors = []
    for _ in range(2):
        async with FakeEngine(hidden_size=8) as llm:
            embeddings = await llm.embed(["one", "two", "one"])
            assert isinstance(embeddings, list)
            vectors.append([embedding.values for embedding in embeddings])
    first, second, third = vectors[0]
    assert vectors[0] == vectors[1]
    assert first == third != second
    assert len(first) == 8


def test_pipeline() -> None:
    with FakePipeline({"ping": "pong"}) as pipe:
        assert pipe("ping").text == "pong"
