"""OpenAI's own client against the server: its classes of errors, its retries, its cancellation, its ways to call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import openai
import pytest

from asyncllm.testing import FakeEngine
from tests.server.serving import Served, serving

pytestmark = pytest.mark.anyio

T = TypeVar("T")

PING: Any = [{"role": "user", "content": "ping"}]
ASKED: dict[str, Any] = {"model": "fake", "messages": PING}


@asynccontextmanager
async def asked(answers: Any = None, **config: Any) -> AsyncIterator[tuple[Served, openai.AsyncOpenAI]]:
    """A server of a fake engine, slow enough to be interrupted, and a client of it."""
    engine = FakeEngine(answers or {"ping": "pong"}, delay_per_token=0.01)
    async with serving(engine, **config) as served, served.openai() as client:
        yield served, client


async def blocking(served: Served, work: Callable[[openai.OpenAI], T]) -> T:
    """Let a program with the client that blocks run beside the server."""

    def run() -> T:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            return work(client)

    return await asyncio.to_thread(run)


async def test_the_client_that_blocks() -> None:
    def work(client: openai.OpenAI) -> tuple[str | None, str, list[str]]:
        whole = client.chat.completions.create(**ASKED).choices[0].message.content
        with client.chat.completions.create(**ASKED, stream=True) as stream:
            pieces = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        return whole, pieces, [model.id for model in client.models.list()]

    async with asked() as (served, _):
        assert await blocking(served, work) == ("pong", "pong", ["fake"])


async def test_models() -> None:
    async with asked() as (_, client):
        assert [model.id async for model in client.models.list()] == ["fake"]
        assert (await client.models.retrieve("fake")).owned_by == "asyncllm"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")


async def test_the_stream_helper_collects_the_answer() -> None:
    async with asked() as (_, client), client.chat.completions.stream(**ASKED) as stream:
        completion = await stream.get_final_completion()
    assert completion.choices[0].message.content == "pong"
    assert completion.choices[0].finish_reason == "stop"


async def test_raw_responses_have_the_request_id() -> None:
    async with asked() as (_, client):
        raw = await client.chat.completions.with_raw_response.create(**ASKED, extra_headers={"X-Request-Id": "mine"})
        assert raw.headers["x-request-id"] == "mine"
        assert raw.parse().choices[0].message.content == "pong"
        assert (await client.chat.completions.create(**ASKED))._request_id
        async with client.chat.completions.with_streaming_response.create(**ASKED, stream=True) as streamed:
            assert streamed.headers["content-type"].startswith("text/event-stream")
            assert [line async for line in streamed.iter_lines()][-2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize(
    ("fields", "kind", "code"),
    [
        ({"model": "other"}, openai.NotFoundError, "model_not_found"),
        ({"max_tokens": 0}, openai.BadRequestError, "invalid_value"),
        ({"messages": [{"role": "user", "content": "x" * 20000}]}, openai.BadRequestError, "context_length_exceeded"),
        ({"extra_body": {"colour": "red"}}, openai.BadRequestError, "unknown_parameter"),
        ({"extra_headers": {"Authorization": "Bearer wrong"}}, openai.AuthenticationError, "invalid_api_key"),
        ({"extra_headers": {"Origin": "https://a.org"}}, openai.PermissionDeniedError, "origin_not_allowed"),
        ({"extra_headers": {"Content-Type": "text/plain"}}, openai.APIStatusError, "unsupported_media_type"),
    ],
    ids=str,
)
async def test_errors_have_the_clients_classes(
    fields: dict[str, Any], kind: type[openai.APIStatusError], code: str
) -> None:
    async with asked(api_keys=["none"]) as (_, client):
        for streamed in ({}, {"stream": True}):
            with pytest.raises(kind) as caught:
                await client.chat.completions.create(**{**ASKED, **fields, **streamed})
            assert caught.value.code == code
            assert caught.value.request_id


async def test_a_prompt_that_is_too_long_is_told_in_openais_words_and_with_the_numbers() -> None:
    async with asked() as (_, client):
        with pytest.raises(openai.BadRequestError, match=r"This model's maximum context length is .* has 20") as caught:
            await client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x" * 20000}])
    assert caught.value.code == "context_length_exceeded"


async def test_a_failure_inside_the_engine_is_an_internal_server_error() -> None:
    async with serving(FakeEngine(row_failure=lambda prompt: "made to fail")) as served, served.openai() as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(**ASKED)
        assert caught.value.code == "request_failed"
        with pytest.raises(openai.APIError, match="others are not affected"):
            async for _ in await client.chat.completions.create(**ASKED, stream=True):
                pass


async def test_a_429_is_repeated_after_the_time_it_names() -> None:
    async with asked("x" * 300, max_concurrent_requests=1) as (_, client):
        running = await client.chat.completions.create(**ASKED, stream=True)
        await anext(running)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(**ASKED)
        assert caught.value.response.headers["retry-after"] == "1"
        began = time.monotonic()
        patient = client.with_options(max_retries=1).chat.completions.with_raw_response
        waiting = asyncio.create_task(patient.create(**ASKED, max_tokens=1))
        await asyncio.sleep(0.2)
        await running.close()
        assert (await waiting).retries_taken == 1
        assert time.monotonic() - began >= 1


async def test_a_503_of_a_draining_server_says_when_another_may_answer() -> None:
    async with asked("x" * 300) as (served, client):
        running = await client.chat.completions.create(**ASKED, stream=True)
        await anext(running)
        # New connections are refused; this one stays open.
        await client.models.list()
        served.service.state.stop.set()
        await asyncio.sleep(0.05)
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(**ASKED)
        assert (caught.value.status_code, caught.value.code) == (503, "shutting_down")
        assert caught.value.response.headers["retry-after"] == "5"
        await running.close()


async def test_cancelling_the_task_that_waits_ends_the_answer() -> None:
    async with asked("x" * 1000) as (served, client):
        for streamed in (False, True):
            waiting = asyncio.create_task(consume(client, streamed))
            await until(lambda: served.engine.stats().running == 1)
            waiting.cancel()
            await asyncio.wait([waiting])
            assert waiting.cancelled()
            await asyncio.wait_for(served.service.state.idle.wait(), timeout=2)
            await until(lambda: served.engine.stats().running == 0)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def consume(client: openai.AsyncOpenAI, streamed: bool) -> None:
    answer = await client.chat.completions.create(**ASKED, stream=streamed)
    if streamed:
        async for _ in answer:
            pass


async def test_leaving_a_stream_ends_the_answer() -> None:
    async with asked("x" * 1000) as (served, client):
        stream = await client.chat.completions.create(**ASKED, stream=True)
        async for _ in stream:
            break
        assert served.service.state.in_work == 1
        await stream.close()
        await asyncio.wait_for(served.service.state.idle.wait(), timeout=2)


async def test_a_timeout_of_the_client_ends_the_answer() -> None:
    async with asked("x" * 1000) as (served, client):
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.2).chat.completions.create(**ASKED)
        await asyncio.wait_for(served.service.state.idle.wait(), timeout=2)
