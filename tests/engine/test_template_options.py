"""Options of the chat template, through every call that takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncllm.config import ChatTemplateConfig, GenerationConfig
from asyncllm.engine.async_engine import AsyncEngine
from asyncllm.errors import InvalidMessage, InvalidParameter, UnsupportedFeature
from asyncllm.testing import FakeEngine, FakePipeline, fake_parts
from asyncllm.text.chat_template import ChatTemplate

pytestmark = pytest.mark.anyio

JINJA = (
    "{% for m in messages %}[{{ m.role[0] }}:{{ m.content }}]{% endfor %}"
    "{% if add_generation_prompt %}[a:{{ '!' if quick }}{{ tone }}{% endif %}"
)
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well,"}]


@pytest.fixture
def engine(tmp_path: Path) -> AsyncEngine:
    """Answers with its prompt."""
    template = ChatTemplate.open(tmp_path, ChatTemplateConfig(chat_template=JINJA))
    return AsyncEngine("fake", **{**fake_parts(), "chat_template": template})


async def test_how_the_prompt_ends(engine: AsyncEngine) -> None:
    expected: list[tuple[dict[str, Any], str]] = [
        ({}, "[u:hi][a:well,"),
        ({"continue_final_message": True}, "[u:hi][a:well,"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "[u:hi][a:well,"),
        ({"add_generation_prompt": True}, "[u:hi][a:well,][a:"),
        ({"continue_final_message": False}, "[u:hi][a:well,][a:"),
        ({"add_generation_prompt": False}, "[u:hi][a:well,]"),
    ]
    async with engine:
        for options, text in expected:
            assert (await engine.generate(MESSAGES, **options)).text == text, options
            assert engine.tokenizer.decode(await engine.encode(MESSAGES, **options)) == text, options


async def test_variables_are_part_of_the_prompt_in_every_call(engine: AsyncEngine) -> None:
    variables = {"quick": True, "tone": "kind"}
    async with engine:
        assert (await engine.generate("hi", chat_template_kwargs=variables)).text == "[u:hi][a:!kind"
        assert (await engine.chat("hi", chat_template_kwargs=variables)).text == "[u:hi][a:!kind"
        answers = await engine.batch_infer(["a", "b"], chat_template_kwargs={"quick": True})
        assert [answer.text for answer in answers] == ["[u:a][a:!", "[u:b][a:!"]
        chunks = [chunk.text async for chunk in engine.stream_infer(["a"], chat_template_kwargs={"tone": "x"})]
        assert "".join(chunks) == "[u:a][a:x"


async def test_a_variable_cannot_spell_a_special_token(engine: AsyncEngine) -> None:
    async with engine:
        ids = await engine.encode("hi", chat_template_kwargs={"tone": "<eos>"})
        assert 257 not in ids
        assert bytes(ids).decode().endswith("[a:<eos>")


async def test_a_session_goes_on_with_other_variables(engine: AsyncEngine) -> None:
    short = GenerationConfig(max_new_tokens=1)
    async with engine, engine.session() as session:
        await session.chat("one", short, chat_template_kwargs={"quick": True})
        await session.chat("two", short, chat_template_kwargs={"tone": "t"})
        # The template would not write "!" into the history, so the whole conversation is rendered anew.
        assert bytes(session.token_ids).decode().startswith("[u:one][a:[][u:two][a:t")
        with pytest.raises(UnsupportedFeature, match="not for sessions"):
            await session.chat("three", short, add_generation_prompt=False)
        assert len(session.history) == 2


@pytest.mark.parametrize(
    ("prompt", "options", "param"),
    [
        (MESSAGES, {"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        (MESSAGES[:1], {"continue_final_message": True}, "continue_final_message"),
        ("hi", {"chat_template_kwargs": {"nope": 1}}, "chat_template_kwargs"),
        ("hi", {"chat_template_kwargs": {"tone": [1]}}, "chat_template_kwargs"),
        ("hi", {"chat_template_kwargs": {f"v{n}": n for n in range(33)}}, "chat_template_kwargs"),
        ("hi", {"do_preprocess": False, "add_generation_prompt": False}, "add_generation_prompt"),
        (None, {"input_ids": [1], "chat_template_kwargs": {"tone": ""}}, "chat_template_kwargs"),
    ],
    ids=str,
)
async def test_what_does_not_fit_is_refused(
    engine: AsyncEngine, prompt: Any, options: dict[str, Any], param: str
) -> None:
    async with engine:
        with pytest.raises(InvalidParameter) as caught:
            await engine.generate(prompt, **options)
        assert caught.value.param == param


async def test_scoring_has_no_template() -> None:
    async with FakeEngine() as engine:
        with pytest.raises(InvalidParameter, match="has no part in this prompt"):
            await engine.get_ppl([1, 2], add_generation_prompt=False)
        with pytest.raises(UnsupportedFeature, match="has no variables"):
            await engine.generate("hi", chat_template_kwargs={"a": 1})


async def test_encode_gives_what_generate_computes() -> None:
    async with FakeEngine() as engine:
        generation = engine.generate(MESSAGES)
        await generation.start()
        assert await engine.encode(MESSAGES) == generation.prompt_token_ids
        await generation
        assert await engine.encode("<eos>x", do_preprocess=False) == [257, ord("x")]
        assert await engine.encode(["a", [5, 6], "x" * 5000], do_preprocess=False) == [[97], [5, 6], [120] * 5000]
        with pytest.raises(InvalidMessage):
            await engine.encode("")


def test_the_pipeline_takes_them_too() -> None:
    with FakePipeline() as pipe, pytest.raises(InvalidParameter, match="contradict each other"):
        pipe("hi", add_generation_prompt=True, continue_final_message=True)
