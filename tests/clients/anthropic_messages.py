"""Anthropic's own client: whole and streamed, blocking and not, tokens counted, errors."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any, Literal

import anthropic
from pydantic import BaseModel

URL, KEY = os.environ["ASYNCLLM_TEST_URL"], os.environ["ASYNCLLM_TEST_KEY"]
ASKED: dict[str, Any] = {
    "model": "tiny-chat",
    "max_tokens": 32,
    "system": "You are a helpful assistant.",
    "messages": [{"role": "user", "content": "What is 17 + 25?"}],
    "extra_body": {"temperature": 0},
}


def did(what: str) -> None:
    print(f"did: {what}", flush=True)


def text_of(message: anthropic.types.Message) -> str:
    (block,) = message.content
    assert block.type == "text"
    return block.text


def blocking() -> str:
    client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
    whole = client.messages.create(**ASKED)
    text = text_of(whole)
    assert text
    did(f"messages.create: {text!r}, {whole.stop_reason}")
    with client.messages.stream(**ASKED) as stream:
        assert "".join(stream.text_stream) == text
        assert stream.get_final_message().usage == whole.usage
    did("messages.stream: the same text and usage")
    counted = client.messages.count_tokens(**{key: ASKED[key] for key in ("model", "system", "messages")})
    assert counted.input_tokens == whole.usage.input_tokens
    did(f"messages.count_tokens: {counted.input_tokens}")
    blocks = [{"type": "text", "text": "What is "}, {"type": "text", "text": "17 + 25?"}]
    assert text_of(client.messages.create(**{**ASKED, "messages": [{"role": "user", "content": blocks}]})) == text
    did("blocks of text")
    for fields, kind in (
        ({"model": "other"}, anthropic.NotFoundError),
        ({"max_tokens": 0}, anthropic.BadRequestError),
    ):
        try:
            client.messages.create(**{**ASKED, **fields})
        except kind:
            continue
        raise AssertionError(fields)
    did("errors of their kinds")
    return text


WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


asked_about: list[str] = []


@anthropic.beta_tool
def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Where.
    """
    asked_about.append(city)
    return "rain"


class Sum(BaseModel):
    left: int
    right: int
    note: Literal["odd", "even"]


def tools_and_types() -> None:
    client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
    asked: list[Any] = [{"role": "user", "content": "Weather in Bern?"}]
    fields: dict[str, Any] = {**ASKED, "max_tokens": 80, "tools": [WEATHER], "tool_choice": {"type": "any"}}
    whole = client.messages.create(**{**fields, "messages": asked})
    (call,) = whole.content
    assert (whole.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "weather")
    with client.messages.stream(**{**fields, "messages": asked}) as stream:
        pieces = "".join(event.partial_json for event in stream if event.type == "input_json")
        (streamed,) = stream.get_final_message().content
    assert (streamed.input, json.loads(pieces)) == (call.input, call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    told = [*asked, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    assert text_of(client.messages.create(**{**fields, "messages": told, "tool_choice": {"type": "none"}}))
    did("a tool's round trip, streamed and not")
    messages = client.beta.messages.tool_runner(
        model="tiny-chat", max_tokens=100, messages=asked, tools=[weather], max_iterations=4
    )
    ended = messages.until_done()
    assert asked_about == ["Bern"]
    assert "rain" in ended.content[0].text
    did("tool_runner")
    parsed = client.messages.parse(**{**ASKED, "max_tokens": 100}, output_format=Sum)
    assert isinstance(parsed.parsed_output, Sum)
    did("messages.parse")
    assert [model.id for model in client.models.list()] == ["tiny-chat"]
    assert client.models.retrieve("tiny-chat").type == "model"
    did("models")


async def awaited(text: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0) as client:
        answers = await asyncio.gather(*(client.messages.create(**ASKED) for _ in range(2)))
        assert [text_of(answer) for answer in answers] == [text] * 2
        did("AsyncAnthropic: two at once")


TEXT = blocking()
tools_and_types()
asyncio.run(awaited(TEXT))
