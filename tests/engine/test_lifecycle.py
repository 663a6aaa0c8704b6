"""Starting, closing and death of an engine, from every state."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from asyncllm.config import EngineConfig
from asyncllm.engine.async_engine import AsyncEngine
from asyncllm.engine.loop.engine_loop import EngineLoop
from asyncllm.errors import (
    EngineClosed,
    EngineDead,
    EngineError,
    InvalidParameter,
    ModelError,
)
from asyncllm.protocol import Batch, Limits
from asyncllm.testing import FakeEngine
from asyncllm.types import Chunk

pytestmark = pytest.mark.anyio


async def collect(generation: Any) -> list[Chunk]:
    return [chunk async for chunk in generation]


class TestStartAndClose:
    async def test_before_start_and_after_close(self) -> None:
        engine = FakeEngine("x")
        with pytest.raises(EngineClosed, match="new"):
            await engine.generate("Hi")
        for name in ("tokenizer", "chat_template", "reply_format", "limits", "session_len"):
            with pytest.raises(EngineClosed, match="new"):
                getattr(engine, name)
        with pytest.raises(EngineClosed, match="new"):
            await engine.wait_ended()
        async with engine:
            with pytest.raises(EngineError, match="started before"):
                await engine.start()
        with pytest.raises(EngineClosed):
            await engine.generate("Hi")
        with pytest.raises(EngineClosed):
            engine.session()
        with pytest.raises(EngineError, match="started before"):
            await engine.start()
        await engine.close()

    @pytest.mark.parametrize("name", ["tokenizer", "chat_template"])
    def test_parts_of_the_wrong_kind_are_refused(self, name: str) -> None:
        part: Any = {name: "vicuna"}
        with pytest.raises(InvalidParameter, match="chat_template_config") as caught:
            AsyncEngine("tiny-chat", **part)
        assert caught.value.param == name

    async def test_closing_a_new_engine(self) -> None:
        engine = FakeEngine("x")
        await engine.close()
        with pytest.raises(EngineError):
            await engine.start()

    async def test_a_failed_start_leaves_nothing(self) -> None:
        engine = FakeEngine("x", start_error=ModelError("no such file"))
        with pytest.raises(ModelError, match="no such file"):
            async with engine:
                pass
        with pytest.raises(EngineClosed):
            await engine.generate("Hi")
        await engine.close()

    async def test_a_start_that_fails_after_the_executor_runs_closes_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = FakeEngine("x")

        def broken(*_: object, **__: object) -> None:
            raise ValueError("no scheduler today")

        monkeypatch.setattr("asyncllm.engine.lifecycle.Scheduler", broken)
        with pytest.raises(ValueError, match="no scheduler today"):
            await engine.start()
        with pytest.raises(EngineClosed):
            engine.executor.submit(Batch(step=0, starts=[], new_blocks=[], copies=[], decode=[], prefill=[]))

    async def test_closing_while_starting(self) -> None:
        engine, started = FakeEngine("x"), asyncio.Event()
        original = engine.executor.start

        async def slow() -> Limits:
            limits = await original()
            started.set()
            await asyncio.sleep(5)
            return limits

        engine.executor.start = slow  # type: ignore[method-assign]
        start = asyncio.create_task(engine.start())
        await started.wait()
        await asyncio.gather(engine.close(), engine.close())
        with pytest.raises(EngineClosed, match="while it was starting"):
            await start

    async def test_cancelling_the_start(self) -> None:
        engine = FakeEngine("x")
        original = engine.executor.start

        async def slow() -> Limits:
            await original()
            await asyncio.sleep(5)
            raise AssertionError

        engine.executor.start = slow  # type: ignore[method-assign]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await engine.start()
        await engine.close()

    async def test_a_cancellation_in_the_turn_in_which_it_succeeds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Late(EngineLoop):
            def __init__(self, *arguments: Any, **named: Any) -> None:
                super().__init__(*arguments, **named)
                asyncio.get_running_loop().call_soon(start.cancel)

        monkeypatch.setattr("asyncllm.engine.lifecycle.EngineLoop", Late)
        engine = FakeEngine("x")
        start = asyncio.create_task(engine.start())
        with pytest.raises(asyncio.CancelledError):
            await start
        with pytest.raises(EngineClosed):
            await engine.generate("Hi")

    async def test_close_ends_open_requests(self) -> None:
        engine = FakeEngine("x" * 200, delay_per_token=0.001)
        await engine.start()
        session = engine.session()
        tasks = [
            asyncio.create_task(engine.generate("Hi").response()),
            asyncio.create_task(collect(engine.generate("Hi"))),
            asyncio.create_task(session.chat("Hi").response()),
        ]
        await asyncio.sleep(0.02)
        await asyncio.gather(engine.close(), engine.close(), engine.close())
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, EngineClosed)
        assert session.closed

    async def test_close_while_prompts_arrive(self) -> None:
        engine = FakeEngine("x")
        await engine.start()
        generations = [engine.generate("Hi") for _ in range(3)]
        for generation in generations:
            await generation.start()
        await engine.close()
        for generation in generations:
            with pytest.raises(EngineClosed):
                await generation

    async def test_close_while_a_long_prompt_is_encoded(self) -> None:
        engine = FakeEngine("x", max_position=100_000, num_blocks=100_000)
        await engine.start()
        task = asyncio.create_task(engine.generate("y" * 20_000).response())
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineClosed):
            await task

    async def test_a_cancelled_close_goes_on(self) -> None:
        engine = FakeEngine("x" * 200, delay_per_token=0.01)
        await engine.start()
        async with engine.generate("Hi"):
            task = asyncio.create_task(engine.close())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await engine.close()
        with pytest.raises(EngineClosed):
            engine.stats()

    async def test_from_another_event_loop_it_is_refused(self) -> None:
        async with FakeEngine("x") as engine:

            async def elsewhere() -> None:
                with pytest.raises(EngineError, match="another event loop"):
                    await engine.generate("Hi")
                with pytest.raises(EngineError, match="another event loop"):
                    await engine.close()

            in_thread = asyncio.get_running_loop().run_in_executor
            with ThreadPoolExecutor(1) as pool:
                await in_thread(pool, lambda: asyncio.run(elsewhere()))
                with pytest.raises(EngineError, match="another event loop"):
                    await in_thread(pool, engine.stats)
            assert (await engine.generate("Hi")).text == "x"


class TestDeath:
    @pytest.mark.parametrize("fail_at", [0, 1, 5])
    async def test_open_and_later_calls_raise_with_the_cause(self, fail_at: int) -> None:
        async with FakeEngine("x" * 20, fail_at=fail_at, backend_config=EngineConfig(max_batch_size=2)) as engine:
            session = engine.session()
            tasks = [asyncio.create_task(engine.generate(f"q{number}").response()) for number in range(50)]
            tasks.append(asyncio.create_task(session.chat("Hi").response()))
            for error in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 2):
                assert isinstance(error, EngineDead)
                assert isinstance(error.__cause__, RuntimeError)
            with pytest.raises(EngineDead, match="fails at step") as caught:
                await engine.generate("Hi")
            assert isinstance(caught.value.__cause__, RuntimeError)
            with pytest.raises(EngineDead):
                await session.chat("Hi")
            with pytest.raises(EngineDead):
                engine.stats()

    async def test_chunks_before_the_death_are_delivered_first(self) -> None:
        async with FakeEngine("abcdef", fail_at=3) as engine:
            generation = engine.generate("Hi")
            text = (await anext(generation)).text
            while len(text) < 3:
                text += (await anext(generation)).text
            assert text == "abc"
            with pytest.raises(EngineDead):
                await anext(generation)

    async def test_a_loop_that_is_cancelled_from_outside_is_closed(self) -> None:
        async with FakeEngine("x" * 20) as engine:
            generation = engine.generate("Hi")
            await anext(generation)
            engine.running()._task.cancel()
            with pytest.raises(EngineClosed):
                await collect(generation)
            with pytest.raises(EngineClosed):
                await engine.generate("Hi")

    async def test_a_step_that_the_executor_cancels_is_a_death(self) -> None:
        async with FakeEngine("x" * 20) as engine:
            engine.executor.pause()
            async with engine.generate("Hi") as generation:
                await asyncio.sleep(0.01)
                engine.running()._steps._futures[0].cancel()
                engine.executor.resume()
                with pytest.raises(EngineDead, match="cancelled a step"):
                    await collect(generation)

    async def test_requests_that_had_only_arrived(self) -> None:
        async with FakeEngine("x" * 20, fail_at=2) as engine:
            first = engine.generate("Hi")
            await anext(first)
            late = engine.generate("late")
            await late.start()
            with pytest.raises(EngineDead):
                await late
            with pytest.raises(EngineDead):
                await collect(first)
