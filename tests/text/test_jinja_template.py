"""The checkpoint's own template, against `transformers`, and what a hostile or broken one does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from asyncllm.config import ChatTemplateConfig
from asyncllm.errors import InvalidCheckpoint, InvalidMessage
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.types import Message
from tests.text.checkpoints import write_json
from tests.text.conversations import JINJA, turns

CONVERSATIONS: list[list[Message]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hi\n"}],
    [
        {"role": "user", "content": " one "},
        {"role": "assistant", "content": " two "},
        {"role": "user", "content": "drei <|im_end|> 四"},
    ],
]


@pytest.mark.parametrize("name", JINJA)
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("generate", [True, False])
def test_jinja_renders_as_transformers(
    checkpoint: Callable[..., Path], name: str, messages: list[Message], generate: bool
) -> None:
    folder = checkpoint(chat_template=JINJA[name])
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    template = ChatTemplate.open(folder)
    assert template.name == "checkpoint"
    if name == "alternating" and messages[0]["role"] == "system":
        with pytest.raises(InvalidMessage, match="refuses these messages: System role not supported"):
            template.render(messages, add_generation_prompt=generate)
    else:
        expected = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
        assert template.render(messages, add_generation_prompt=generate) == expected


@pytest.mark.parametrize("name", ["chatml", "trimming", "alternating"])
@pytest.mark.parametrize("begun", ["e", "The answer is ", " two\n\nlines", "<|im_end|>", "", " "])
def test_an_answer_is_continued_as_in_transformers(checkpoint: Callable[..., Path], name: str, begun: str) -> None:
    folder = checkpoint(chat_template=JINJA[name])
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    text = ChatTemplate.open(folder).render(turns("Hi", begun))
    if begun.strip():
        assert text == oracle.apply_chat_template(turns("Hi", begun), tokenize=False, continue_final_message=True)
    else:
        begin = oracle.apply_chat_template(turns("Hi"), tokenize=False, add_generation_prompt=True)
        assert text == begin + ("" if name == "trimming" else begun)


@pytest.mark.parametrize("place", ["tokenizer_config", "named", "jinja", "json"])
def test_places_of_a_checkpoints_template(checkpoint: Callable[..., Path], place: str) -> None:
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": JINJA["chatml"]}]
    fields: dict[str, dict[str, Any]] = {
        "tokenizer_config": {"chat_template": JINJA["chatml"]},
        "named": {"chat_template": named},
    }
    folder = checkpoint(**fields.get(place, {}))
    if place == "jinja":
        (folder / "chat_template.jinja").write_text(JINJA["chatml"])
    elif place == "json":
        write_json(folder / "chat_template.json", chat_template=JINJA["chatml"])
    assert ChatTemplate.open(folder).render(turns("U")) == "<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"


def test_the_file_of_its_own_comes_before_the_settings(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint(chat_template="from settings")
    (folder / "chat_template.jinja").write_text("from file")
    assert ChatTemplate.open(folder).render(turns("U")) == "from file"


def test_the_token_that_ends_a_turn_is_a_stop_word(checkpoint: Callable[..., Path]) -> None:
    added = {"1": {"content": "<|im_start|>", "special": True}, "2": {"content": "<|im_end|>", "special": True}}
    folder = checkpoint(chat_template=JINJA["chatml"], eos_token="</s>", added_tokens_decoder=added)
    assert ChatTemplate.open(folder).stop_words == ("<|im_end|>",)
    assert ChatTemplate.open(folder, ChatTemplateConfig(stop_words=["END"])).stop_words == ("END",)
    folder = checkpoint(chat_template=JINJA["helpers"])
    assert ChatTemplate.open(folder).stop_words == ()


@pytest.mark.parametrize(("source", "reason"), [
    ("{% for %}", "does not compile"),
    ("{% endgeneration %}", "does not compile"),
    ([{"name": "a", "template": "x"}, {"name": "b", "template": "y"}], "called 'default'"),
    ([1], "called 'default'"),
    (5, "called 'default'"),
])  # fmt: skip
def test_a_broken_template_is_named(checkpoint: Callable[..., Path], source: object, reason: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=reason):
        ChatTemplate.open(checkpoint(chat_template=source))


@pytest.mark.parametrize("source", [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append({}) }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ raise_exception.__globals__.os }}",
    "{{ self.__init__.__globals__['__builtins__'] }}",
    "{{ (messages|attr('__class__')).__base__ }}",
    "{{ lipsum.__globals__['os'].system('id') }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ messages[0].missing.deeper }}",
    "{{ 1 / 0 }}",
    "{{ messages + 5 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
])  # fmt: skip
def test_a_hostile_or_failing_template_raises_a_typed_error(checkpoint: Callable[..., Path], source: str) -> None:
    template = ChatTemplate.open(
        checkpoint(chat_template="{% if messages[0].content == 'U' %}" + source + "{% endif %}")
    )
    with pytest.raises((InvalidMessage, InvalidCheckpoint)):
        template.render(turns("U"))
    assert template.render(turns("harmless")) == ""


def test_the_rendered_text_is_capped(checkpoint: Callable[..., Path]) -> None:
    row = "{% for i in range(99999) %}"
    folder = checkpoint(chat_template=row + row + "0123456789" * 30 + "{% endfor %}{% endfor %}")
    with pytest.raises(InvalidMessage, match="longer than"):
        ChatTemplate.open(folder).render(turns("U"))


@pytest.mark.parametrize("source", ["{{ ''.__class__.__mro__[1] }}", "{{ 1 / 0 }}", "{{ messages + 5 }}"])
def test_what_went_wrong_in_a_template_is_for_the_log(checkpoint: Callable[..., Path], source: str) -> None:
    folder = checkpoint(chat_template="{% if messages[0].content == 'secret' %}" + source + "{% endif %}")
    with pytest.raises(InvalidMessage) as caught:
        ChatTemplate.open(folder).render(turns("secret"))
    cause = caught.value.__cause__
    assert cause is not None
    assert str(folder) not in str(caught.value)
    assert str(cause) not in str(caught.value)
    # The frames of the template hold the messages.
    assert cause.__traceback__ is None
    assert cause.__context__ is None


def test_what_a_template_says_when_it_refuses_is_cut(checkpoint: Callable[..., Path]) -> None:
    source = "{% if messages[0].content|length > 9 %}{{ raise_exception(messages[0].content) }}{% endif %}"
    template = ChatTemplate.open(checkpoint(chat_template=source))
    with pytest.raises(InvalidMessage, match="refuses these messages: no no no no") as caught:
        template.render(turns("no " * 100_000))
    assert len(str(caught.value)) < 1000


class ContainmentCounter(str):
    """A content that counts how often it is searched."""

    searches = 0

    def __contains__(self, part: object) -> bool:
        ContainmentCounter.searches += 1
        return super().__contains__(part)  # type: ignore[operator]


def test_no_text_can_hold_the_mark_behind_an_answer_that_goes_on(checkpoint: Callable[..., Path]) -> None:
    template = ChatTemplate.open(checkpoint(chat_template=JINJA["chatml"]))
    begun = ContainmentCounter("[the answer goes on here] " * 50 + "[an answer]")
    assert template.render(turns("Hi", begun)).endswith("assistant\n" + begun)
    assert ContainmentCounter.searches <= 1
