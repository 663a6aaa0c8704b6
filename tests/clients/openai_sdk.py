"""OpenAI's own client of any version from 1: whole and streamed, blocking and not, errors, retries, cancellation."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
import urllib.request
from typing import Any, Literal

import openai
from pydantic import BaseModel

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


class Sum(BaseModel):
    left: int
    right: int
    note: Literal["odd", "even"]


WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
ASKED: list[Any] = [{"role": "user", "content": "Weather in Bern?"}]


def structured_and_tools() -> None:
    with openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as client:
        parsed = client.chat.completions.parse(model=MODEL, messages=QUESTION, response_format=Sum)
        assert isinstance(parsed.choices[0].message.parsed, Sum)
        with client.chat.completions.stream(model=MODEL, messages=QUESTION, response_format=Sum) as stream:
            kinds = [event.type for event in stream]
            assert isinstance(stream.get_final_completion().choices[0].message.parsed, Sum)
        assert {"content.delta", "content.done"} <= set(kinds)
        did("parse and its stream")
        tools: list[Any] = [{"type": "function", "function": WEATHER}]
        with client.chat.completions.stream(
            model=MODEL, messages=ASKED, tools=tools, tool_choice="required", temperature=0
        ) as stream:
            done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
            message = stream.get_final_completion().choices[0].message
        assert [event.name for event in done] == ["weather"]
        (call,) = message.tool_calls
        assert call.function.parsed_arguments["city"]
        result = {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "rain"}'}
        told = [*ASKED, message.model_dump(exclude={"parsed"}, exclude_none=True), result]
        again = client.chat.completions.create(model=MODEL, messages=told, tools=tools, tool_choice="none")
        assert again.choices[0].message.content
        did("tools in the stream helper")


def responses() -> None:
    with openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as client:
        parsed = client.responses.parse(model=MODEL, input="What is 17 + 25?", text_format=Sum)
        assert isinstance(parsed.output_parsed, Sum)
        with client.responses.stream(model=MODEL, input="What is 17 + 25?", temperature=0) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            final = stream.get_final_response()
        assert text == final.output_text
        assert "42" in text
        tools: list[Any] = [{"type": "function", **WEATHER}]
        called = client.responses.create(model=MODEL, input="Weather in Bern?", tools=tools, tool_choice="required")
        (call,) = called.output
        result: list[Any] = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
        after = client.responses.create(
            model=MODEL, input=result, previous_response_id=called.id, tools=tools, tool_choice="none"
        )
        assert after.output_text
        assert client.responses.retrieve(after.id).output_text == after.output_text
        client.responses.delete(after.id)
        raises(openai.NotFoundError, client.responses.retrieve, response_id=after.id)
        did("responses: parse, stream, tools, kept")
        if hasattr(client.responses, "input_tokens"):
            counted = client.responses.input_tokens.count(model=MODEL, input="What is 17 + 25?")
            assert counted.input_tokens == parsed.usage.input_tokens
            did("input tokens")
        begun = client.responses.create(model=MODEL, input="What is 17 + 25?", temperature=0, background=True)
        deadline = time.monotonic() + 20
        while begun.status in ("queued", "in_progress"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
            begun = client.responses.retrieve(begun.id)
        assert "42" in begun.output_text
        events = client.responses.create(model=MODEL, input="What is 17 + 25?", background=True, stream=True)
        first = next(iter(events))
        events.close()
        rest = list(client.responses.retrieve(first.response.id, stream=True, starting_after=first.sequence_number))
        assert [event.sequence_number for event in rest] == list(range(1, len(rest) + 1))
        assert rest[-1].type == "response.completed"
        assert client.responses.cancel(first.response.id).status == "completed"
        did("background responses")


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
structured_and_tools()
responses()
asyncio.run(not_blocking())
