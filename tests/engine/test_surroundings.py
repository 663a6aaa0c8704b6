"""An engine that is used in a process, thread or loop where it cannot run raises an error at once."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Awaitable, Callable

import pytest

from asyncllm import AsyncEngine
from asyncllm.errors import (
    AsyncLLMError,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineError,
    InvalidParameter,
    QueueFull,
    ServerUnreachable,
)
from asyncllm.testing import FakeEngine, FakePipeline, fake_parts


def test_without_asyncio() -> None:
    starting = FakeEngine().start()
    with pytest.raises(EngineError, match="asyncio's event loop"):
        starting.send(None)


def test_an_answer_that_another_event_loop_reads() -> None:
    """A pause: nothing has come yet, so the reader would wait."""

    def in_another_loop(call: Callable[[], Awaitable[object]]) -> None:
        async def wait() -> None:
            await asyncio.wait_for(call(), 1)

        with pytest.raises(EngineError, match="another event loop"):
            asyncio.run(wait())

    with asyncio.Runner() as runner:
        engine = FakeEngine()
        runner.run(engine.start())
        engine.executor.pause()
        answer = engine.generate("Hi")
        runner.run(answer.start())
        in_another_loop(lambda: anext(answer))
        in_another_loop(answer.aclose)
        engine.executor.resume()
        assert runner.run(answer.response()).text == "Hi"
        runner.run(engine.close())


@pytest.mark.anyio
async def test_an_engine_is_not_pickled() -> None:
    async with AsyncEngine("fake", **fake_parts()) as engine, engine.session() as session:
        for thing in (engine, session, engine.generate("Hi")):
            with pytest.raises(EngineError, match="neither pickled nor copied"):
                pickle.dumps(thing)


ERRORS = [
    InvalidParameter("No.", "top_k"),
    ContextLengthExceeded(5, 3, "session_len"),
    QueueFull("Full.", 2.5),
    DeadlineExceeded("Late."),
    ServerUnreachable("Gone.", status=503, retry_after=1.0),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_reach_other_processes(error: AsyncLLMError) -> None:
    arrived = pickle.loads(pickle.dumps(error))
    assert (type(arrived), str(arrived), vars(arrived)) == (type(error), str(error), vars(error))


def in_a_fork(call: Callable[[], object]) -> str:
    """What the call raises in a process that is forked from this one."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call()
        except AsyncLLMError as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    assert os.waitpid(child, 0)[1] == 0
    return text


def test_a_pipeline_after_a_fork() -> None:
    with FakePipeline() as pipe:
        assert "forked" in in_a_fork(lambda: pipe("Hi"))
        assert not in_a_fork(pipe.close)
        assert pipe("Hi").text == "Hi", "the parent's goes on"


def test_an_engine_after_a_fork() -> None:
    with asyncio.Runner() as runner:
        engine = FakeEngine()
        runner.run(engine.start())
        assert "forked" in in_a_fork(lambda: runner.run(engine.generate("Hi").response()))
        assert "forked" in in_a_fork(lambda: runner.run(engine.close()))
        assert runner.run(engine.generate("Hi").response()).text == "Hi"
        runner.run(engine.close())
