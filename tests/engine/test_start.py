"""The engine reads the tokenizer while the executor loads the model; whichever fails, both come to an end."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncllm.config import EngineConfig
from asyncllm.engine import model_files
from asyncllm.engine.async_engine import AsyncEngine
from asyncllm.errors import EngineClosed, InvalidCheckpoint, InvalidParameter, ModelError
from asyncllm.protocol import Batch, Command, Limits
from asyncllm.testing.byte_tokenizer import ByteTokenizer
from asyncllm.testing.fake_engine import FakeTemplate, fake_parts
from asyncllm.testing.fake_executor import FakeExecutor
from asyncllm.text.chat_template import ChatTemplate

pytestmark = pytest.mark.anyio


class Opening:
    """Stands in for the tokenizer's files: opened in a thread that the test lets go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.error = error
        self.begun, self.go_on = threading.Event(), threading.Event()
        monkeypatch.setattr(model_files, "NamedTokenizer", self.open)
        monkeypatch.setattr(ChatTemplate, "open", lambda folder, config: FakeTemplate())

    def open(self, folder: Path) -> Any:
        self.begun.set()
        assert self.go_on.wait(20)
        if self.error is not None:
            raise self.error
        return ByteTokenizer()


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 20)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def assert_closed(executor: FakeExecutor) -> None:
    with pytest.raises(EngineClosed):
        executor.submit(Batch(step=0, starts=[], new_blocks=[], copies=[], decode=[], prefill=[]))


class Waiting(FakeExecutor):
    """An executor whose start waits until the test lets it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.begun, self.go_on, self.cancelled = asyncio.Event(), asyncio.Event(), False

    async def start(self) -> Limits:
        self.begun.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return await super().start()


@pytest.mark.parametrize("first", ["tokenizer", "executor"])
async def test_both_at_the_same_time(folder: str, monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    opening, executor = Opening(monkeypatch), Waiting()
    engine = AsyncEngine(folder, executor=executor)
    start = asyncio.create_task(engine.start())
    async with asyncio.timeout(20):
        await executor.begun.wait()
    await until(opening.begun)
    releases = [opening.go_on.set, executor.go_on.set]
    for release in releases if first == "tokenizer" else reversed(releases):
        assert not start.done()
        release()
        await asyncio.sleep(0.01)
    await start
    assert isinstance(engine.tokenizer, ByteTokenizer)
    assert engine.limits.vocab_size == 258
    await engine.close()


async def test_a_tokenizer_that_fails_stops_the_load(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opening, executor = Opening(monkeypatch, InvalidCheckpoint("no tokenizer")), Waiting()
    engine = AsyncEngine(folder, executor=executor)
    opening.go_on.set()
    with pytest.raises(InvalidCheckpoint, match="no tokenizer"):
        await engine.start()
    assert executor.cancelled
    assert_closed(executor)


async def test_a_load_that_fails_before_the_tokenizer_is_read(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opening, executor = Opening(monkeypatch), FakeExecutor(start_error=ModelError("no such file"))
    engine = AsyncEngine(folder, executor=executor)
    start = asyncio.create_task(engine.start())
    await until(opening.begun)
    await asyncio.sleep(0.01)
    opening.go_on.set()
    with pytest.raises(ModelError, match="no such file"):
        await start


async def test_when_both_fail_nothing_is_left(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opening = Opening(monkeypatch, InvalidCheckpoint("no tokenizer"))
    engine = AsyncEngine(folder, executor=FakeExecutor(start_error=ModelError("no such file")))
    start = asyncio.create_task(engine.start())
    await until(opening.begun)
    await asyncio.sleep(0.01)
    opening.go_on.set()
    with pytest.raises(InvalidCheckpoint, match="no tokenizer"):
        await start


async def test_closing_meanwhile(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opening, executor = Opening(monkeypatch), Waiting()
    engine = AsyncEngine(folder, executor=executor)
    start = asyncio.create_task(engine.start())
    await until(opening.begun)
    await engine.close()
    with pytest.raises(EngineClosed, match="while it was starting"):
        await start
    assert executor.cancelled
    assert_closed(executor)
    opening.go_on.set()


async def test_swapping_without_host_blocks_is_refused() -> None:
    executor = FakeExecutor()
    engine = AsyncEngine("fake", EngineConfig(eviction_type="copy"), **{**fake_parts(), "executor": executor})
    with pytest.raises(InvalidParameter, match="needs blocks in host memory"):
        await engine.start()
    assert_closed(executor)


class Lost(FakeExecutor):
    """An executor in other processes, which end once the model is loaded."""

    async def start(self) -> Limits:
        return msgspec.structs.replace(await super().start(), takes_grammars=True)

    def carry_out(self, command: Command) -> asyncio.Future[None]:
        raised = asyncio.get_running_loop().create_future()
        raised.set_exception(RuntimeError("rank 0 was ended"))
        return raised

    def take_grammar(self, grammar: Any) -> asyncio.Future[None]:
        raise NotImplementedError


async def test_a_model_that_is_lost_meanwhile() -> None:
    executor = Lost()
    with pytest.raises(ModelError, match="lost while the engine started: rank 0 was ended"):
        await AsyncEngine("fake", **{**fake_parts(), "executor": executor}).start()
    assert_closed(executor)


async def test_a_folder_is_named_by_a_path_too() -> None:
    async with AsyncEngine(Path("/models/fake-chat/"), **fake_parts()) as engine:
        assert (engine.model_path, engine.model_name) == ("/models/fake-chat", "fake-chat")
