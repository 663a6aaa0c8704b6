"""No ended request waits for the garbage collector, however it ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from asyncllm.config import EngineConfig, GenerationConfig
from asyncllm.errors import (
    AsyncLLMError,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidParameter,
    QueueFull,
    unraised,
)
from asyncllm.testing import FakeEngine, Fault, FaultPlan
from tests.cycles import alive, no_cycles

Act = Callable[[FakeEngine], Awaitable[object]]


async def iterate(engine: FakeEngine) -> None:
    async for _ in engine.generate("Hello"):
        pass


async def leave(engine: FakeEngine) -> None:
    async for _ in engine.generate("Hello"):
        break


async def close_early(engine: FakeEngine) -> None:
    generation = engine.generate("Hello")
    await generation.start()
    await generation.aclose()


async def turns(engine: FakeEngine) -> None:
    async with engine.session() as session:
        for prompt in ("One", "Two"):
            await session.chat(prompt)
        session.fork().close()


async def seed_era_turns(engine: FakeEngine) -> None:
    await engine.generate("One", session_id=7, sequence_end=False)
    await engine.generate("Two", session_id=7, sequence_start=False)


async def stopped(engine: FakeEngine) -> None:
    generation = engine.generate("Hello", session_id=3)
    await generation.start()
    await engine.stop_session(3)
    await generation


async def in_a_session(engine: FakeEngine) -> None:
    async with engine.session() as session:
        await session.chat("One")
        await session.chat("Two" * 5000)


async def stream(engine: FakeEngine) -> None:
    async for _ in engine.stream_infer(["a", "b"], GenerationConfig(n=2)):
        pass


async def held(engine: FakeEngine) -> None:
    """The caller keeps the generation, and asks again."""
    generation = engine.generate("Hello" * 5000)
    for _ in range(3):
        with contextlib.suppress(AsyncLLMError):
            await generation


ENDS: dict[str, Act] = {
    "generate": lambda engine: engine.generate("Hello").response(),
    "iterate": iterate,
    "leave": leave,
    "close early": close_early,
    "ids": lambda engine: engine.generate(input_ids=[1, 2, 3]).response(),
    "n": lambda engine: engine.generate("Hello", GenerationConfig(n=3, logprobs=1)).response(),
    "stop words": lambda engine: engine.generate("Hello", GenerationConfig(stop_words=["lo"])).response(),
    "chat": turns,
    "seed-era turns": seed_era_turns,
    "stop_session": stopped,
    "batch_infer": lambda engine: engine.batch_infer(["a", "b"], GenerationConfig(n=2)),
    "stream_infer": stream,
    "embed": lambda engine: engine.embed(["a", "b"]),
    "get_ppl": lambda engine: engine.get_ppl([1, 2, 3]),
    "prompt_logprobs": lambda engine: engine.generate("Hello", GenerationConfig(prompt_logprobs=1)).response(),
    "encode": lambda engine: engine.encode("Hello" * 2000),
    "timeout": lambda engine: engine.generate("Hello", GenerationConfig(), timeout=0.001).response(),
}
REFUSED: dict[str, Act] = {
    "empty": lambda engine: engine.generate("").response(),
    "too long": lambda engine: engine.generate("Hello" * 5000).response(),
    "too long, iterated": lambda engine: anext(engine.generate("Hello" * 5000)),
    "too long, kept": held,
    "too long in a session": in_a_session,
    "too long in a batch": lambda engine: engine.batch_infer(["a", "Hello" * 5000]),
    "too long to embed": lambda engine: engine.embed(["a", "Hello" * 5000]),
    "too long to score": lambda engine: engine.get_ppl([1] * 20_000),
    "no message": lambda engine: engine.generate([{"role": "user"}]).response(),
    "bad parameter": lambda engine: engine.generate("Hello", GenerationConfig(top_p=7)).response(),
    "bad ids": lambda engine: engine.generate(input_ids=[-1]).response(),
    "surrogate": lambda engine: engine.generate("\ud800").response(),
    "timeout over": lambda engine: engine.generate("Hello", timeout=1e-9).response(),
    "no session": lambda engine: engine.generate("Hello", session_id=99, sequence_start=False).response(),
    "wrong stop word": lambda engine: engine.generate("Hello", GenerationConfig(stop_words=[""])).response(),
}


@pytest.fixture
def unlogged() -> Iterator[None]:
    """pytest keeps what is logged, tracebacks included."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.anyio
@pytest.mark.parametrize("act", [*ENDS.values(), *REFUSED.values()], ids=[*ENDS, *REFUSED])
async def test_nothing_of_a_request_is_left(act: Act) -> None:
    async with FakeEngine() as engine:
        await ended(engine, act)


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["generate", "iterate", "n", "chat", "batch_infer", "stream_infer", "embed", "encode"])
async def test_cancelled_at_any_await(name: str) -> None:
    async with FakeEngine() as engine:

        async def cancelled_everywhere(engine: FakeEngine) -> None:
            for turns in range(40):
                task = asyncio.ensure_future(ENDS[name](engine))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                del task

        await ended(engine, cancelled_everywhere)


@pytest.mark.anyio
async def test_refused_by_a_full_queue() -> None:
    async with FakeEngine("a", EngineConfig(max_queued_requests=1, max_batch_size=1)) as engine:
        engine.executor.pause()

        async def refuse(engine: FakeEngine) -> None:
            running = [asyncio.ensure_future(engine.generate("Hello").response()) for _ in range(6)]
            await asyncio.sleep(0.01)
            engine.executor.resume()
            await asyncio.wait(running)
            assert [type(task.exception()) for task in running].count(QueueFull) >= 3

        await ended(engine, refuse)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "point", ["tokenize", "template", "prefill", "decode", "sample", "detokenize", "emit", "alloc"]
)
async def test_failed_by_a_fault(point: Any, unlogged: None) -> None:
    async with FakeEngine(faults=FaultPlan(Fault(point, times=None))) as engine:
        await ended(engine, ENDS["n"])
        await ended(engine, ENDS["batch_infer"])


@pytest.mark.anyio
@pytest.mark.parametrize("ending", ["dies", "closes"])
async def test_an_engine_that_dies_or_closes_lets_go_of_its_requests(ending: str, unlogged: None) -> None:
    engine = FakeEngine("a" * 100, fail_at=3 if ending == "dies" else None)

    async def end(engine: FakeEngine) -> None:
        running = [asyncio.ensure_future(engine.generate("Hello").response()) for _ in range(3)]
        if ending == "closes":
            engine.executor.pause()
            await asyncio.sleep(0.01)
            closing = asyncio.ensure_future(engine.close())
            await asyncio.sleep(0)
            engine.executor.resume()
            await closing
        await asyncio.wait(running)
        assert all([task.exception() for task in running])  # each is looked at
        with contextlib.suppress(AsyncLLMError):
            await engine.generate("Hello")

    await engine.start()
    await ended(engine, end)
    await engine.close()


@pytest.mark.parametrize(
    "error",
    [
        DeadlineExceeded("late"),
        ContextLengthExceeded(9, 8, "the session length"),
        QueueFull("full", 3.0),
        InvalidParameter("wrong", "top_p"),
    ],
)
def test_an_error_is_told_the_same_to_those_who_ask_again(error: Exception) -> None:
    error.__cause__ = ValueError("why")
    copy = unraised(error, cause=True)
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
    assert copy is not error
    assert (copy.__cause__, unraised(error, cause=False).__cause__) == (error.__cause__, None)


async def ended(engine: FakeEngine, act: Act) -> None:
    """Act, see the engine come to rest, and look for what is left."""
    with no_cycles():
        with contextlib.suppress(AsyncLLMError, TypeError):
            await act(engine)
        for _ in range(1000):
            # Abandoned requests end at the loop's next turns; steps that still run have rows of ended ones.
            await asyncio.sleep(0.001)
            if not alive():
                break
        assert [type(thing).__name__ for thing in alive()] == []
