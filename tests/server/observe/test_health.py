"""The three health routes while the engine is busy, stuck, dead or stopping."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from asyncllm.config import EngineConfig, ServerConfig
from asyncllm.server.app import build_app
from asyncllm.server.http.listening import bind, listening
from asyncllm.server.routes import ROUTES
from asyncllm.server.run import open_service
from asyncllm.testing import FakeEngine
from tests.engine.waits import until
from tests.server.serving import Served, serving

pytestmark = pytest.mark.anyio

PING: list[Any] = [{"role": "user", "content": "ping"}]
ALL = ("/health", "/health/live", "/health/ready")


async def ask(served: Served, path: str) -> tuple[int, str]:
    status, body = await served.get(path)
    return status, body["status"]


async def test_an_idle_server_is_well_however_long() -> None:
    async with serving(FakeEngine(), progress_timeout=0.05, api_keys=["secret"]) as served:
        await asyncio.sleep(0.2)
        assert [await ask(served, path) for path in ALL] == [(200, "healthy")] * 3
        for path in ("/ping", "/health_generate"):
            assert await ask(served, path) == (200, "healthy")
        async with served.http.post(f"{served.url}/ping", headers={"Authorization": ""}) as answer:
            assert answer.status == 200


async def test_work_without_progress_is_a_stall_until_a_step_finishes() -> None:
    engine = FakeEngine("x" * 500)
    async with serving(engine, progress_timeout=0.3) as served:
        assert await served.get("/load") == (200, {"server_load": 0})
        engine.executor.pause()
        asking = asyncio.create_task(served.post("/v1/chat/completions", {"messages": PING}))
        await until(lambda: engine.stats().running)
        assert await served.get("/load") == (200, {"server_load": 1})
        assert await ask(served, "/health") == (200, "healthy")
        await asyncio.sleep(0.4)
        assert await ask(served, "/health") == (503, "stalled")
        assert await ask(served, "/health/ready") == (503, "stalled")
        assert await ask(served, "/health/live") == (200, "stalled")
        _, body = await served.get("/health")
        assert body["running"] == 1
        assert 0.4 <= body["seconds_since_progress"] < 30
        engine.executor.resume()
        status, _ = await asking
        assert status == 200
        assert await ask(served, "/health") == (200, "healthy")


async def test_a_full_queue_that_moves_is_no_stall() -> None:
    engine = FakeEngine("x" * 40, EngineConfig(max_batch_size=1), delay_per_token=0.005)
    async with serving(engine, progress_timeout=0.5) as served:
        asking = [asyncio.create_task(served.post("/v1/chat/completions", {"messages": PING})) for _ in range(8)]
        seen = set()
        max_waiting = 0
        while not all(each.done() for each in asking):
            for path in ALL:
                seen.add(await ask(served, path))
            max_waiting = max(max_waiting, engine.stats().waiting)
            await asyncio.sleep(0.02)
        assert all(each.result()[0] == 200 for each in asking)
    assert seen == {(200, "healthy")}
    assert max_waiting >= 6


async def test_a_dead_engine_is_no_longer_alive() -> None:
    async with serving(FakeEngine(fail_at=0)) as served:
        assert (await served.post("/v1/chat/completions", {"messages": PING}))[0] == 503
        assert [await ask(served, path) for path in ALL] == [(503, "dead")] * 3


async def test_a_leaving_server_is_well_and_serves_but_is_not_ready() -> None:
    engine = FakeEngine("x" * 100)
    async with serving(engine, drain_delay=30.0) as served:
        served.service.state.stop.set()
        await until(lambda: served.service.state.phase.value == "leaving")
        assert [await ask(served, path) for path in ALL] == [(200, "draining"), (200, "draining"), (503, "draining")]
        assert (await served.post("/v1/chat/completions", {"messages": PING}))[0] == 200
        assert (await served.get("/v1/models"))[0] == 200


async def test_an_engine_that_its_program_has_started_is_served_at_once() -> None:
    async with FakeEngine() as engine:
        service = open_service(engine, ServerConfig(server_port=0, generation_config="none"))
        listener = bind(service.config)
        url = "http://{}:{}".format(*listener.getsockname())
        async with (
            listening(build_app(service), service.config, listener, None),
            aiohttp.ClientSession() as http,
            http.get(url) as response,
        ):
            assert response.status == 200


async def test_while_the_model_is_loaded_everything_answers_that_it_is_not_there() -> None:
    engine = FakeEngine({"ping": "pong"})
    settings = ServerConfig(server_port=0, generation_config="none", allow_terminate_by_client=True)
    service = open_service(engine, settings)
    listener = bind(service.config)
    url = "http://{}:{}".format(*listener.getsockname())
    async with listening(build_app(service), service.config, listener, None), aiohttp.ClientSession() as http:
        forms = {route.path: route.errors for route in ROUTES}
        for method, path in [*((route.method, route.path) for route in ROUTES), ("GET", "/no/such/route")]:
            async with http.request(method, url + path, json={"messages": PING}) as response:
                assert response.status == 503, path
                assert 1 <= int(response.headers["Retry-After"]) <= 120
                body = await response.json()
                if path in (*ALL, "/ping", "/health_generate"):
                    assert body["status"] == "starting"
                elif forms.get(path) == "anthropic":
                    assert body["error"]["type"] == "overloaded_error"
                elif forms.get(path) == "ollama":
                    assert body["error"].startswith("The model is")
                else:
                    assert body["error"]["code"] == "model_loading"
        async with http.get(url, headers={"Host": "evil.example"}) as response:
            assert response.status == 403
        async with service.supervisor, http.post(f"{url}/v1/chat/completions", json={"messages": PING}) as response:
            assert response.status == 200
