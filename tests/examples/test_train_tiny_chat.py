"""The questions of bench/quality.py, and the bundled model that answers them."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer as HubTokenizer

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig
from asyncllm.locate import locate
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.tokenizer import Tokenizer
from examples.train_tiny_chat.conversation import SKILLS, document
from examples.train_tiny_chat.exchange import draw, held_out_by, is_held_out
from examples.train_tiny_chat.noise import perturbed
from examples.train_tiny_chat.questions import EASY_SKILLS, HARD_SKILLS, LONG_SKILLS, held_out, quality_set
from examples.train_tiny_chat.stories import is_story, story_text
from examples.train_tiny_chat.tokenizer import CALL_MARKS, CHAT_TEMPLATE, build_tokenizer
from examples.train_tiny_chat.tool_conversation import TOOL_SKILLS, tool_questions
from examples.train_tiny_chat.tools import draw_tool, draw_use

ALL_SKILLS = EASY_SKILLS + HARD_SKILLS + LONG_SKILLS


@pytest.mark.parametrize("skill", ALL_SKILLS)
def test_held_out_questions_are_distinct_and_repeatable(skill: str) -> None:
    questions = held_out(skill, 12, seed=3)
    assert questions == held_out(skill, 12, seed=3)
    assert questions != held_out(skill, 12, seed=4)
    assert len({json.dumps(question.messages) for question in questions}) == 12
    assert all(question.messages[-1]["role"] == "user" and question.answer for question in questions)


@pytest.mark.parametrize("skill", [name for name in SKILLS if name != "story"])
def test_training_never_draws_a_held_out_question(skill: str) -> None:
    random = Random(5)
    assert not any(is_held_out(draw(SKILLS[skill], random, 600, held_out=False)) for _ in range(40))
    assert all(is_held_out(draw(SKILLS[skill], random, 600, held_out=True)) for _ in range(5))


def test_the_quality_set_has_more_than_a_thousand_questions_of_every_skill() -> None:
    questions = quality_set(36, seed=0)
    assert len(questions) > 1000
    assert {question.skill for question in questions} == set(ALL_SKILLS)


@pytest.mark.parametrize("skill", ["sum", "difference", "long_sum"])
def test_arithmetic_answers_are_right(skill: str) -> None:
    for question in held_out(skill, 30, seed=0):
        left, right = question.answer.removesuffix(".").split(" = ")
        terms = re.findall(r"([+-]?) ?(\d+)", left)
        assert sum(-int(number) if sign == "-" else int(number) for sign, number in terms) == int(right)


def test_counted_letters_are_right() -> None:
    for question in held_out("tally", 20, seed=0):
        match = re.fullmatch(r"The letter (\w) appears (\d+) times?\.", question.answer)
        assert match is not None
        row = max(re.findall(r"(?:\b\w )+\w\b", question.messages[-1]["content"]), key=len)
        assert row.split().count(match[1]) == int(match[2])


def test_a_story_is_told_from_a_torso() -> None:
    text = story_text(Random(0), "fox")
    assert is_story("Tell me a story.", text)
    assert not is_story("Tell me a story.", text.removesuffix("The end."))
    assert not is_story("Tell me a story.", text.replace("The end.", "Zymurgy. The end."))


def test_documents_follow_the_chat_template_of_the_bundled_model() -> None:
    folder = locate("tiny-chat")
    template = ChatTemplate.open(folder, None)
    question = held_out("follow_up", 1, seed=0)[0]
    rendered = template.render(question.messages)
    assert rendered.startswith("<|bos|><|im_start|>")
    assert rendered.endswith("<|im_start|>assistant\n")
    text = "".join(segment.text for segment in document(Random(2), 600))
    turns = re.findall(r"<\|im_start\|>(system|user|assistant)\n(.*?)<\|im_end\|>", text, re.DOTALL)
    messages = [{"role": role, "content": content} for role, content in turns]
    assert template.render(messages, add_generation_prompt=False).rstrip("\n") == text


def test_the_bundled_tokenizer_keeps_every_byte_and_splits_digits() -> None:
    tokenizer = Tokenizer.from_folder(locate("tiny-chat"))
    text = bytes(range(256)).decode("latin-1") + "你好 🙂"
    assert tokenizer.decode(tokenizer.encode(text, add_bos=False)) == text
    assert len(tokenizer.encode("48213", add_bos=False)) == 5


def test_the_bundled_checkpoint_is_small_and_whole() -> None:
    folder: Path = locate("tiny-chat")
    assert (folder / "model.safetensors").stat().st_size <= 16 * 1024 * 1024
    tensors = load_file(folder / "model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 and bool(tensor.isfinite().all()) for tensor in tensors.values())
    assert 5_000_000 <= sum(tensor.numel() for tensor in tensors.values()) <= 8_000_000


def test_noise_is_relative_and_repeatable() -> None:
    tensors = {"large": torch.full((4000,), 100.0), "small": torch.full((4000,), 0.01)}
    noisy = perturbed(tensors, 0.05, seed=1)
    for name, tensor in tensors.items():
        assert torch.equal(noisy[name], perturbed(tensors, 0.05, seed=1)[name])
        error = (noisy[name] / tensor - 1).std().item()
        assert error == pytest.approx(0.05, rel=0.1)


def test_questions_with_tools_are_distinct_repeatable_and_of_every_skill() -> None:
    questions = tool_questions(3, seed=3)
    assert questions == tool_questions(3, seed=3) != tool_questions(3, seed=4)
    assert len({question.prompt for question in questions}) == 3 * len(TOOL_SKILLS)
    assert {question.skill for question in questions} == set(TOOL_SKILLS)
    for question in questions:
        calls = [(call.name, call.written_arguments()) for call in question.calls]
        assert question.accepts("" if calls else question.answer, calls)
        assert not question.accepts("No.", calls)
        assert not question.accepts("", [("tool", "{}")])


@pytest.mark.parametrize("held_out", [False, True])
def test_training_never_calls_what_is_held_out(held_out: bool) -> None:
    random = Random(6)
    uses = [draw_use(random, draw_tool(random), held_out) for _ in range(60)]
    assert {held_out_by(use.skill, use.content) for use in uses} == {held_out}


@pytest.fixture
def template() -> ChatTemplate:
    """The bundled model's, which training has written."""
    settings = json.loads((locate("tiny-chat") / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert settings["chat_template"] == CHAT_TEMPLATE
    return ChatTemplate.open(locate("tiny-chat"), None)


def test_conversations_with_tools_are_what_the_template_writes(template: ChatTemplate) -> None:
    for question in tool_questions(4, seed=0):
        assert template.render(question.messages, variables={"tools": question.tools}) == question.prompt
    plain = held_out("recall", 1, seed=0)[0]
    assert template.render(plain.messages) == plain.prompt


def test_the_template_writes_down_schemas_that_say_more_than_a_type(template: ChatTemplate) -> None:
    properties = {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "title": "Days"}, "any": True}
    functions = [{"name": "forecast", "parameters": {"properties": properties}}, {"name": "now", "description": "Now."}]
    tools = [{"type": "function", "function": function} for function in functions]
    text = template.render([{"role": "user", "content": "Hello"}], variables={"tools": tools})
    assert text.startswith(
        "<|bos|><|im_start|>system\nYou can call these tools:\n"
        'forecast(unit: {"enum": ["C", "F"]}, days: integer, any: true)\nnow(): Now.\n<|im_end|>\n<|im_start|>user\n'
    )


@pytest.mark.parametrize("trained", [True, False])
def test_marks_of_calls_are_single_tokens_that_decoding_shows(trained: bool) -> None:
    bundled = HubTokenizer.from_file(str(locate("tiny-chat") / "tokenizer.json"))
    tokenizer = build_tokenizer(0, documents=20) if trained else bundled
    for mark in CALL_MARKS:
        ids = tokenizer.encode(mark, add_special_tokens=False).ids
        assert ids == [bundled.token_to_id(mark)]
        assert tokenizer.decode(ids) == mark
    assert tokenizer.get_vocab_size() == bundled.get_vocab_size()


@pytest.mark.anyio
async def test_the_bundled_model_calls_tools_and_says_what_they_return() -> None:
    greedy = GenerationConfig(temperature=0.0, max_new_tokens=80)
    right: dict[str, list[bool]] = {}
    async with AsyncEngine("tiny-chat", EngineConfig(device_type="cpu", num_gpu_blocks=64)) as llm:
        questions = tool_questions(2, seed=7)
        replies = await asyncio.gather(*(llm.generate(each.messages, greedy, tools=each.tools) for each in questions))
    for question, reply in zip(questions, replies, strict=True):
        calls = [(call.name, call.arguments) for call in reply.tool_calls]
        right.setdefault(question.skill, []).append(question.accepts(reply.text, calls))
    assert sum(map(any, right.values())) == len(TOOL_SKILLS)
    assert sum(map(sum, right.values())) >= 2 * len(TOOL_SKILLS) - 2
