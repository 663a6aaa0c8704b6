"""Threads and processes that the system refuses: callers get a typed error, and none waits forever."""

from __future__ import annotations

import asyncio
import errno
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig, pipeline
from asyncllm.agent.step_thread import StepThread
from asyncllm.engine.requests.text_threads import TextThreads
from asyncllm.errors import EngineError
from asyncllm.event_loop.in_thread import in_thread
from asyncllm.protocol import Limits

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop, pytest.mark.timeout(60)]

REFUSED = "refuses another thread"


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """Return a block in which no thread can be started."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    @contextmanager
    def block() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            yield

    return block


async def test_a_call_in_a_thread(refusing: Callable[[], AbstractContextManager[None]]) -> None:
    with refusing(), pytest.raises(EngineError, match=REFUSED):
        await in_thread(lambda: None)


async def test_the_thread_of_steps(refusing: Callable[[], AbstractContextManager[None]]) -> None:
    def load() -> Limits:
        raise AssertionError("nothing is loaded")

    thread: StepThread[Limits] = StepThread(load)  # type: ignore[type-var]
    with refusing(), pytest.raises(EngineError, match=REFUSED):
        await thread.start()
    await thread.close()


async def test_threads_that_encode_are_not_lost(refusing: Callable[[], AbstractContextManager[None]]) -> None:
    threads = TextThreads()
    with refusing():
        calls = [threads.run(lambda: "text", 10, owner) for owner in "abcd"]
        failed = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(error, EngineError) and REFUSED in str(error) for error in failed)
    assert await threads.run(lambda: "text", 10, "a") == "text"
    await threads.close()


async def test_a_grammar_is_compiled_when_there_are_threads_again(
    refusing: Callable[[], AbstractContextManager[None]],
) -> None:
    config = GenerationConfig(response_format={"type": "regex_schema", "regex_schema": "(ab){1,3}"})
    async with AsyncEngine("tiny-chat") as engine:
        with refusing(), pytest.raises(EngineError, match=REFUSED):
            await engine.generate("Hi", config)
        assert set((await engine.generate("Hi", config)).text) == {"a", "b"}


def test_a_pipeline(refusing: Callable[[], AbstractContextManager[None]]) -> None:
    with refusing(), pytest.raises(EngineError, match=REFUSED):
        pipeline("tiny-chat")


async def test_processes_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is ended if the second cannot be started."""
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def start_one(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        if started:
            raise OSError(errno.EMFILE, "Too many open files")
        started.append(start(*arguments, **options))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start_one)
    with pytest.raises(EngineError, match="refuses another process"):
        await AsyncEngine("tiny-chat", EngineConfig(tp=2)).start()
    assert started[0].returncode is not None
