"""How a conversation's text ends, and variables of a checkpoint's template, against `transformers`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from asyncllm.errors import InvalidParameter, UnsupportedFeature
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.replies.formats import reply_format
from asyncllm.text.templates.registry import MODELS
from tests.text.conversations import JINJA, turns

THINKING = (
    JINJA["chatml"] + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "{{ '<think></think>' }}{% endif %}{{ mode }}"
)


@pytest.mark.parametrize("name", ["chatml", "trimming"])
def test_a_new_answer_begins_behind_the_assistants_last_word_as_in_transformers(
    checkpoint: Callable[..., Path], name: str
) -> None:
    folder = checkpoint(chat_template=JINJA[name])
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    template = ChatTemplate.open(folder)
    messages = turns("Hi", "Well,")
    expected = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert template.render(messages, continue_final_message=False) == expected
    continued = oracle.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert template.render(messages, add_generation_prompt=False, continue_final_message=True) == continued
    assert template.render(messages) == continued
    closed = oracle.apply_chat_template(messages, tokenize=False)
    assert template.render(messages, add_generation_prompt=False) == closed


def test_only_the_assistants_message_is_continued(checkpoint: Callable[..., Path]) -> None:
    for template in (ChatTemplate.open(checkpoint(chat_template=JINJA["chatml"])), open_builtin(checkpoint, "qwen")):
        with pytest.raises(InvalidParameter, match="it is the user's") as caught:
            template.render(turns("Hi"), continue_final_message=True)
        assert caught.value.param == "continue_final_message"


def open_builtin(checkpoint: Callable[..., Path], name: str) -> ChatTemplate:
    return ChatTemplate.open(checkpoint(), name)


def test_a_built_in_template_ends_in_all_three_ways(checkpoint: Callable[..., Path]) -> None:
    template = open_builtin(checkpoint, "yi")
    begun = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nWell,"
    messages = turns("Hi", "Well,")
    assert template.render(messages) == begun
    assert template.render(messages, add_generation_prompt=False) == begun + "<|im_end|>\n"
    answer = "<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(messages, continue_final_message=False) == begun + answer


def test_a_users_class_is_not_asked_for_what_it_does_not_know(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Plain:
        def get_prompt(self, prompt: str, sequence_start: bool = True) -> str:
            return prompt

        def messages2prompt(self, messages: Any, sequence_start: bool = True) -> str:
            return " + ".join(message["content"] for message in messages)

    monkeypatch.setattr(MODELS, "users", dict(MODELS.users))
    MODELS.register_module(name="plain", module=Plain)
    template = open_builtin(checkpoint, "plain")
    assert template.render(turns("U", "A")) == "U + A"
    for options in ({"add_generation_prompt": False}, {"continue_final_message": False}):
        with pytest.raises(UnsupportedFeature, match="does not know") as caught:
            template.render(turns("U", "A"), **options)
        assert caught.value.param == next(iter(options))


def test_variables_reach_the_template_as_in_transformers(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint(chat_template=THINKING)
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    template = ChatTemplate.open(folder)
    for variables in ({}, {"enable_thinking": False}, {"enable_thinking": True, "mode": "x"}):
        expected = oracle.apply_chat_template(turns("Hi"), tokenize=False, add_generation_prompt=True, **variables)
        assert template.render(turns("Hi"), variables=variables) == expected


@pytest.mark.parametrize(
    "name",
    ["thinking", "messages", "add_generation_prompt", "documents", "bos_token", "raise_exception", "range", "message"],
)
def test_other_names_are_refused(checkpoint: Callable[..., Path], name: str) -> None:
    source = THINKING + "{{ bos_token }}{% if false %}{{ raise_exception(range(documents)) }}{% endif %}"
    template = ChatTemplate.open(checkpoint(chat_template=source))
    with pytest.raises(InvalidParameter, match="Its variables are: enable_thinking, mode") as caught:
        template.render(turns("Hi"), variables={name: "x"})
    assert caught.value.param == "chat_template_kwargs"


def test_a_built_in_template_has_no_variables(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedFeature, match="which has no variables"):
        open_builtin(checkpoint, "qwen").render(turns("Hi"), variables={"enable_thinking": True})


FOR_TOOLS = (
    "{{ bos_token }}<tool_call>{{ tools | map(attribute='function') | map(attribute='name') | join(',') }}{{ style }}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls %}{{ call.function.arguments.city }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize("place", ["named", "files"])
def test_tools_have_a_template_of_their_own_as_in_transformers(checkpoint: Callable[..., Path], place: str) -> None:
    """Hermes 2 and 3, and Command R have a list; transformers 5 writes files."""
    named = [{"name": "default", "template": THINKING}, {"name": "tool_use", "template": FOR_TOOLS}]
    folder = checkpoint(**({"chat_template": named} if place == "named" else {}))
    if place == "files":
        (folder / "additional_chat_templates").mkdir()
        (folder / "chat_template.jinja").write_text(THINKING)
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(FOR_TOOLS)
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    template = ChatTemplate.open(folder)
    assert template.reads_tools
    assert reply_format(template.source, None).tools is not None
    call = {"id": "123456789", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    asked: list[Any] = [*turns("Hi"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    asked += [{"role": "tool", "content": "warm", "tool_call_id": "123456789"}]
    for messages in (turns("Hi"), asked):
        for tools in ({}, {"tools": TOOLS}):
            variables = {"style": "!", "mode": "?", **tools}
            expected = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)
            assert template.render(messages, variables=variables) == expected
    for tools in ({}, {"tools": TOOLS}):
        with pytest.raises(InvalidParameter, match="does not read 'other'"):
            template.render(turns("Hi"), variables={"other": 1, **tools})


@pytest.mark.parametrize(
    "settings",
    [
        {"image_token": "<|im_end|>"},
        {"extra_special_tokens": {"image_token": "<|im_end|>", "other": "x"}},
        {"model_specific_special_tokens": {"image_token": "<|im_end|>"}},
        {"image_token": {"content": "<|im_end|>", "lstrip": True, "__type": "AddedToken"}},
    ],
)
def test_tokens_with_names_of_the_model_are_variables_as_in_transformers(
    checkpoint: Callable[..., Path], settings: dict[str, Any]
) -> None:
    source = "{{ image_token }}|{{ other }}|{{ add_bos_token }}|{{ messages[0].content }}"
    folder = checkpoint(chat_template=source, add_bos_token=False, **settings)
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    expected = oracle.apply_chat_template(turns("Hi"), tokenize=False)
    assert expected.startswith("<|im_end|>")
    assert ChatTemplate.open(folder).render(turns("Hi"), add_generation_prompt=False) == expected
    with pytest.raises(InvalidParameter, match="does not read 'image_token'"):
        ChatTemplate.open(folder).render(turns("Hi"), variables={"image_token": "y"})
