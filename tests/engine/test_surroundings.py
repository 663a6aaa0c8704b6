"""An engine that is used where it cannot run says so, and does not wait for ever."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import pytest

from asyncllm.errors import AsyncLLMError, EngineError
from asyncllm.testing import FakeEngine, FakePipeline


def test_without_asyncio() -> None:
    starting = FakeEngine().start()
    with pytest.raises(EngineError, match="asyncio's event loop"):
        starting.send(None)


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
