"""/sleep, /pause, /reset_prefix_cache and similar routes: who may call them, and that the server stays up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncllm.engine.loop.control import PARTS
from asyncllm.errors import ModelError
from asyncllm.protocol import Command, Sleep, Wake
from asyncllm.server.routes import ROUTES
from asyncllm.testing import FakeEngine
from tests.engine.waits import until
from tests.server.serving import Served, serving

pytestmark = pytest.mark.anyio

OWNER = {"Authorization": "Bearer owner"}
CLIENT = {"Authorization": "Bearer client"}
PING: dict[str, Any] = {"messages": [{"role": "user", "content": "ping"}]}
CHAT = "/v1/chat/completions"
OWNERS = ("/sleep", "/wakeup", "/wake_up", "/pause", "/resume", "/reset_prefix_cache")


@pytest.fixture
def admin_key_file(tmp_path: Path) -> str:
    file = tmp_path / "admin"
    file.write_text("# whose server it is\nowner\n", encoding="utf-8")
    return str(file)


async def post(served: Served, path: str, headers: dict[str, str] = OWNER) -> tuple[int, Any]:
    async with served.http.post(served.url + path, headers=headers) as response:
        return response.status, await response.json()


async def test_an_answer_that_runs_waits_and_goes_on(admin_key_file: str) -> None:
    engine = FakeEngine("pong" * 50, delay_per_token=0.001)
    async with serving(engine, admin_key_file=admin_key_file) as served:
        running = asyncio.create_task(served.post(CHAT, PING))
        await until(lambda: engine.stats().running)
        assert await served.get("/is_sleeping") == (200, {"is_sleeping": False})
        assert await post(served, "/sleep") == (200, {"is_sleeping": True})
        assert await served.get("/is_sleeping") == (200, {"is_sleeping": True})
        status, body = await served.post(CHAT, PING)
        assert (status, body["error"]["code"]) == (503, "sleeping")
        for path, well in (("/health", 200), ("/health/live", 200), ("/health/ready", 503)):
            status, health = await served.get(path)
            assert (status, health["status"]) == (well, "sleeping")
        assert (await served.get("/v1/models"))[0] == 200
        assert await post(served, "/wakeup") == (200, {"is_sleeping": False})
        status, body = await running
        assert (status, body["choices"][0]["message"]["content"]) == (200, "pong" * 50)
        assert (await served.post(CHAT, PING))[0] == 200


async def test_levels_and_parts(admin_key_file: str) -> None:
    engine = FakeEngine()
    async with serving(engine, admin_key_file=admin_key_file) as served:
        assert (await post(served, "/sleep?level=2"))[0] == 200
        assert await post(served, "/wakeup?tags=weights") == (200, {"is_sleeping": True})
        assert await post(served, "/wakeup?tags=weights&tags=kv_cache") == (200, {"is_sleeping": False})
        parts = [Wake(frozenset({"weights"})), Wake(PARTS)]
        assert engine.executor.commands == [Sleep(2), *parts]
        for query, param in (
            ("/sleep?level=3", "level"),
            ("/sleep?level=1&level=2", "level"),
            ("/sleep?tags=weights", "tags"),
            ("/wakeup?tags=everything", "tags"),
            ("/wakeup?level=1", "level"),
        ):
            status, body = await post(served, query)
            assert (status, body["error"]["param"]) == (400, param)
        assert len(engine.executor.commands) == 3


async def test_a_device_without_room_is_a_503(admin_key_file: str) -> None:
    def no_room(command: Command) -> Exception | None:
        return ModelError("no memory left for the weights") if isinstance(command, Wake) else None

    async with serving(FakeEngine(command_error=no_room), admin_key_file=admin_key_file) as served:
        await post(served, "/sleep")
        status, body = await post(served, "/wakeup")
        assert (status, body["error"]["code"]) == (503, "model_unavailable")
        assert await served.get("/is_sleeping") == (200, {"is_sleeping": True})


async def test_a_clients_key_is_not_the_owners(admin_key_file: str) -> None:
    engine = FakeEngine()
    async with serving(engine, api_keys=["client"], admin_key_file=admin_key_file) as served:
        for path in (*OWNERS, "/flush_cache"):
            for headers in ({}, CLIENT):
                status, body = await post(served, path, headers)
                assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        for path in OWNERS:
            assert (await post(served, path))[0] == 200
        assert (await served.get("/is_sleeping", headers=CLIENT))[0] == 200
        assert (await served.get("/is_sleeping", headers=OWNER))[0] == 401


async def test_without_an_owners_key_there_are_no_such_routes() -> None:
    async with serving(FakeEngine()) as served:
        for path in OWNERS:
            assert (await post(served, path))[0] == 404
        _, document = await served.get("/openapi.json")
        assert not {*OWNERS} & set(document["paths"])
        assert {"/is_sleeping", "/is_paused"} <= set(document["paths"])


async def test_the_document_has_them_with_their_parameters(admin_key_file: str) -> None:
    async with serving(FakeEngine(), admin_key_file=admin_key_file) as served:
        _, document = await served.get("/openapi.json")
    assert set(document["paths"]) >= {"/sleep", "/wakeup"}
    operation = document["paths"]["/sleep"]["post"]
    assert operation["security"] == [{"bearer": []}]
    assert [(each["name"], each["in"]) for each in operation["parameters"]] == [("level", "query")]
    assert {"400", "401", "503"} <= set(operation["responses"])
    assert document["components"]["securitySchemes"]
    assert {route.path for route in ROUTES if route.query} >= {"/sleep", "/wakeup"}


async def test_a_client_ends_the_server_where_it_may() -> None:
    engine = FakeEngine("pong" * 20, delay_per_token=0.002)
    async with serving(engine, allow_terminate_by_client=True) as served:
        running = asyncio.create_task(served.post(CHAT, PING))
        await until(lambda: engine.stats().running)
        assert await served.get("/terminate") == (200, {"running": 1})
        status, body = await running
        assert (status, body["choices"][0]["message"]["content"]) == (200, "pong" * 20)
        async with asyncio.timeout(5):
            await served.task


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_a_page_of_another_site_does_not_end_it(site: str) -> None:
    async with serving(FakeEngine(), allow_terminate_by_client=True) as served:
        status, body = await served.get("/terminate", headers={"Sec-Fetch-Site": site})
        assert (status, body["error"]["code"]) == (403, "cross_site")
        assert not served.service.state.stop.is_set()


async def test_elsewhere_there_is_no_such_route() -> None:
    async with serving(FakeEngine()) as served:
        assert (await served.get("/terminate"))[0] == 404
        assert not served.service.state.stop.is_set()


async def test_a_paused_server_answers_afterwards(admin_key_file: str) -> None:
    engine = FakeEngine("pong" * 50, delay_per_token=0.001)
    async with serving(engine, admin_key_file=admin_key_file) as served:
        running = asyncio.create_task(served.post(CHAT, PING))
        await until(lambda: engine.stats().running)
        assert await served.get("/is_paused") == (200, {"is_paused": False})
        assert await post(served, "/pause?mode=keep") == (200, {"status": "paused"})
        assert await served.get("/is_paused") == (200, {"is_paused": True})
        assert (await served.get("/server_info"))[1]["status"] == "paused"
        later = asyncio.create_task(served.post(CHAT, PING))
        await until(lambda: engine.stats().waiting)
        for path, well in (("/health", 200), ("/health/live", 200), ("/health/ready", 503)):
            status, health = await served.get(path)
            assert (status, health["status"]) == (well, "paused")
        assert await post(served, "/resume") == (200, {"status": "resumed"})
        for task in (running, later):
            status, body = await task
            assert (status, body["choices"][0]["message"]["content"]) == (200, "pong" * 50)


@pytest.mark.parametrize(
    ("query", "reason", "cached"),
    [
        ("", "abort", False),
        ("?mode=abort&clear_cache=false", "abort", True),
        ("?mode=wait", "stop", False),
        ("?wait_for_inflight_requests=true&clear_cache=0", "stop", True),
    ],
)
async def test_a_pause_ends_open_answers_or_waits_for_them(
    admin_key_file: str, query: str, reason: str, cached: bool
) -> None:
    engine = FakeEngine("pong" * 50, delay_per_token=0.001)
    async with serving(engine, admin_key_file=admin_key_file) as served:
        running = asyncio.create_task(served.post(CHAT, PING))
        await until(lambda: engine.stats().running)
        assert (await post(served, "/pause" + query))[0] == 200
        status, body = await running
        assert (status, body["choices"][0]["finish_reason"]) == (200, reason)
        assert (engine.stats().blocks_cached > 0) is cached
        assert (await post(served, "/resume"))[0] == 200
        assert (await served.post(CHAT, PING))[0] == 200


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("/pause?mode=later", "mode"),
        ("/pause?mode=keep&mode=wait", "mode"),
        ("/pause?clear_cache=perhaps", "clear_cache"),
        ("/pause?level=1", "level"),
        ("/resume?mode=keep", "mode"),
        ("/reset_prefix_cache?reset_external=2", "reset_external"),
        ("/reset_prefix_cache?device=gpu", "device"),
    ],
)
async def test_bad_parameters(admin_key_file: str, query: str, param: str) -> None:
    async with serving(FakeEngine(), admin_key_file=admin_key_file) as served:
        status, body = await post(served, query)
        assert (status, body["error"]["param"]) == (400, param)
        assert await served.get("/is_paused") == (200, {"is_paused": False})


async def test_the_prefix_cache_is_dropped(admin_key_file: str) -> None:
    engine = FakeEngine(block_size=4)
    async with serving(engine, admin_key_file=admin_key_file) as served:
        for path in ("/reset_prefix_cache", "/reset_prefix_cache?reset_running_requests=true"):
            await served.post(CHAT, PING)
            await until(lambda: engine.stats().blocks_cached)
            assert await post(served, path) == (200, {"success": True})
            assert not engine.stats().blocks_cached
        for method in ("GET", "POST"):
            await served.post(CHAT, PING)
            await until(lambda: engine.stats().blocks_cached)
            async with served.http.request(method, served.url + "/flush_cache", headers=OWNER) as response:
                assert (response.status, (await response.text()).startswith("Cache flushed.")) == (200, True)
            assert not engine.stats().blocks_cached


async def test_what_clients_of_sglang_read() -> None:
    engine = FakeEngine(block_size=4, num_blocks=100)
    async with serving(engine) as served:
        _, server = await served.get("/server_info")
        assert server["max_total_num_tokens"] == 400
        assert server["context_length"] == engine.session_len
        assert (server["status"], server["tp_size"], server["weight_version"]) == ("ready", 1, "0")
        await engine.update_weights({})
        assert (await served.get("/get_server_info"))[1]["weight_version"] == "1"
        _, model = await served.get("/model_info")
        assert (model["model_path"], model["is_generation"]) == ("fake", True)
        assert not model["has_image_understanding"]
        assert await served.get("/get_model_info") == (200, {**model, "weight_version": "1"})
