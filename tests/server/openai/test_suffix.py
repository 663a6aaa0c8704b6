"""`suffix`: prompts for text in the middle, in the form of the model's family."""

from __future__ import annotations

from typing import Any

import pytest

from asyncllm import AsyncEngine
from asyncllm.testing import FakeEngine
from asyncllm.testing.byte_tokenizer import ByteTokenizer
from asyncllm.testing.fake_engine import fake_parts
from asyncllm.text.fill_in import FORMS, fill_in_of
from tests.server.serving import serving

pytestmark = pytest.mark.anyio


class Marked(ByteTokenizer):
    """A tokenizer that has some marks too; what they spell is encoded as any text."""

    def __init__(self, *marks: str) -> None:
        super().__init__()
        self.marks = marks

    def token_id(self, token: str) -> int | None:
        return 1 if token in self.marks else super().token_id(token)


def engine_of(*marks: str) -> AsyncEngine:
    """An engine that says its prompt again."""
    return AsyncEngine("fake", **{**fake_parts(), "tokenizer": Marked(*marks)})


EXPECTED = [
    (FORMS[0].marks, "<|fim_prefix|>a<|fim_suffix|>z<|fim_middle|>"),
    (FORMS[1].marks, "<fim_prefix>a<fim_suffix>z<fim_middle>"),
    (FORMS[2].marks, "<fim-prefix>a<fim-suffix>z<fim-middle>"),
    (FORMS[3].marks, "<｜fim▁begin｜>a<｜fim▁hole｜>z<｜fim▁end｜>"),
    (FORMS[4].marks, "<[fim-suffix]>z<[fim-prefix]>a<[fim-middle]>"),
    (FORMS[5].marks, "[SUFFIX]z[PREFIX]a"),
]


@pytest.mark.parametrize(("marks", "prompt"), EXPECTED, ids=[marks[0] for marks, _ in EXPECTED])
def test_each_family_has_its_form(marks: tuple[str, ...], prompt: str) -> None:
    form = fill_in_of(Marked(*marks))
    assert form is not None
    assert form.prompt("a", "z") == prompt
    assert form.prompt("{suffix}", "{prefix}").count("{suffix}") == 1
    assert set(form.stop_words(Marked(*marks, "<|fim_pad|>"))) - set(marks) <= {"<|fim_pad|>"}
    assert fill_in_of(Marked(*marks[1:])) is None


async def test_a_suffix_is_part_of_the_prompt_and_marks_end_the_answer() -> None:
    marks = FORMS[5].marks
    async with serving(engine_of(*marks)) as served, served.openai() as client:
        asked: Any = {"model": "fake", "max_tokens": 60}
        (choice,) = (await client.completions.create(prompt="a", suffix="z", **asked)).choices
        # The prompt said again begins with a mark.
        assert (choice.text, choice.finish_reason) == ("", "stop")
        both = await client.completions.create(prompt=["a", "b"], suffix="z", stop="q", **asked)
        assert both.usage is not None
        assert both.usage.prompt_tokens == 2 * len("[SUFFIX]z[PREFIX]a")
        _, found = await served.post(
            "/api/generate", {"prompt": "a", "suffix": "z", "stream": False, "options": {"num_predict": 60}}
        )
        assert (found["response"], found["prompt_eval_count"]) == ("", len("[SUFFIX]z[PREFIX]a"))
        _, plain = await served.post("/v1/completions", {"prompt": "a", "suffix": "", "max_tokens": 60})
        assert plain["choices"][0]["text"] == "a"


async def test_what_has_no_place_for_a_suffix_is_refused() -> None:
    async with serving(engine_of(*FORMS[5].marks)) as served:
        for body in ({"prompt": [1, 2]}, {"prompt": "a", "echo": True}):
            status, found = await served.post("/v1/completions", {**body, "suffix": "z"})
            assert (status, found["error"]["param"]) == (400, "suffix")
    async with serving(FakeEngine()) as served:
        status, found = await served.post("/v1/completions", {"prompt": "a", "suffix": "z"})
        assert (status, found["error"]["code"]) == (400, "unsupported_parameter")
