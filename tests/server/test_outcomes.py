"""The status by which a request is logged and counted is the one it ended with, also after a 200 has been sent."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from asyncllm.config import ServerConfig
from asyncllm.server.app import build_app
from asyncllm.server.http.access import Auth
from asyncllm.server.http.routing import Route
from asyncllm.server.run import open_service
from asyncllm.testing import FakeEngine
from tests.server.raw import connected, post
from tests.server.serving import serving

pytestmark = pytest.mark.anyio

CHAT = {"messages": "ping", "stream": True}


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Any:
    """The statuses of the access log so far."""
    caplog.set_level(logging.INFO, "asyncllm.server")
    return lambda: [record.args[2] for record in caplog.records if record.levelno == logging.INFO]


@pytest.mark.parametrize(
    ("device", "status", "code"),
    [
        ({"row_failure": lambda history: "it broke" if history[-1] == ord("n") else None}, 500, "request_failed"),
        ({"fail_at": 3}, 503, "engine_unavailable"),
    ],
)
async def test_a_stream_that_broke_off(device: dict[str, Any], status: int, code: str, logged: Any) -> None:
    async with serving(FakeEngine({"ping": "pong"}, **device)) as served:
        async with served.http.post(f"{served.url}/v1/chat/completions", json=CHAT) as response:
            assert response.status == 200
            *_, error, done = (await response.text()).strip().split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == code
        assert done == "data: [DONE]"
        async with served.http.get(f"{served.url}/metrics") as response:
            counted = await response.text()
    assert logged()[0] == status
    series = f'http_requests_total{{method="POST",route="/v1/chat/completions",status="{status}"}} 1.0'
    assert series in counted


async def test_a_deadline_in_a_stream(logged: Any) -> None:
    async with (
        serving(FakeEngine("x" * 1000, delay_per_token=0.01)) as served,
        served.http.post(f"{served.url}/v1/chat/completions", json={**CHAT, "timeout": 0.1}) as response,
    ):
        assert response.status == 200
        assert b"deadline_exceeded" in await response.read()
    assert logged() == [504]


async def test_a_client_that_left_when_the_answer_was_ready(logged: Any) -> None:
    async def leave(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.close()
        return web.Response(text="nobody reads this")

    route = Route("GET", "/leave", leave, Auth.PUBLIC)
    engine = FakeEngine()
    async with engine:
        app = build_app(open_service(engine, ServerConfig(generation_config="none")), [route])
        async with TestClient(TestServer(app)) as client:
            with pytest.raises(Exception, match="disconnected"):
                await client.get("/leave")
    assert logged() == [499]


async def test_a_client_that_left_in_a_stream(logged: Any) -> None:
    engine = FakeEngine("x" * 1000, delay_per_token=0.005)
    async with serving(engine) as served:
        async with connected(served) as wire:
            wire.send(post("/v1/chat/completions", CHAT))
            await wire.answer_head()
            await wire.piece()
        await served.service.state.idle.wait()
    assert logged() == [499]
