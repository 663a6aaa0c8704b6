"""Nodes are found out, left alone, and come back by themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest
from aiohttp import web

from asyncllm.server.distributor.health import pause_before
from asyncllm.server.distributor.nodes import MAX_FAILURES, Node, State
from tests.server.distributor.fakes import CHAT, FakeNode, distributing
from tests.server.raw import until

pytestmark = pytest.mark.anyio


async def test_a_node_that_dies_gets_nothing_and_comes_back_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    one, two = FakeNode("one"), FakeNode("two")
    async with distributing(one, two, routing_strategy="random") as served:
        await one.stop()
        await until(lambda: served.node(one).state is State.UNREACHABLE)
        assert set(await served.names(5)) == {"two"}
        await one.start()
        await until(lambda: served.node(one).ready)
        assert set(await served.names(30)) == {"one", "two"}
    lines = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [("gets no requests" in line, "answers again" in line) for line in lines] == [(True, False), (False, True)]


async def test_a_draining_node_gets_nothing_new_and_its_answers_finish() -> None:
    one, two, go_on = FakeNode("one"), FakeNode("two"), asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        await go_on.wait()
        return await one.tell_name(request)

    one.handle = handle
    async with distributing(one, two) as served:
        served.node(two).unfinished = 1
        asking = asyncio.create_task(served.post(CHAT))
        await until(lambda: bool(one.requests))
        one.ready = 503
        await until(lambda: served.node(one).state is State.NOT_READY)
        assert await served.names(3) == ["two"] * 3
        go_on.set()
        assert (await asking)[1] == {"name": "one"}
        one.ready = 200
        await until(lambda: served.node(one).ready)


async def test_models_follow_the_nodes() -> None:
    one, two = FakeNode("one", ("a", "shared")), FakeNode("two", ("b", "shared"))
    async with distributing(one, two) as served:
        listed = (await served.get("/v1/models"))[1]
        assert [entry["id"] for entry in listed["data"]] == ["a", "shared", "b"]
        assert set(await served.names(4, {"model": "b"})) == {"two"}
        number, answer = await served.post(CHAT, {"model": "c"})
        assert (number, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model")
        one.models = ("c",)
        await until(lambda: "c" in served.node(one).models)
        assert await served.names(1, {"model": "c"}) == ["one"]
        assert (await served.post(CHAT, {"model": "a"}))[0] == 404


async def test_a_server_of_another_make_is_ready_while_it_lives() -> None:
    node = FakeNode()
    node.ready = 404
    async with distributing(node) as served:
        assert await served.names(1) == ["one"]


async def test_a_node_that_wants_a_key_gets_the_clients_own(caplog: pytest.LogCaptureFixture) -> None:
    node = FakeNode()
    node.key = "k"
    async with distributing(node) as served:
        assert await served.names(1, {"model": "any"}) == ["one"]
        await asyncio.sleep(0.05)
    assert [record.message.count("--node-key-file") for record in caplog.records] == [1]


@pytest.mark.parametrize(
    "answer",
    [
        lambda: web.json_response(["m"]),
        lambda: web.json_response({"data": []}, status=500),
        # A redirect is not followed.
        lambda: web.Response(status=302, headers={"Location": "/health/ready"}),
    ],
)
async def test_an_answer_that_is_no_list_of_models_is_a_failure(answer: Callable[[], web.Response]) -> None:
    node = FakeNode()

    async def text(request: web.Request) -> web.StreamResponse:
        return answer()

    async with distributing(node) as served:
        node._models = text  # type: ignore[method-assign, assignment]
        await node.stop()
        await node.start()
        await until(lambda: served.node(node).state is State.UNREACHABLE)


@pytest.mark.parametrize(
    ("interval", "failures", "expected"),
    [(2.0, 0, 2), (2.0, MAX_FAILURES, 2), (2.0, MAX_FAILURES + 2, 8), (2.0, 1000, 30), (60.0, 1000, 60)],
)
def test_one_that_does_not_answer_is_asked_less_often(interval: float, failures: int, expected: float) -> None:
    pauses = {pause_before(interval, failures) for _ in range(50)}
    assert 0.8 * expected <= min(pauses) < max(pauses) <= 1.2 * expected


async def test_a_node_that_refuses_checks_is_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    node = FakeNode()
    node.ready = 403  # Such as for a Host that it does not know.
    async with distributing(node, started=False) as served, node:
        served.distributor.nodes.add(Node(node.url))
        served.distributor.checks.watch(served.node(node))
        await until(lambda: served.node(node).state is State.UNREACHABLE)
    assert "status 403" in caplog.text


async def test_health_routes() -> None:
    node = FakeNode()
    async with distributing(node, api_keys=["k"]) as served:
        for path in ("/health", "/health/live", "/health/ready", "/ping", "/health_generate"):
            assert await served.get(path) == (200, {"status": "healthy", "nodes": 1, "ready": 1})
            async with served.http.head(served.url + path) as response:
                assert response.status == 200
        assert node.requests == []
        node.ready = 503
        await until(lambda: not served.node(node).ready)
        assert await served.get("/health") == (200, {"status": "healthy", "nodes": 1, "ready": 0})
        assert await served.get("/health/ready") == (503, {"status": "no_node", "nodes": 1, "ready": 0})
