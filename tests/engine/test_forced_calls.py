"""The bundled model, which was taught no tools, makes valid calls if it has to, streamed or not."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

import asyncllm
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

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

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


OPENED = TEMPLATE.replace("assistant\n' }}{% endif", "assistant\n<think>' }}{% endif")


async def test_reasoning_whose_end_is_no_token_is_refused() -> None:
    thinks, form = config("hermes", reasoning_parser="qwen3"), ChatTemplateConfig(chat_template=OPENED)
    async with AsyncEngine("tiny-chat", thinks, chat_template_config=form) as llm:
        with pytest.raises(UnsupportedFeature, match="not a single token") as caught:
            await llm.generate(QUESTION, tools=TOOLS, tool_choice="required")
        assert caught.value.param == "tools"
        with pytest.raises(UnsupportedFeature, match="not a single token") as refused:
            await llm.generate(QUESTION, thinking_budget=3)
        assert refused.value.param == "thinking_budget"


@pytest.fixture
def thinker(tmp_path: Path) -> Path:
    """The bundled model with marks of reasoning that are tokens."""
    source = Path(asyncllm.__file__).parent / "assets" / "tiny-chat"
    for path in source.iterdir():
        if path.name == "tokenizer.json":
            text = path.read_text(encoding="utf-8")
            text = text.replace('"<|reserved_0|>"', '"<think>"').replace('"<|reserved_1|>"', '"</think>"')
            (tmp_path / path.name).write_text(text, encoding="utf-8")
        else:
            (tmp_path / path.name).symlink_to(path)
    return tmp_path


async def test_reasoning_comes_first_within_its_budget_and_then_what_is_held(thinker: Path) -> None:
    thinks, form = config("hermes", reasoning_parser="qwen3"), ChatTemplateConfig(chat_template=OPENED)
    async with AsyncEngine(str(thinker), thinks, chat_template_config=form) as llm:
        free = await llm.generate(QUESTION, GenerationConfig(max_new_tokens=40, ignore_eos=True))
        assert free.reasoning_token_len == 40
        for budget in (0, 5):
            bounded = await llm.generate(QUESTION, LIMITED, thinking_budget=budget)
            # The mark of the end counts too.
            assert bounded.reasoning_token_len == budget + 1
            assert free.token_ids[:budget] == bounded.token_ids[:budget]
        options: Any = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
        called = await llm.generate(QUESTION, LIMITED, thinking_budget=6, **options)
        check(called)
        assert called.reasoning
        choice = GenerationConfig(response_format={"type": "choice", "choice": ["yes"]}, max_new_tokens=40)
        held = await llm.generate(QUESTION, choice, thinking_budget=6)
        assert (held.text, held.finish_reason) == ("yes", "stop")
        # Without a budget it thinks to the end of its tokens, and cannot leave the answer out.
        assert (await llm.generate(QUESTION, choice)).finish_reason == "length"
        again = await llm.generate(QUESTION, LIMITED, thinking_budget=5, do_preprocess=True)
        assert again.token_ids == bounded.token_ids


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
    unsupported = {"type": "object", "properties": {}, "additionalProperties": False, "not": {"minProperties": 1}}
    for schema, words in ((unsupported, '"not"'), ({"type": "object", "not": {}}, "Unsatisfiable")):
        with pytest.raises(InvalidParameter, match=words) as failed:
            await llm.generate(QUESTION, tools=[tool("f", schema, strict=True)])
        assert failed.value.param == "tools"
    # Where it is not strict, what cannot be held to is left out.
    lenient = tool("f", unsupported)
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
