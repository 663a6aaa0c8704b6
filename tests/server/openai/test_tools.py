"""Tools and reasoning as OpenAI's own client sees them, whole and streamed."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from asyncllm import AsyncEngine, ChatTemplateConfig, EngineConfig
from asyncllm.testing import FakeEngine
from tests.server.serving import Served, serving

pytestmark = pytest.mark.anyio

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
ARGUMENTS = '{"city": "Zürich \\"old\\" {town}", "days": 2}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
NOW = '<tool_call>{"name": "now"}</tool_call>'
QUESTION: Any = [{"role": "user", "content": "Hi"}]
THINKS = EngineConfig(reasoning_parser="qwen3")

TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Trip(BaseModel):
    days: Annotated[int, Field(ge=1, le=30)]
    by: Literal["train", "foot"]


async def events_of(served: Served, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, as they are on the wire."""
    async with served.http.post(
        f"{served.url}/v1/chat/completions", json={"messages": QUESTION, "stream": True, **body}
    ) as response:
        lines = (await response.text()).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def test_a_call_is_the_same_whole_and_streamed() -> None:
    async with serving(FakeEngine(f"Let me see.\n{CALL}\n{NOW}\n")) as served, served.openai() as client:
        asked: Any = {"model": "fake", "messages": QUESTION, "tools": [WEATHER]}
        whole = (await client.chat.completions.create(**asked)).choices[0]
        async with client.chat.completions.stream(**asked) as stream:
            kinds = [event.type async for event in stream]
            streamed = (await stream.get_final_completion()).choices[0]
    for choice in (whole, streamed):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        assert choice.message.tool_calls is not None
        functions: list[Any] = [call for call in choice.message.tool_calls]
        assert [call.function.name for call in functions] == ["weather", "now"]
        assert [call.function.arguments for call in functions] == [ARGUMENTS, "{}"]
        assert len({call.id for call in functions}) == 2
        assert all(call.id.startswith("call_") and len(call.id) == 29 for call in functions)
    assert kinds.count("tool_calls.function.arguments.done") == 2


async def test_deltas_are_of_one_kind_and_calls_come_one_after_the_other() -> None:
    async with serving(FakeEngine(f"<think>Hm.</think>Ok.{CALL}{NOW}", THINKS)) as served:
        events = await events_of(served, tools=[WEATHER], stream_options={"include_usage": True})
    usage = events.pop()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len("<think>Hm.</think>")}
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": None}
    assert deltas[-1] == {}
    for delta in deltas[1:-1]:
        assert set(delta) in ({"content"}, {"tool_calls"}, {"reasoning_content", "reasoning"})
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Hm."
    pieces = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert [piece["index"] for piece in pieces] == sorted(piece["index"] for piece in pieces)
    firsts = [piece for piece in pieces if "id" in piece]
    assert [(first["index"], first["type"], first["function"]["name"]) for first in firsts] == [
        (0, "function", "weather"),
        (1, "function", "now"),
    ]
    assert all(set(piece) == {"index", "function"} for piece in pieces if piece not in firsts)
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_only_calls_come_without_content() -> None:
    async with serving(FakeEngine(NOW)) as served:
        _, whole = await served.post("/v1/chat/completions", {"messages": QUESTION, "tools": [WEATHER]})
        deltas = [event["choices"][0]["delta"] for event in await events_of(served, tools=[WEATHER])]
    assert whole["choices"][0]["message"]["content"] is None
    assert [delta.get("content") for delta in deltas] == [None] * len(deltas)


async def test_a_conversation_goes_on_with_the_results_of_tools() -> None:
    def answer(question: str) -> str:
        return NOW if question == "Hi" else f"It is {question}."

    engine = FakeEngine(answer)
    async with serving(engine) as served, served.openai() as client:
        messages = list(QUESTION)
        asked: Any = {"model": "fake", "tools": [WEATHER]}
        message = (await client.chat.completions.create(messages=messages, **asked)).choices[0].message
        assert message.tool_calls is not None
        messages += [
            message.model_dump(),
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "noon"},
            {"role": "user", "content": "Well?"},
        ]
        again = await client.chat.completions.create(messages=messages, **asked)
    assert again.choices[0].message.content == "It is Well?."
    assert again.choices[0].finish_reason == "stop"


async def test_n_answers_have_calls_of_their_own() -> None:
    async with serving(FakeEngine(CALL)) as served, served.openai() as client:
        asked: Any = {"model": "fake", "messages": QUESTION, "tools": [WEATHER], "n": 3}
        async with client.chat.completions.stream(**asked) as stream:
            async for _ in stream:
                pass
            streamed = await stream.get_final_completion()
    for choice in streamed.choices:
        calls: Any = choice.message.tool_calls
        assert [call.function.arguments for call in calls] == [ARGUMENTS]


async def test_a_call_that_is_cut_is_an_error_of_its_length_in_the_client() -> None:
    async with serving(FakeEngine(CALL)) as served, served.openai() as client:
        tool = openai.pydantic_function_tool(Weather, name="weather")
        tool["function"].pop("strict")
        asked: Any = {"model": "fake", "messages": QUESTION, "tools": [tool], "max_tokens": 60}
        whole = await client.chat.completions.create(**asked)
        assert whole.choices[0].finish_reason == "length"
        async with client.chat.completions.stream(**asked) as stream:
            with pytest.raises(openai.LengthFinishReasonError):
                await stream.until_done()


class Weather(BaseModel):
    city: str


@pytest.mark.parametrize("stream", [True, False])
async def test_reasoning_has_both_names_and_can_be_left_out(stream: bool) -> None:
    async with serving(FakeEngine("<think>\nHm.\n</think>\n\nOk.", THINKS)) as served:

        async def said(**body: Any) -> tuple[str, str, str]:
            if stream:
                messages = [event["choices"][0]["delta"] for event in await events_of(served, **body)]
            else:
                _, found = await served.post("/v1/chat/completions", {"messages": QUESTION, **body})
                messages = [found["choices"][0]["message"]]
            parts = ("reasoning_content", "reasoning", "content")
            first, second, third = ("".join(each.get(part) or "" for each in messages) for part in parts)
            return first, second, third

        assert await said() == ("Hm.", "Hm.", "Ok.")
        assert await said(include_reasoning=False) == ("", "", "Ok.")
        assert await said(separate_reasoning=False) == ("", "", "<think>\nHm.\n</think>\n\nOk.")
        assert await said(reasoning_effort="none") == ("Hm.", "Hm.", "Ok.")


async def test_tokens_and_logprobs_are_told_of_once() -> None:
    text = f"<think>Hm.</think>Ok.{CALL}"
    async with serving(FakeEngine(text, THINKS)) as served:
        events = await events_of(served, tools=[WEATHER], return_token_ids=True, logprobs=True)
    choices = [event["choices"][0] for event in events if event.get("choices")]
    ids = [token for choice in choices for token in choice.get("token_ids", ())]
    assert bytes(token for token in ids if token < 256).decode() == text
    logprobs = [entry for choice in choices if choice.get("logprobs") for entry in choice["logprobs"]["content"]]
    assert len(logprobs) == len(ids)


async def test_the_bundled_model_makes_the_call_that_is_asked_for() -> None:
    tool = openai.pydantic_function_tool(Trip, name="trip")
    asked: Any = {"model": "tiny-chat", "messages": QUESTION, "tools": [tool], "max_tokens": 200, "temperature": 0}
    asked |= {"tool_choice": {"type": "function", "function": {"name": "trip"}}, "parallel_tool_calls": False}
    engine = AsyncEngine(
        "tiny-chat",
        EngineConfig(num_gpu_blocks=32, session_len=768, tool_call_parser="hermes"),
        chat_template_config=ChatTemplateConfig(chat_template=TEMPLATE),
    )
    async with serving(engine) as served, served.openai() as client:
        whole = await client.chat.completions.parse(**asked)
        async with client.chat.completions.stream(**asked) as stream:
            streamed = await stream.get_final_completion()
        cut = (await client.chat.completions.create(**asked | {"max_tokens": 6})).choices[0]
    assert (cut.finish_reason, cut.message.content, cut.message.tool_calls) == ("length", "", None)
    for completion in (whole, streamed):
        choice = completion.choices[0]
        calls: Any = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert isinstance(calls[0].function.parsed_arguments, Trip)
    assert whole.choices[0].message.tool_calls[0].function.arguments == calls[0].function.arguments


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": "required"}, "tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "now"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(body: Any, param: str) -> None:
    async with serving(FakeEngine("Hi")) as served:
        status, found = await served.post("/v1/chat/completions", {"messages": QUESTION, **body})
    assert (status, found["error"]["param"]) == (400, param)
