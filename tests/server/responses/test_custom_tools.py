"""Custom tools of the Responses API, whose calls have a text instead of arguments."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from asyncllm import AsyncEngine
from asyncllm.server.request.custom_tools import InputText, arguments_of
from asyncllm.testing import FakeEngine
from tests.server.responses.test_responses import WEATHER, check_order, events_of
from tests.server.serving import serving

pytestmark = pytest.mark.anyio

PATCH: Any = {"type": "custom", "name": "patch", "description": "Changes a file.", "format": {"type": "text"}}
TEXT = 'print("Grüße, 世界 🙂")\n\\d+\t\x01'
CALL = f'<tool_call>\n{{"name": "patch", "arguments": {json.dumps({"input": TEXT})}}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


async def test_calls_have_a_text_whole_and_streamed() -> None:
    async with serving(FakeEngine(f"Let me see.\n{CALL}\n{OTHER}")) as served, served.openai() as client:
        asked: Any = {"model": "fake", "input": "Hi", "tools": [PATCH, WEATHER]}
        whole = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            kinds = {event.type async for event in stream}
            streamed = await stream.get_final_response()
        events = await events_of(served, tools=[PATCH, WEATHER])
    for response in (whole, streamed):
        _, patch, weather = response.output
        assert patch.type == "custom_tool_call"
        assert (patch.name, patch.input) == ("patch", TEXT)
        assert weather.type == "function_call"
    assert {"response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"} < kinds
    check_order(events)
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert len(deltas) > 5
    assert "".join(deltas) == TEXT


async def test_an_agent_sends_calls_and_outputs_back() -> None:
    async with serving(FakeEngine({"Hi": CALL, "So?": "Done."})) as served, served.openai() as client:
        asked: Any = {"model": "fake", "tools": [PATCH]}
        first = await client.responses.create(input="Hi", **asked)
        call: Any = first.output[0]
        new: Any = [
            {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "changed"},
            {"role": "user", "content": "So?"},
        ]
        said: Any = [{"role": "user", "content": "Hi"}, call.to_dict(), *new]
        by_items = await client.responses.create(input=said, **asked)
        by_id = await client.responses.create(input=new, previous_response_id=first.id, **asked)
        assert by_items.output_text == by_id.output_text == "Done."
        assert by_items.usage is not None
        assert by_id.usage is not None
        assert by_items.usage.input_tokens == by_id.usage.input_tokens
        lost: Any = {"input": [{"type": "custom_tool_call", "call_id": "a", "name": "patch"}]}
        assert (await served.post("/v1/responses", lost))[0] == 400


@pytest.mark.one_loop
async def test_a_call_is_held_to_a_regex_and_can_be_forced() -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "(?:red|blue) [0-9]{2}"}
    tool = {"type": "custom", "name": "paint", "format": form}
    async with serving(AsyncEngine("tiny-chat")) as served:
        body: Any = {"input": "Paint it.", "tools": [tool, WEATHER], "temperature": 1, "max_output_tokens": 100}
        for choice in (
            {"type": "custom", "name": "paint"},
            {"type": "allowed_tools", "mode": "required", "tools": [tool]},
        ):
            status, answer = await served.post(
                "/v1/responses", {**body, "tool_choice": choice, "parallel_tool_calls": False}
            )
            assert status == 200, answer
            [call] = (item for item in answer["output"] if item["type"] != "reasoning")
            assert (call["type"], call["name"]) == ("custom_tool_call", "paint")
            assert re.fullmatch("(red|blue) [0-9]{2}", call["input"])
            assert answer["tool_choice"] == choice


async def test_what_calls_cannot_hold_is_refused() -> None:
    lark = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    async with serving(FakeEngine("Hi")) as served:
        for tool in (
            {**PATCH, "format": lark},
            {**PATCH, "format": "text"},
            {**PATCH, "name": "no name"},
            {"type": "custom"},
        ):
            status, answer = await served.post("/v1/responses", {"input": "Hi", "tools": [tool]})
            assert (status, answer["error"]["param"]) == (400, "tools"), answer


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (arguments_of(TEXT), TEXT),
        (json.dumps({"input": TEXT}, indent=2), TEXT),
        (r'{"input": "\ud83d\ude42 \ud83d. \udc00 \ud83d"}', "🙂 \ufffd. \ufffd \ufffd"),
        ('{"input": "cut', "cut"),
        (r'{"input": "cut\u00', "cut"),
        ('{"input": ""}', ""),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"input": 5}', '{"input": 5}'),
        ("", ""),
    ],
)
def test_texts_are_read_from_pieces_of_any_size(arguments: str, text: str) -> None:
    for size in (1, 2, 3, 7, 1000):
        reader = InputText()
        pieces = [reader.read(arguments[at : at + size]) for at in range(0, len(arguments), size)]
        assert "".join([*pieces, reader.rest()]) == reader.text == text
