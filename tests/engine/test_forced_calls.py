"""Calls that the bundled model, which was never taught any, has to make: they are valid, streamed or not."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import msgspec
import pytest

from asyncllm import (
    AsyncEngine,
    ChatTemplateConfig,
    EngineConfig,
    GenerationConfig,
    InvalidParameter,
    UnsupportedFeature,
    pipeline,
)
from asyncllm.testing import FakeEngine
from asyncllm.types import Response

pytestmark = pytest.mark.anyio

TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "(message['content'] or '') + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ADD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "left": {"type": "integer", "minimum": 0, "maximum": 99},
        "word": {"type": "string", "maxLength": 8},
        "unit": {"enum": ["m", "s"]},
    },
    "required": ["left", "word", "unit"],
    "additionalProperties": False,
}
QUESTION = "What is 17 + 25?"


def tool(name: str, parameters: Any = None, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


TOOLS = [tool("add", ADD, strict=True), tool("now")]
LIMITED = GenerationConfig(max_new_tokens=200)


def config(parser: str, **fields: Any) -> EngineConfig:
    return EngineConfig(
        block_size=16, num_gpu_blocks=64, session_len=768, max_prefill_token_num=64, tool_call_parser=parser, **fields
    )


def template() -> ChatTemplateConfig:
    return ChatTemplateConfig(chat_template=TEMPLATE)


@pytest.fixture
async def llm() -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine("tiny-chat", config("hermes"), chat_template_config=template()) as engine:
        yield engine
        engine.check_idle()


def check(answer: Response) -> None:
    assert answer.tool_calls
    assert (answer.finish_reason, answer.text) == ("tool_calls", "")
    for call in answer.tool_calls:
        schema = {"add": ADD, "now": {"type": "object", "maxProperties": 0}}[call.name]
        jsonschema.validate(json.loads(call.arguments), schema)


async def test_a_required_call_is_made_and_valid_in_another_format() -> None:
    async with AsyncEngine("tiny-chat", config("pythonic"), chat_template_config=template()) as llm:
        sampled = GenerationConfig(max_new_tokens=400, temperature=1.0, top_k=20, random_seed=3)
        check(await llm.generate(QUESTION, sampled, tools=TOOLS, tool_choice="required", parallel_tool_calls=False))


async def test_the_named_tool_is_called_streamed_or_not(llm: AsyncEngine) -> None:
    options: Any = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}}
    options["parallel_tool_calls"] = False
    whole = await llm.generate(QUESTION, LIMITED, **options)
    check(whole)
    assert [call.name for call in whole.tool_calls] == ["add"]
    streamed = Response.collect([chunk async for chunk in llm.generate(QUESTION, LIMITED, **options)])
    assert [(call.name, call.arguments) for call in streamed.tool_calls] == [
        (call.name, call.arguments) for call in whole.tool_calls
    ]
    async with llm.session() as session:
        check(await session.chat(QUESTION, LIMITED, **options))


async def test_a_reply_is_a_call_or_content_of_the_form(llm: AsyncEngine) -> None:
    choice = GenerationConfig(response_format={"type": "choice", "choice": ["0", "1"]}, max_new_tokens=200)
    answer = await llm.generate(QUESTION, choice, tools=TOOLS)
    if answer.tool_calls:
        check(answer)
    else:
        assert answer.text in ("0", "1")
    biased = msgspec.structs.replace(choice, bad_words=["0", "1"])
    check(await llm.generate(QUESTION, biased, tools=TOOLS, parallel_tool_calls=False))
    check(await llm.generate(QUESTION, choice, tools=TOOLS, tool_choice="required", parallel_tool_calls=False))
    assert (await llm.generate(QUESTION, choice, tools=TOOLS, tool_choice="none")).text in ("0", "1")


async def test_strict_tools_leave_text_free(llm: AsyncEngine) -> None:
    plain = await llm.generate(QUESTION, LIMITED, tools=[tool("add", ADD)])
    held = await llm.generate(QUESTION, LIMITED, tools=[tool("add", ADD)], tool_choice="auto")
    strict = await llm.generate(QUESTION, LIMITED, tools=[tool("add", ADD, strict=True)])
    assert plain.text == held.text
    assert (strict.finish_reason, strict.tool_calls) == ("stop", [])
    assert strict.text


async def test_reasoning_whose_end_is_no_token_is_refused() -> None:
    thinks = config("hermes", reasoning_parser="qwen3")
    form = ChatTemplateConfig(
        chat_template=TEMPLATE.replace("assistant\n' }}{% endif", "assistant\n<think>' }}{% endif")
    )
    async with AsyncEngine("tiny-chat", thinks, chat_template_config=form) as llm:
        with pytest.raises(UnsupportedFeature, match="no token of its own") as caught:
            await llm.generate(QUESTION, tools=TOOLS, tool_choice="required")
        assert caught.value.param == "tools"


async def test_what_cannot_be_called_is_refused(llm: AsyncEngine) -> None:
    refused: list[tuple[Any, str, str]] = [
        ({"type": "function", "function": {"name": "then"}}, "no tool of that name", "tool_choice"),
        ({"type": "allowed_tools", "tools": []}, "allowed_tools", "tool_choice"),
        ({"type": "custom"}, "custom", "tool_choice"),
    ]
    for choice, words, param in refused:
        with pytest.raises(InvalidParameter, match=words) as caught:
            await llm.generate(QUESTION, tools=TOOLS, tool_choice=choice)
        assert caught.value.param == param
    bad = tool("f", {"type": "object", "not": {}}, strict=True)
    with pytest.raises(InvalidParameter, match="not") as failed:
        await llm.generate(QUESTION, tools=[bad])
    assert failed.value.param == "tools"
    # Where it is not strict, what cannot be held to is left out.
    lenient = tool("f", {"type": "object", "properties": {}, "additionalProperties": False, "not": {}})
    answer = await llm.generate(QUESTION, LIMITED, tools=[lenient], tool_choice="required", parallel_tool_calls=False)
    assert (answer.tool_calls[0].name, answer.tool_calls[0].arguments) == ("f", "{}")


async def test_a_fake_says_that_it_cannot() -> None:
    async with FakeEngine("Hi") as fake:
        with pytest.raises(UnsupportedFeature, match="fake") as caught:
            await fake.generate("Hi", tools=TOOLS)
        assert caught.value.param == "tools"


def test_a_pipeline_forces_calls_too() -> None:
    with pipeline("tiny-chat", backend_config=config("hermes"), chat_template_config=template()) as pipe:
        answer = pipe(QUESTION, gen_config=LIMITED, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        assert isinstance(answer, Response)
        check(answer)
