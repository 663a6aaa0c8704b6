"""/sleep, /wakeup and /is_sleeping: for who has the key, and the server stays up and says so."""

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
        for path in ("/sleep", "/wakeup"):
            for headers in ({}, CLIENT):
                status, body = await post(served, path, headers)
                assert (status, body["error"]["code"]) == (401, "invalid_api_key")
            assert (await post(served, path))[0] == 200
        assert (await served.get("/is_sleeping", headers=CLIENT))[0] == 200
        assert (await served.get("/is_sleeping", headers=OWNER))[0] == 401


async def test_without_an_owners_key_there_are_no_such_routes() -> None:
    async with serving(FakeEngine()) as served:
        for path in ("/sleep", "/wakeup"):
            assert (await post(served, path))[0] == 404
        _, document = await served.get("/openapi.json")
        assert not {"/sleep", "/wakeup"} & set(document["paths"])
        assert "/is_sleeping" in document["paths"]


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
        assert not served.service.entrance.stop.is_set()


async def test_elsewhere_there_is_no_such_route() -> None:
    async with serving(FakeEngine()) as served:
        assert (await served.get("/terminate"))[0] == 404
        assert not served.service.entrance.stop.is_set()
