"""Tools and reasoning through the engine: what is split off an answer, and how it ends."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncllm import EngineConfig, GenerationConfig, InvalidParameter, UnsupportedFeature
from asyncllm.pipeline import Pipeline
from asyncllm.testing import FakeEngine, FakePipeline
from asyncllm.types import Response

pytestmark = pytest.mark.anyio

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
THINKS = EngineConfig(reasoning_parser="qwen3")


def engine(answer: str, config: EngineConfig | None = None) -> FakeEngine:
    return FakeEngine(answer, config)


async def test_a_call_is_split_off_and_ends_the_answer() -> None:
    async with engine(f"Let me see.\n{CALL}\n{CALL}") as llm:
        whole = await llm.generate("Hi", tools=[WEATHER])
        chunks = [chunk async for chunk in llm.generate("Hi", tools=[WEATHER])]
    assert (whole.text, whole.finish_reason) == ("Let me see.", "tool_calls")
    assert [(call.name, json.loads(call.arguments)) for call in whole.tool_calls] == [
        ("weather", {"city": "Zürich"})
    ] * 2
    assert len({call.id for call in whole.tool_calls}) == 2
    streamed = Response.collect(chunks)
    assert (streamed.text, streamed.finish_reason) == (whole.text, whole.finish_reason)
    assert [(call.name, call.arguments) for call in streamed.tool_calls] == [
        (call.name, call.arguments) for call in whole.tool_calls
    ]
    # The arguments stream: no chunk has more of them than its token.
    assert sum(len(chunk.tool_calls) for chunk in chunks) > 20


async def test_one_call_is_enough_without_parallel_ones() -> None:
    for stream in (True, False):
        async with engine(f"{CALL}\n{CALL}") as llm:
            options: Any = {"tools": [WEATHER], "parallel_tool_calls": False, "stream_response": stream}
            answer = await llm.generate("Hi", **options)
        assert (len(answer.tool_calls), answer.finish_reason) == (1, "tool_calls")
        assert answer.generate_token_len < len(CALL.encode()) + 1


async def test_calls_are_text_without_tools_and_where_none_is_wanted() -> None:
    async with engine(CALL) as llm:
        assert (await llm.generate("Hi")).text == CALL
        answer = await llm.generate("Hi", tools=[WEATHER], tool_choice="none")
        assert (answer.text, answer.tool_calls, answer.finish_reason) == (CALL, [], "stop")


async def test_a_call_that_is_cut_ends_by_its_length() -> None:
    async with engine(CALL) as llm:
        answer = await llm.generate("Hi", GenerationConfig(max_new_tokens=60), tools=[WEATHER])
    assert answer.finish_reason == "length"
    assert CALL.count(answer.tool_calls[0].arguments) == 1


async def test_stop_words_end_the_content_and_are_not_looked_for_in_calls() -> None:
    async with engine(f"One STOP {CALL}") as llm:
        answer = await llm.generate("Hi", GenerationConfig(stop_words=["STOP"]), tools=[WEATHER])
        assert (answer.text, answer.stop_reason, answer.tool_calls) == ("One ", "STOP", [])
        answer = await llm.generate("Hi", GenerationConfig(stop_words=["city"]), tools=[WEATHER])
        assert (answer.stop_reason, len(answer.tool_calls)) == (None, 1)


async def test_reasoning_is_split_off_and_counted() -> None:
    async with engine("<think>\nHm, hm.\n</think>\n\nYes.", THINKS) as llm:
        answer = await llm.generate("Hi")
        assert (answer.reasoning, answer.text, answer.finish_reason) == ("Hm, hm.", "Yes.", "stop")
        assert answer.reasoning_token_len == len("<think>\nHm, hm.\n</think>")
        kept = await llm.generate("Hi", separate_reasoning=False)
        assert (kept.reasoning, kept.text) == ("", "<think>\nHm, hm.\n</think>\n\nYes.")
        raw = await llm.generate("Hi", do_preprocess=False)
        assert (raw.reasoning, raw.text) == ("", "<think>\nHm, hm.\n</think>\n\nYes.")


async def test_a_call_that_ends_the_reasoning_is_none_of_it() -> None:
    async with engine(f"<think>Hm, hm.\n{CALL} Done.", THINKS) as llm:
        answer = await llm.generate("Hi", tools=[WEATHER])
        assert (answer.reasoning, answer.text, len(answer.tool_calls)) == ("Hm, hm.", "Done.", 1)
        assert answer.reasoning_token_len == len("<think>Hm, hm.")
        cut = await llm.generate("Hi", GenerationConfig(max_new_tokens=len("<think>Hm, hm.\n")), tools=[WEATHER])
        assert cut.reasoning_token_len == len("<think>Hm, hm.\n")


async def test_calls_know_their_place_in_the_text() -> None:
    async with engine(f"One. {CALL} Two. {CALL}{CALL} Three.") as llm:
        answer = await llm.generate("Hi", tools=[WEATHER])
        assert answer.text == "One.Two.Three."
        assert [call.text_position for call in answer.tool_calls] == [4, 8, 8]
        chunks = [chunk async for chunk in llm.generate("Hi", tools=[WEATHER])]
        collected = Response.collect(chunks)
        assert [call.text_position for call in collected.tool_calls] == [4, 8, 8]


async def test_reasoning_that_was_begun_goes_on() -> None:
    async with engine("and so on.</think>Yes.", THINKS) as llm:
        begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>First"}]
        answer = await llm.generate(begun)
        assert (answer.reasoning, answer.text) == ("and so on.", "Yes.")
        closed = [begun[0], {"role": "assistant", "content": "<think>a</think>b"}]
        assert (await llm.generate(closed)).text == "and so on.</think>Yes."


async def test_each_of_several_answers_has_its_own_calls() -> None:
    async with engine(CALL) as llm:
        answer = await llm.generate("Hi", GenerationConfig(n=3), tools=[WEATHER])
    assert [len(choice.tool_calls) for choice in answer.choices] == [1, 1, 1]
    assert len({choice.tool_calls[0].id for choice in answer.choices}) == 3


async def test_a_session_goes_on_from_what_the_model_wrote() -> None:
    async with engine(f"<think>Hm.</think>Ok. {CALL}", THINKS) as llm:
        session = llm.session()
        answer = await session.chat("Hi", tools=[WEATHER])
        assert answer.finish_reason == "tool_calls"
        assert session.response is not None
        assert (session.response.text, session.response.reasoning) == ("Ok.", "Hm.")
        assert session.response.tool_calls == answer.tool_calls
        assert session.history == [("Hi", f"<think>Hm.</think>Ok. {CALL}")]
        assert (await session.chat("And?", tools=[WEATHER])).text == "Ok."


def test_a_pipeline_takes_tools_too() -> None:
    with FakePipeline(CALL) as pipe:
        assert isinstance(pipe, Pipeline)
        answer = pipe("Hi", tools=[WEATHER])
        assert isinstance(answer, Response)
        assert answer.tool_calls[0].name == "weather"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"tools": [{"type": "web_search"}]}, UnsupportedFeature, "web_search"),
        ({"tools": [{"function": {"name": "f"}}]}, InvalidParameter, "is not a tool"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, InvalidParameter, "proper name"),
        ({"tools": [WEATHER, WEATHER]}, InvalidParameter, "Two tools"),
        ({"tools": [WEATHER] * 129}, InvalidParameter, "length <= 128"),
        ({"tool_choice": "required"}, InvalidParameter, "no tools"),
        ({"tool_choice": "any", "tools": [WEATHER]}, InvalidParameter, "'any'"),
        ({"tools": [WEATHER], "do_preprocess": False}, InvalidParameter, "chat template"),
        ({"chat_template_kwargs": {"tools": "x"}}, InvalidParameter, "tools="),
    ],
)
async def test_what_is_no_tool_is_refused(options: Any, error: type[Exception], words: str) -> None:
    async with engine("Hi") as llm:
        with pytest.raises(error, match=words):
            await llm.generate("Hi", **options)


async def test_tools_are_refused_where_their_format_is_unknown() -> None:
    async with engine("Hi", EngineConfig(tool_call_parser="none")) as llm:
        with pytest.raises(UnsupportedFeature, match="tool_call_parser"):
            await llm.generate("Hi", tools=[WEATHER])
    with pytest.raises(InvalidParameter, match="Did you mean"):
        await engine("Hi", EngineConfig(tool_call_parser="hermess")).start()
