"""APIClient: what it yields, what it raises, and when."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

import pytest

import asyncllm
from asyncllm import APIClient, InvalidParameter, ServerError, ServerUnreachable
from asyncllm.serve.openai.api_client import get_model_list
from asyncllm.testing import FakeEngine
from tests.server.serving import Served, serving

T = TypeVar("T")

PING: list[dict[str, Any]] = [{"role": "user", "content": "ping"}]


async def call(served: Served, work: Callable[[APIClient], T], **options: Any) -> T:
    """Let a synchronous program run beside the server."""
    return await asyncio.to_thread(lambda: work(APIClient(served.url, **options)))


@pytest.mark.anyio
class TestAnswers:
    async def test_the_models(self) -> None:
        async with serving(FakeEngine()) as served:
            assert await call(served, lambda client: client.available_models) == ["fake"]

    async def test_a_list_of_models_by_its_address(self) -> None:
        async with serving(FakeEngine(), api_keys=["secret"]) as served:
            url = f"{served.url}/v1/models"
            names = await asyncio.to_thread(get_model_list, url, {"Authorization": "Bearer secret"})
            assert names == ["fake"]
            with pytest.raises(ServerError, match="key"):
                await asyncio.to_thread(get_model_list, url)

    async def test_a_whole_chat_is_one_dict(self) -> None:
        async with serving(FakeEngine({"ping": "pong"})) as served:
            for messages in (PING, "ping"):
                [answer] = await call(served, lambda client, m=messages: list(client.chat_completions_v1("fake", m)))
                assert answer["choices"][0]["message"]["content"] == "pong"
                assert answer["object"] == "chat.completion"

    async def test_a_streamed_chat_is_a_dict_for_each_piece(self) -> None:
        async with serving(FakeEngine({"ping": "pong"})) as served:
            items = await call(served, lambda client: list(client.chat_completions_v1("fake", PING, stream=True)))
        choices = [item["choices"][0] for item in items]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "pong"
        assert choices[-1]["finish_reason"] == "stop"

    async def test_pieces_come_as_they_are_made(self) -> None:
        def gaps(client: APIClient) -> list[float]:
            times = [time.monotonic() for _ in client.chat_completions_v1("fake", PING, stream=True)]
            return [later - earlier for earlier, later in pairwise(times)]

        async with serving(FakeEngine({"ping": "pong"}, delay_per_token=0.1)) as served:
            assert sum(gap > 0.05 for gap in await call(served, gaps)) >= 3

    async def test_completions(self) -> None:
        async with serving(FakeEngine({"ping": "pong"})) as served:
            [whole] = await call(served, lambda client: list(client.completions_v1("fake", ["ping", "a"])))
            items = await call(served, lambda client: list(client.completions_v1("fake", "ping", stream=True)))
        assert [choice["text"] for choice in whole["choices"]] == ["pong", "a"]
        assert "".join(item["choices"][0]["text"] for item in items) == "pong"

    async def test_token_ids(self) -> None:
        async with serving(FakeEngine()) as served:
            ids, length = await call(served, lambda client: client.encode("ab", add_bos=False))
            assert (len(ids), length) == (2, 2)
            many = await call(served, lambda client: client.encode(["ab", "c"], add_bos=False))
            assert many == ([ids, many[0][1]], [2, 1])

    async def test_a_conversation_that_the_server_keeps(self) -> None:
        def talk(client: APIClient) -> list[Any]:
            [(text, tokens, reason)] = client.chat("ping", 7)
            assert (text, tokens, reason) == ("pong", 5, "stop")
            pieces = list(client.chat("ping", 7, stream=True))
            assert "".join(text for text, _, _ in pieces) == "pong"
            assert [reason for _, _, reason in pieces][-1] == "stop"
            turn = {"session_id": 7, "interactive_mode": True}
            [before] = client.chat_interactive_v1("ping", **turn)
            client.end_session(7)
            [after] = client.chat_interactive_v1("ping", **turn)
            return [before["history_tokens"], after["history_tokens"]]

        async with serving(FakeEngine({"ping": "pong"})) as served:
            before, after = await call(served, talk)
        assert before > after == 0

    async def test_further_fields_reach_the_server(self) -> None:
        async with serving(FakeEngine({"ping": "pong"})) as served:
            [answer] = await call(
                served, lambda client: list(client.chat_completions_v1("fake", PING, stop=["n"], return_token_ids=True))
            )
        assert answer["choices"][0]["message"]["content"] == "po"
        assert answer["choices"][0]["token_ids"]

    async def test_the_key_is_sent(self) -> None:
        async with serving(FakeEngine(), api_keys=["k"]) as served:
            assert await call(served, lambda client: client.available_models, api_key="k") == ["fake"]
            with pytest.raises(ServerError, match="key is missing") as caught:
                await call(served, lambda client: client.available_models)
            assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


@pytest.mark.anyio
class TestEnds:
    async def test_closing_a_generator_ends_the_answer(self) -> None:
        def leave_early(client: APIClient) -> None:
            for _ in client.chat_completions_v1("fake", PING, stream=True):
                break

        async with serving(FakeEngine("x" * 500, delay_per_token=0.01)) as served:
            await call(served, leave_early)
            await asyncio.wait_for(served.service.state.idle.wait(), timeout=2)

    async def test_close_ends_calls_of_other_threads(self) -> None:
        async with serving(FakeEngine("x" * 500, delay_per_token=0.01)) as served:
            client = APIClient(served.url)
            answer = client.chat_completions_v1("fake", PING, stream=True)
            await asyncio.to_thread(next, answer)
            rest = asyncio.create_task(asyncio.to_thread(list, answer))
            await asyncio.sleep(0.05)
            await asyncio.to_thread(client.close)
            with pytest.raises(ServerUnreachable):
                await rest

    async def test_a_server_that_ends_in_the_middle(self) -> None:
        async with serving(FakeEngine("x" * 500, delay_per_token=0.01)) as served:
            answer = APIClient(served.url).chat_completions_v1("fake", PING, stream=True)
            await asyncio.to_thread(next, answer)
            served.service.state.stop.set()
            served.service.state.stop_now.set()
            with pytest.raises(ServerError) as caught:
                await asyncio.to_thread(list, answer)
            assert caught.value.status is None


@pytest.mark.anyio
class TestErrors:
    async def test_the_servers_error(self) -> None:
        async with serving(FakeEngine()) as served:
            with pytest.raises(ServerError, match="model 'other' does not exist") as caught:
                await call(served, lambda client: list(client.chat_completions_v1("other", PING)))
            error = caught.value
            assert (error.status, error.type, error.code, error.param) == (
                404,
                "not_found_error",
                "model_not_found",
                "model",
            )
            with pytest.raises(ServerError, match="colour") as caught:
                await call(served, lambda client: list(client.completions_v1("fake", "hi", colour="red")))
            assert caught.value.param == "colour"

    async def test_the_servers_error_in_lmdeploys_format(self) -> None:
        async with serving(FakeEngine(), error_format="lmdeploy") as served:
            with pytest.raises(ServerError, match="model 'other' does not exist") as caught:
                await call(served, lambda client: list(client.chat_completions_v1("other", PING)))
            error = caught.value
            assert (error.status, error.type, error.code, error.param) == (404, "not_found_error", None, "model")

    async def test_when_to_come_back(self) -> None:
        async with serving(FakeEngine("x" * 500, delay_per_token=0.01), max_concurrent_requests=1) as served:
            running = APIClient(served.url).chat_completions_v1("fake", PING, stream=True)
            await asyncio.to_thread(next, running)
            with pytest.raises(ServerError) as caught:
                await call(served, lambda client: list(client.completions_v1("fake", "hi")))
            assert (caught.value.status, caught.value.retry_after) == (429, 1.0)
            running.close()


def answering(payload: bytes) -> tuple[str, threading.Thread]:
    """Something else that answers once at an address, and hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with listener, listener.accept()[0] as connection:
            connection.recv(65536)
            connection.sendall(payload)

    thread = threading.Thread(target=answer)
    thread.start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}", thread


@pytest.mark.parametrize(
    ("payload", "kind", "message"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n<html>", ServerError, "did not send a JSON object"),
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 4\r\n\r\noops", ServerError, "status 502: 'oops'"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", ServerUnreachable, "BadStatusLine"),
        (b"", ServerUnreachable, "RemoteDisconnected"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", ServerUnreachable, "IncompleteRead"),
    ],
    ids=str,
)
def test_something_else_at_the_address(payload: bytes, kind: type[ServerError], message: str) -> None:
    url, thread = answering(payload)
    with pytest.raises(kind, match=message) as caught:
        _ = APIClient(url).available_models
    thread.join()
    assert type(caught.value) is kind


@pytest.mark.parametrize("data", [b'data: {"a":1}\n\n', b'data: {"a":1}\n\ndata: {"a'])
def test_a_stream_that_breaks_off_is_an_error(data: bytes) -> None:
    url, thread = answering(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(data), data))
    answer = APIClient(url).completions_v1("m", "hi", stream=True)
    assert next(answer) == {"a": 1}
    with pytest.raises(ServerUnreachable, match=r"IncompleteRead|ConnectionReset"):
        next(answer)
    thread.join()


def test_no_server_at_the_address() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(ServerUnreachable, match="whether the server runs") as caught:
            _ = APIClient(f"http://127.0.0.1:{unused.getsockname()[1]}").available_models
    assert isinstance(caught.value, ConnectionError)


@pytest.mark.parametrize("url", ["", "localhost:23333", "ftp://host", "http://"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(InvalidParameter, match="http://host:port"):
        asyncllm.client(url)


@pytest.mark.parametrize("url", ["http://host:1", "http://host:1/", "http://host:1/v1", "http://host:1/v1/"])
def test_an_address_may_be_that_of_an_openai_client(url: str) -> None:
    assert asyncllm.client(url).api_server_url == "http://host:1"
