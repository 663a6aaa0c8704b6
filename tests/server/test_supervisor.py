"""A server whose engine dies: open requests get one error, new ones a 503, and then it serves again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncllm.config import EngineConfig
from asyncllm.errors import EngineDead, ModelError
from asyncllm.testing import FakeEngine, Fault, FaultPlan
from tests.server.raw import connected, events_of, post, until
from tests.server.serving import Served, serving

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
TALK = "/v1/chat/interactive"
STREAM: dict[str, Any] = {"messages": "ping", "stream": True}
LONG = "a long answer " * 5


class Engines:
    """Makes engines that die as planned: each of `deaths` has one engine, and what comes after lives."""

    def __init__(self, *deaths: Fault | Exception, answers: str = "pong") -> None:
        self._deaths = list(deaths)
        self._answers = answers
        self.made: list[FakeEngine] = []
        self.hold: asyncio.Event | None = None
        """Starts after the first wait for it."""

    def __call__(self) -> FakeEngine:
        death = self._deaths.pop(0) if self._deaths else None
        plan = FaultPlan(*([death] if isinstance(death, Fault) else []))
        engine = FakeEngine(
            self._answers, faults=plan, start_error=death if isinstance(death, Exception) else None, num_blocks=64
        )
        start, hold = engine.executor.start, self.hold

        async def held() -> Any:
            if hold is not None:
                await hold.wait()
            return await start()

        engine.executor.start = held  # type: ignore[method-assign]
        self.made.append(engine)
        return engine


async def dies(served: Served, code: str = "engine_unavailable") -> None:
    """Ask for an answer at which the engine dies."""
    status, answer = await served.post(CHAT, {"messages": "ping"})
    assert (status, answer["error"]["code"]) == (503, code)


async def answers(served: Served) -> None:
    status, answer = await served.post(CHAT, {"messages": "ping"})
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"] == "pong"


async def test_a_stream_gets_one_error_and_the_next_request_its_answer() -> None:
    engines = Engines(Fault("alloc", at=3), answers=LONG)
    async with serving(engines(), make_engine=engines) as served, served.http:
        async with connected(served) as wire:
            wire.send(post(CHAT, STREAM))
            answer = await wire.answer()
            assert answer.status == 200
            assert await wire.closed() == b""
            *events, error = events_of(answer.body)
            assert error["error"]["code"] == "engine_unavailable"
            assert not any("error" in event for event in events)
        await until(lambda: served.service.supervisor.num_restarts == 1)
        status, found = await served.post(CHAT, {"messages": "ping"})
        assert (status, found["choices"][0]["message"]["content"]) == (200, LONG)
        assert (await served.get("/health/ready"))[0] == 200
        first, second = engines.made
        assert served.engine is second
        assert first is not second
        second.check_idle()


async def test_while_it_restarts_it_says_so_on_connections_that_stay() -> None:
    engines = Engines(Fault("admit"))
    async with serving(engines(), make_engine=engines) as served:
        engines.hold = asyncio.Event()
        async with connected(served) as wire:
            wire.send(post(CHAT, {"messages": "ping"}))
            assert (await wire.answer()).status == 503
            await until(lambda: served.service.supervisor.restarting)
            for path, status in (("/health", 503), ("/health/ready", 503), ("/health/live", 200)):
                found, body = await served.get(path)
                assert (found, body["status"]) == (status, "restarting")
            wire.send(post(CHAT, {"messages": "ping"}))
            refused = await wire.answer()
            assert refused.status == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert b"engine_restarting" in refused.body
            assert (await served.get("/v1/models"))[0] == 200
            engines.hold.set()
            await until(lambda: not served.service.supervisor.restarting)
            wire.send(post(CHAT, {"messages": "ping"}))
            assert (await wire.answer()).status == 200


async def test_conversations_that_it_kept_are_told_so_once() -> None:
    engines = Engines(Fault("admit", request="death"))
    async with serving(engines(), make_engine=engines) as served:
        turn = {"prompt": "hello", "session_id": 7, "interactive_mode": True}
        assert (await served.post(TALK, turn))[0] == 200
        assert (await served.post(CHAT, {"messages": "death"}))[0] == 503
        await until(lambda: served.service.supervisor.num_restarts == 1)
        status, answer = await served.post(TALK, turn)
        assert (status, answer["error"]["code"]) == (410, "session_expired")
        status, answer = await served.post(TALK, turn)
        assert (status, answer["text"], answer["history_tokens"]) == (200, "pong", answer["history_tokens"])
        assert len(served.service.sessions) == 1


async def test_the_metrics_go_on_and_count_restarts() -> None:
    engines = Engines(Fault("free"), Fault("alloc", at=1))
    async with serving(engines(), make_engine=engines) as served:
        for count in (1, 2):
            await dies(served)
            await until(lambda count=count: served.service.supervisor.num_restarts == count)  # type: ignore[misc]
        await answers(served)
        async with served.http.get(f"{served.url}/metrics") as response:
            lines = (await response.text()).splitlines()
    assert 'asyncllm:engine_restarts_total{model_name="fake"} 2.0' in lines
    assert 'asyncllm:engine_up{model_name="fake"} 1.0' in lines
    # Of the requests that died, and of the last one.
    assert 'asyncllm:request_success_total{finished_reason="error",model_name="fake"} 2.0' in lines
    assert 'asyncllm:request_success_total{finished_reason="stop",model_name="fake"} 1.0' in lines


async def test_a_start_that_fails_is_tried_again() -> None:
    engines = Engines(Fault("admit"), ModelError("no memory yet"))
    async with serving(engines(), make_engine=engines) as served:
        await dies(served)
        await until(lambda: served.service.supervisor.num_restarts == 1)
        await answers(served)
    assert len(engines.made) == 3


async def test_too_many_deaths_end_the_server(caplog: pytest.LogCaptureFixture) -> None:
    engines = Engines(*(Fault("admit") for _ in range(9)))

    async def serve() -> None:
        async with serving(engines(), make_engine=engines, max_restarts=2) as served:
            for count in range(3):
                await until(lambda count=count: served.service.supervisor.num_restarts == count)  # type: ignore[misc]
                await dies(served)
            await served.task

    with pytest.raises(EngineDead, match="max_restarts is 2"):
        await serve()
    assert len(engines.made) == 3
    assert "a planned fault at" in caplog.text


async def test_deaths_long_ago_do_not_count() -> None:
    engines = Engines(*(Fault("admit") for _ in range(3)))
    async with serving(engines(), make_engine=engines, max_restarts=1, restart_window=0.05) as served:
        for count in (1, 2, 3):
            await dies(served)
            await until(lambda count=count: served.service.supervisor.num_restarts == count)  # type: ignore[misc]
            await asyncio.sleep(0.06)
        await answers(served)


async def test_a_lost_device_ends_it_at_once() -> None:
    engines = Engines()
    engine = FakeEngine("pong", fail_at=2)

    async def serve() -> None:
        async with serving(engine, make_engine=engines) as served:
            async with connected(served) as wire:
                wire.send(post(CHAT, STREAM))
                *_, error = events_of((await wire.answer()).body)
                assert error["error"]["code"] == "engine_unavailable"
            await served.task

    with pytest.raises(EngineDead, match="lost to this process"):
        await serve()
    assert not engines.made
    await engine.close()


async def test_a_step_that_does_not_complete_ends_it() -> None:
    engine = FakeEngine("pong", EngineConfig(stall_timeout=0.05))
    engine.executor.pause()

    async def serve() -> None:
        async with serving(engine, make_engine=Engines()) as served:
            await dies(served)
            await served.task

    with pytest.raises(EngineDead, match="stall_timeout"):
        await serve()
    engine.executor.resume()
    await engine.close()


@pytest.mark.parametrize("loading", [False, True])
async def test_stopping_while_it_restarts(loading: bool) -> None:
    engines = Engines(Fault("admit"))
    async with serving(engines(), make_engine=engines) as served:
        engines.hold = asyncio.Event()
        await dies(served)
        if loading:
            await until(lambda: len(engines.made) == 2)
        served.service.state.stop.set()
        async with asyncio.timeout(5):
            await served.task
    assert served.service.supervisor.num_restarts == 0


async def test_a_failed_step_is_no_death() -> None:
    engines = Engines(Fault("decode"))
    async with serving(engines(), make_engine=engines) as served:
        status, answer = await served.post(CHAT, {"messages": "ping"})
        assert (status, answer["error"]["code"]) == (500, "request_failed")
        await answers(served)
        assert len(engines.made) == 1
