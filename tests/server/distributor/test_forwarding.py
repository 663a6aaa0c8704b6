"""Requests and answers pass unchanged; another node gets a request only before one has begun to answer."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from asyncllm.server.distributor.nodes import MAX_FAILURES
from asyncllm.server.http.server_state import Phase
from tests.processes import free_port
from tests.server.distributor.fakes import CHAT, Distributing, FakeNode, distributing
from tests.server.raw import post, until

pytestmark = pytest.mark.anyio

ASKED = {"model": "m"}
EVENTS = [b'data: {"n": 1}\n\n', b": ping\n\n", b'data: {"n": 2}\n\ndata: {"n"', b": 3}\n\n", b"data: [DONE]\n\n"]


def streaming(pieces: list[bytes], *, breaks: bool = False, kind: str = "text/event-stream") -> Any:
    """Answers in pieces, and breaks off at the end or not."""

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0.002)
        if breaks:
            assert request.transport is not None
            request.transport.abort()
        return response

    return handle


def status(number: int, **headers: str) -> Any:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.json_response({"from": "node"}, status=number, headers=headers)

    return handle


async def aborting(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def outcomes(served: Distributing) -> dict[str, float]:
    """How requests to nodes have ended."""
    found: dict[str, float] = {}
    async with served.http.get(served.url + "/metrics") as response:
        for line in (await response.text()).splitlines():
            if line.startswith("asyncllm:distributor_requests_total{"):
                outcome = line.partition('outcome="')[2].partition('"')[0]
                found[outcome] = found.get(outcome, 0) + float(line.rpartition(" ")[2])
    return found


class TestPassing:
    async def test_any_route_passes_with_its_method_query_headers_and_body(self) -> None:
        async with FakeNode() as node, distributing(node, started=False) as served:
            await until(lambda: served.node(node).ready)
            kept = {"Authorization": "Bearer k", "X-Own": "ü", "X-Request-Id": "id-1"}
            given = {**kept, "Connection": "X-Hop", "X-Hop": "h"}
            body = json.dumps({"model": "m", "text": "ü"}).encode()
            sent = [
                ("POST", CHAT),
                ("POST", "/generate"),
                ("POST", "/api/chat"),
                ("POST", "/no/such%20route?a=b%26c"),
                ("DELETE", "/v1/responses/resp_1"),
                ("GET", "/openapi.json"),
            ]
            for method, path in sent:
                data = body if method == "POST" else None
                async with served.http.request(
                    method, served.url + path, data=data, headers={**given, "Content-Type": "application/json"}
                ) as response:
                    assert await response.json() == {"name": "one"}
                    assert response.headers["X-Request-Id"] == "id-1"
            assert [(method, path) for method, path, _, _ in node.requests] == sent
            large = "x" * 2**19

            async def tell_much(request: web.Request) -> web.StreamResponse:
                return web.json_response({"large": large})

            node.handle = tell_much
            assert await served.post(CHAT) == (200, {"large": large})
            node.requests.pop()
            node.handle = node.tell_name
            for method, _, headers, got in node.requests:
                assert got == (body if method == "POST" else b"")
                assert headers.items() >= {name.lower(): value for name, value in kept.items()}.items()
                assert headers["host"] == node.url.removeprefix("http://")
                assert "x-hop" not in headers
            async with served.http.head(served.url + "/version") as response:
                assert (response.status, response.headers["Content-Length"]) == (200, "15")
            assert (await served.get("/load"))[1] == {"server_load": 0}
            assert await outcomes(served) == {"200": len(sent) + 2}

    async def test_a_packed_body_is_unpacked_and_a_large_one_refused(self) -> None:
        node = FakeNode()
        async with distributing(node, max_body_bytes=2000) as served:
            headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
            async with served.http.post(
                served.url + CHAT, data=gzip.compress(b'{"a": 1}'), headers=headers
            ) as response:
                assert response.status == 200
            [(_, _, passed, body)] = node.requests
            assert body == b'{"a": 1}'
            assert "content-encoding" not in passed
            assert (await served.post(CHAT, {"a": "x" * 3000}))[0] == 413
            assert len(node.requests) == 1

    async def test_the_nodes_key_takes_the_place_of_the_clients(self, tmp_path: Any) -> None:
        (tmp_path / "key").write_text("node-key")
        node = FakeNode()
        node.key = "node-key"
        async with distributing(node, node_key_file=str(tmp_path / "key"), api_keys=["client"]) as served:
            assert (await served.post(CHAT))[0] == 401
            for headers in ({"Authorization": "Bearer client"}, {"x-api-key": "client"}):
                assert (await served.post(CHAT, headers=headers))[0] == 200
                assert node.requests[-1][2]["authorization"] == "Bearer node-key"
                assert "x-api-key" not in node.requests[-1][2]
            assert list(served.node(node).models) == ["m"]

    @pytest.mark.parametrize("number", [200, 400, 404, 429, 500, 503])
    async def test_status_and_headers_are_the_nodes(self, number: int) -> None:
        node = FakeNode()
        node.handle = status(number, **{"Retry-After": "17", "X-Own": "x"})
        async with distributing(node) as served, served.http.post(served.url + CHAT, json=ASKED) as response:
            assert (response.status, await response.json()) == (number, {"from": "node"})
            assert (response.headers["Retry-After"], response.headers["X-Own"]) == ("17", "x")
            assert response.headers["Content-Length"] == "16"

    async def test_a_stream_passes_piece_by_piece(self) -> None:
        node, go_on = FakeNode(), asyncio.Event()

        async def handle(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for piece in EVENTS:
                await response.write(piece)
                await go_on.wait()
                go_on.clear()
            return response

        node.handle = handle
        async with distributing(node) as served, served.http.post(served.url + CHAT, json=ASKED) as response:
            for piece in EVENTS:
                assert await response.content.readexactly(len(piece)) == piece
                go_on.set()
            assert await response.content.read() == b""
            await until(lambda: not served.node(node).unfinished)


class TestRetries:
    async def test_a_node_that_cannot_be_reached_is_passed_over_and_comes_back(self) -> None:
        one, two = FakeNode("one"), FakeNode("two")
        async with distributing(one, two, health_interval=30.0, routing_strategy="min_observed_latency") as served:
            await one.stop()
            assert set(await served.names(2 * MAX_FAILURES)) == {"two"}
            assert served.node(one).failures <= MAX_FAILURES

    @pytest.mark.parametrize(("handle", "stays_ready"), [(status(503), False), (status(429), True), (aborting, True)])
    async def test_one_that_refuses_or_resets_is_passed_over(self, handle: Any, stays_ready: bool) -> None:
        one, two = FakeNode("one"), FakeNode("two")
        one.handle = handle
        async with distributing(one, two, health_interval=30.0) as served:
            served.node(two).unfinished = 5  # The strategy chooses the first one.
            assert (await served.post(CHAT))[1] == {"name": "two"}
            assert len(one.requests) == len(two.requests) == 1
            assert (served.node(one).unfinished, served.node(two).unfinished) == (0, 5)
            # A node that drains gets nothing new until a check finds it ready; one that is full does.
            assert served.node(one).ready == stays_ready

    async def test_the_last_refusal_is_passed_on(self) -> None:
        nodes = FakeNode("one"), FakeNode("two")
        for node in nodes:
            node.handle = status(429, **{"Retry-After": "9"})
        async with distributing(*nodes) as served, served.http.post(served.url + CHAT, json=ASKED) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "9")
            assert [len(node.requests) for node in nodes] == [1, 1]

    async def test_no_node_gets_what_the_only_one_did_not_answer(self) -> None:
        node = FakeNode()
        node.handle = aborting
        async with distributing(node) as served, served.http.post(served.url + CHAT, json=ASKED) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (502, "node_failed")
            assert 1 <= int(response.headers["Retry-After"]) <= 120
            assert len(node.requests) == 1
            assert await outcomes(served) == {"unreachable": 1}

    @pytest.mark.parametrize(
        ("path", "body"), [("/v1/responses", {"input": "Hi"}), ("/v1/chat/interactive", {"session_id": 1})]
    )
    async def test_what_changes_state_is_repeated_only_if_it_was_never_sent(self, path: str, body: Any) -> None:
        nodes = FakeNode("one"), FakeNode("two")
        for node in nodes:
            node.handle = aborting
        async with distributing(*nodes, health_interval=30.0) as served:
            assert (await served.post(path, body))[0] == 502
            assert sum(len(node.requests) for node in nodes) == 1
            [gone] = [node for node in nodes if node.requests]
            [left] = [node for node in nodes if not node.requests]
            left.handle = left.tell_name
            await gone.stop()
            served.node(left).unfinished = 5
            assert (await served.post(path, body))[1] == {"name": left.name}

    async def test_errors_have_the_form_of_their_route(self) -> None:
        async with distributing() as served:
            for path, form in (("/v1/messages", "type"), ("/api/chat", "error"), (CHAT, "error")):
                number, answer = await served.post(path)
                assert (number, form in answer) == (503, True)
            assert (await served.post("/v1/messages"))[1]["error"]["type"] == "overloaded_error"
            assert isinstance((await served.post("/api/chat"))[1]["error"], str)


class TestBrokenAnswers:
    @pytest.mark.parametrize(
        ("path", "kind", "pieces", "ending"),
        [
            (CHAT, "text/event-stream", EVENTS[:2], b'data: {"error":{'),
            (CHAT, "text/event-stream; charset=utf-8", [], b'data: {"error":{'),
            ("/v1/messages", "text/event-stream", EVENTS[:1], b'event: error\ndata: {"type":"error",'),
            ("/v1/responses", "text/event-stream", EVENTS[:1], b'event: error\ndata: {"error":{'),
            ("/api/chat", "application/x-ndjson", [b'{"n": 1}\n'], b'{"error":"'),
        ],
    )
    async def test_a_stream_ends_with_an_error_and_never_as_if_whole(
        self, path: str, kind: str, pieces: list[bytes], ending: bytes
    ) -> None:
        node = FakeNode()
        node.handle = streaming(pieces, breaks=True, kind=kind)
        async with distributing(node) as served, served.http.post(served.url + path, json=ASKED) as response:
            assert response.status == 200
            got = await response.read()
            assert got.startswith(b"".join(pieces) + ending)
            assert b"[DONE]" not in got
            assert response.headers.get("Connection") == "close" or response.connection is None
            assert await outcomes(served) == {"broken": 1}
            await until(lambda: not served.node(node).unfinished)

    @pytest.mark.parametrize(("kind", "pieces"), [("text/event-stream", EVENTS[:3]), ("application/json", [b'{"a": '])])
    async def test_where_no_error_can_stand_the_connection_is_cut(self, kind: str, pieces: list[bytes]) -> None:
        node = FakeNode()
        node.handle = streaming(pieces, breaks=True, kind=kind)
        async with distributing(node) as served, served.http.post(served.url + CHAT, json=ASKED) as response:
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()

    @pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
    async def test_a_whole_answer_that_breaks_off_is_an_error(self, path: str) -> None:
        node = FakeNode()

        async def handle(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Length": "100", "Content-Type": "application/json"})
            await response.prepare(request)
            await response.write(b'{"a": ')
            await asyncio.sleep(0.01)
            return await aborting(request)

        node.handle = handle
        async with distributing(node) as served:
            number, answer = await served.post(path)
            assert (number, "broke off" in answer["error"]["message"]) == (502, True)
            assert await outcomes(served) == {"broken": 1}

    @pytest.mark.parametrize("after_events", [0, 1])
    async def test_a_client_that_leaves_ends_the_nodes_answer(self, after_events: int) -> None:
        node, ended = FakeNode(), asyncio.Event()

        async def handle(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            if after_events:
                await response.prepare(request)
                await response.write(EVENTS[0])
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()
            return response

        node.handle = handle
        async with distributing(node) as served:

            async def ask() -> None:
                async with served.http.post(served.url + CHAT, json=ASKED) as response:
                    await response.read()

            asking = asyncio.create_task(ask())
            await until(lambda: bool(node.requests))
            asking.cancel()
            await asyncio.wait([asking])
            async with asyncio.timeout(5):
                await ended.wait()
            await until(lambda: not served.node(node).unfinished)
            assert await outcomes(served) == ({"client_left": 1} if after_events else {})
            assert served.node(node).failures == 0

    async def test_one_that_leaves_with_another_request_on_its_connection_is_noticed(self) -> None:
        node, ended = FakeNode(), asyncio.Event()

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()
            return web.Response()

        node.handle = handle
        async with distributing(node) as served:
            _, writer = await asyncio.open_connection("127.0.0.1", served.url.rpartition(":")[2])
            writer.write(post(CHAT, ASKED))
            await until(lambda: bool(node.requests))
            writer.write(post(CHAT, {"model": "m", "prompt": "x" * 2**20}) * 4)
            writer.close()
            async with asyncio.timeout(5):
                await ended.wait()
            await writer.wait_closed()
            assert len(node.requests) == 1


class TestState:
    async def test_a_conversation_stays_on_its_node(self) -> None:
        nodes = [FakeNode(str(number)) for number in range(3)]
        async with distributing(*nodes) as served:
            for session in range(6):
                body = {"session_id": session, "interactive_mode": True, "prompt": "Hi"}
                names = {(await served.post("/v1/chat/interactive", body))[1]["name"] for _ in range(3)}
                assert len(names) == 1

    async def test_two_tenants_sessions_are_two_on_a_node(self) -> None:
        node = FakeNode()
        async with distributing(node, api_keys=["a", "b"]) as served:
            for path in ("/v1/chat/interactive", CHAT):
                seen = set()
                for key in ("a", "b"):
                    headers = {"Authorization": f"Bearer {key}"}
                    for session in (0, 1, 7):
                        body = {"session_id": session, "prompt": "ü", "nested": [{"a": 1.5}]}
                        assert (await served.post(path, body, headers=headers))[0] == 200
                        passed = json.loads(node.requests[-1][3])
                        seen.add(passed.pop("session_id"))
                        assert passed == {"prompt": "ü", "nested": [{"a": 1.5}]}
                assert len(seen) == 6
                # A server takes these for the same numbers.
                for spelled in ("7", 7.0):
                    assert (await served.post(path, {"session_id": spelled}, headers=headers))[0] == 200
                    assert json.loads(node.requests[-1][3])["session_id"] == 15
                assert (await served.post(path, {"kwargs": {"session_id": 14}}, headers=headers))[0] == 200
                assert json.loads(node.requests[-1][3])["session_id"] == 29
            count = len(node.requests)
            for wrong in (2**31 - 1, str(2**31), [7], 7.5):
                number, answer = await served.post(CHAT, {"session_id": wrong}, headers=headers)
                assert (number, answer["error"]["param"]) == (400, "session_id")
            assert len(node.requests) == count

    async def test_an_answer_is_stopped_where_it_runs(self) -> None:
        nodes = [FakeNode(str(number)) for number in range(3)]
        async with distributing(*nodes, routing_strategy="random") as served:
            for session in range(5):
                name = (await served.post(CHAT, {"model": "m", "session_id": session}))[1]["name"]
                stop = {"session_id": session, "cancel": True}
                assert (await served.post("/v1/chat/interactive", stop))[1] == {"name": name}

    @pytest.mark.parametrize("streamed", [False, True])
    async def test_a_stored_response_is_continued_and_read_on_its_node(self, streamed: bool) -> None:
        nodes = [FakeNode(str(number)) for number in range(3)]
        answer = b'{"id":"resp_%b","object":"response"}'
        if streamed:
            answer = b'event: response.created\ndata: {"type":"response.created","response":' + answer + b"}\n\n"
        for node in nodes:
            whole = answer % node.name.encode()
            node.handle = streaming([whole[:50], whole[50:]])
        async with distributing(*nodes, routing_strategy="random") as served:
            for _ in range(4):
                async with served.http.post(served.url + "/v1/responses", json={"input": "Hi"}) as response:
                    name = (await response.text()).partition("resp_")[2][0]
                for method, path, body in (
                    ("POST", "/v1/responses", {"input": "And?", "previous_response_id": f"resp_{name}"}),
                    ("GET", f"/v1/responses/resp_{name}", None),
                    ("DELETE", f"/v1/responses/resp_{name}", None),
                ):
                    async with served.http.request(method, served.url + path, json=body) as response:
                        assert (await response.text()).partition("resp_")[2][0] == name
            # No node was asked for what the distributor has passed on.
            assert sum(len(node.requests) for node in nodes) == 16

    async def test_a_response_from_before_a_restart_is_found(self) -> None:
        nodes = [FakeNode(str(number)) for number in range(3)]
        for node in nodes[:2]:
            node.handle = status(404)
        async with distributing(*nodes) as served:
            body = {"input": "And?", "previous_response_id": "resp_old"}
            for _ in range(4):
                assert (await served.post("/v1/responses", body))[1] == {"name": "2"}
            assert [len(node.requests) for node in nodes] == [1, 1, 5]


async def test_draining_lets_answers_finish_and_refuses_others() -> None:
    node, go_on = FakeNode(), asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        await go_on.wait()
        return await node.tell_name(request)

    node.handle = handle
    async with distributing(node) as served:
        asking = asyncio.create_task(served.post(CHAT))
        await until(lambda: bool(node.requests))
        async with served.http.get(served.url + "/health") as kept:
            await kept.read()
        served.distributor.state.stop.set()
        await until(lambda: served.distributor.state.phase is Phase.DRAINING)
        assert (await served.get("/health/ready"))[0] == 503
        go_on.set()
        assert await asking == (200, {"name": "one"})


async def test_nobody_is_asked_at_a_port_without_a_server() -> None:
    node = FakeNode()
    node.port = free_port()
    async with distributing(node, started=False) as served:
        await until(lambda: served.node(node).failures >= MAX_FAILURES)
        assert (await served.post(CHAT))[0] == 503
