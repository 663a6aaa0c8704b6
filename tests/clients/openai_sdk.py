"""OpenAI's own client of any version from 1: whole and streamed, blocking and not, errors, retries, cancellation."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
import urllib.request
from typing import Any

import openai

URL, KEY = os.environ["ASYNCLLM_TEST_URL"], os.environ["ASYNCLLM_TEST_KEY"]
MODEL = "tiny-chat"
QUESTION: list[Any] = [{"role": "user", "content": "What is 17 + 25?"}]
LONG: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "stream": True, "extra_body": {"ignore_eos": True}}


def did(what: str) -> None:
    print(f"did: {what}", flush=True)


def running() -> int:
    with urllib.request.urlopen(f"{URL}/health") as response:
        sequences: int = json.load(response)["running"]
    return sequences


def wait_until(sequences: int) -> None:
    """Wait until so many run."""
    deadline = time.monotonic() + 5
    while running() != sequences:
        assert time.monotonic() < deadline, f"{running()} sequences run, not {sequences}."
        time.sleep(0.02)


def raises(kind: type[Exception], call: Any, **fields: Any) -> Any:
    try:
        call(**fields)
    except kind as error:
        return error
    raise AssertionError(f"No {kind.__name__}.")


def blocking() -> None:
    with openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL
        create = client.chat.completions.create
        answer = create(model=MODEL, messages=QUESTION, temperature=0)
        assert "42" in (answer.choices[0].message.content or "")
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        did("chat")
        chunks = list(
            create(model=MODEL, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True})
        )
        assert "42" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
        did("stream")
        completion = client.completions.create(
            model=MODEL, prompt=["Once", "Twice"], max_tokens=4, echo=True, logprobs=1
        )
        assert [choice.text[:2] for choice in completion.choices] == ["On", "Tw"]
        assert completion.choices[0].logprobs.token_logprobs[0] is None
        did("completions")
        again = [*QUESTION, answer.choices[0].message, {"role": "user", "content": "Who are you?"}]
        assert create(model=MODEL, messages=again).choices[0].message.content
        raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=QUESTION)
        assert raw.headers["x-request-id"]
        assert raw.parse().id.startswith("chatcmpl-")
        did("raw response")

        assert raises(openai.NotFoundError, create, model="other", messages=QUESTION).code == "model_not_found"
        error = raises(openai.BadRequestError, create, model=MODEL, messages=QUESTION, max_tokens=0)
        assert error.param == "max_tokens"
        too_long: list[Any] = [{"role": "user", "content": "word " * 9000}]
        error = raises(openai.BadRequestError, create, model=MODEL, messages=too_long)
        assert error.code == "context_length_exceeded"
        with openai.OpenAI(base_url=f"{URL}/v1", api_key="wrong", max_retries=0) as stranger:
            raises(openai.AuthenticationError, stranger.models.list)
        raises(openai.APITimeoutError, create, **{**LONG, "stream": False}, timeout=0.05)
        wait_until(0)
        did("errors")

        with create(**LONG) as stream:
            next(iter(stream))
            wait_until(1)
        wait_until(0)
        did("leaving a stream")

        streams = [create(**LONG), create(**LONG)]
        error = raises(openai.RateLimitError, create, model=MODEL, messages=QUESTION)
        assert error.response.headers["retry-after"] == "1"
        threading.Timer(0.5, lambda: [stream.close() for stream in streams]).start()
        assert client.with_options(max_retries=5).chat.completions.create(model=MODEL, messages=QUESTION).id
        wait_until(0)
        did("retries")


async def not_blocking() -> None:
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=5) as client:
        create = client.chat.completions.create
        answers = await asyncio.gather(*(create(model=MODEL, messages=QUESTION, max_tokens=32) for _ in range(2)))
        assert all(answer.choices[0].message.content for answer in answers)
        text = ""
        async for chunk in await create(model=MODEL, messages=QUESTION, temperature=0, stream=True):
            text += chunk.choices[0].delta.content or ""
        assert "42" in text
        did("async")
        waiting = asyncio.create_task(create(**{**LONG, "stream": False}))
        await asyncio.to_thread(wait_until, 1)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        await asyncio.to_thread(wait_until, 0)
        did("cancellation")


blocking()
asyncio.run(not_blocking())
