"""Custom tools of chats, whose calls have a text instead of arguments."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from asyncllm import AsyncEngine
from asyncllm.server.request.custom_tools import arguments_of
from asyncllm.testing import FakeEngine
from tests.server.serving import serving

pytestmark = pytest.mark.anyio

PATCH: Any = {"type": "custom", "custom": {"name": "patch", "format": {"type": "text"}}}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
TEXT = 'print("Grüße 🙂")\n'
FORM = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
CALLS = [("patch", json.dumps({"input": TEXT})), ("weather", '{"city": "Bern"}'), ("patch", '{"other": 1}')]
ANSWER = "Well.\n" + "\n".join(FORM.format(name, arguments) for name, arguments in CALLS)


async def test_calls_have_a_text_whole_and_streamed() -> None:
    async with serving(FakeEngine(ANSWER)) as served, served.openai() as client:
        asked: Any = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "tools": [PATCH, WEATHER]}
        whole = await client.chat.completions.create(**asked, n=2)
        joined: dict[int, dict[str, Any]] = {}
        async for event in await client.chat.completions.create(**asked, stream=True):
            for call in event.choices[0].delta.tool_calls or ():
                told = call.to_dict()
                index = told.pop("index")
                kind = "custom" if "custom" in told else "function"
                known = joined.setdefault(index, told)
                if known is not told:
                    field = "input" if kind == "custom" else "arguments"
                    known[kind][field] += told[kind][field]  # type: ignore[index]
    for choice in whole.choices:
        assert choice.finish_reason == "tool_calls"
        calls: Any = choice.message.tool_calls
        assert [call.type for call in calls] == ["custom", "function", "custom"]
        assert (calls[0].custom.name, calls[0].custom.input) == ("patch", TEXT)
        assert calls[1].function.arguments == '{"city": "Bern"}'
        assert calls[2].custom.input == '{"other": 1}'
        by_kind = [call.to_dict()[call.type] for call in calls]
        assert [call[call["type"]] for call in joined.values()] == by_kind


async def test_a_call_goes_back_as_it_came() -> None:
    answers = {"Hi": FORM.format(*CALLS[0]), "So?": "Done."}
    async with serving(FakeEngine(answers)) as served, served.openai() as client:
        asked: Any = {"model": "fake", "tools": [PATCH]}
        said: list[Any] = [{"role": "user", "content": "Hi"}]
        message = (await client.chat.completions.create(messages=said, **asked)).choices[0].message
        [call] = message.tool_calls or ()
        said += [message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "changed"}]
        said += [{"role": "user", "content": "So?"}]
        second = await client.chat.completions.create(messages=said, **asked)
        assert second.choices[0].message.content == "Done."
        as_function = {
            "id": call.id,
            "type": "function",
            "function": {"name": "patch", "arguments": arguments_of(TEXT)},
        }
        said[1] = {"role": "assistant", "content": None, "tool_calls": [as_function]}
        third = await client.chat.completions.create(messages=said, **asked)
        assert third.usage is not None
        assert second.usage is not None
        assert third.usage.prompt_tokens == second.usage.prompt_tokens


@pytest.mark.one_loop
async def test_a_call_is_held_to_a_regex_and_can_be_forced() -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "(?:red|blue) [0-9]{2}"}}
    paint = {"type": "custom", "custom": {"name": "paint", "format": grammar}}
    named = {"type": "custom", "custom": {"name": "paint"}}
    choices: list[Any] = [named, {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}]
    async with serving(AsyncEngine("tiny-chat")) as served:
        asked = {"messages": [{"role": "user", "content": "Paint it."}], "tools": [paint, WEATHER], "temperature": 1}
        for choice in choices:
            body = {**asked, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 100}
            status, answer = await served.post("/v1/chat/completions", body)
            assert status == 200, answer
            [call] = answer["choices"][0]["message"]["tool_calls"]
            assert (call["type"], call["custom"]["name"]) == ("custom", "paint")
            assert re.fullmatch("(red|blue) [0-9]{2}", call["custom"]["input"])


async def test_what_calls_cannot_hold_is_refused() -> None:
    lark = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"'}}
    async with serving(FakeEngine("Hi")) as served:
        for custom in ({"name": "a", "format": lark}, {"name": "no name"}, {}, None):
            body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [{"type": "custom", "custom": custom}]}
            status, answer = await served.post("/v1/chat/completions", body)
            assert (status, answer["error"]["param"]) == (400, "tools"), answer
