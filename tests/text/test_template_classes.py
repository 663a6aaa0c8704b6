"""Templates as programs build them from their classes, without a model: `MODELS.get(name)(...)`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncllm.errors import InvalidMessage, InvalidParameter
from asyncllm.model import MODELS, BaseChatTemplate
from asyncllm.text.templates.builtin import ALIASES, BUILTIN
from tests.text.conversations import turns

FILLED_IN = "def f():\n    <FILL>\n    return x"


def class_of(name: str) -> Any:
    found = MODELS.get(name)
    assert found is not None
    return found


@pytest.mark.parametrize("name", BUILTIN)
def test_the_class_of_a_name_has_its_parts(name: str) -> None:
    template = class_of(name)()
    assert isinstance(template, BaseChatTemplate)
    assert template.messages2prompt(turns("U", "A", "V")) == MODELS.build(name, {}).messages2prompt(
        turns("U", "A", "V")
    )
    assert template.user == BUILTIN[name].get("user", "")
    assert MODELS.get(name) is MODELS.get(name)


def test_arguments_replace_parts() -> None:
    template = class_of("vicuna")(system="In Python. ", meta_instruction="Be brief.")
    assert template.get_prompt("U") == "In Python. Be brief. USER: U ASSISTANT: "
    assert template.get_prompt("U", sequence_start=False) == "USER: U ASSISTANT: "
    assert template.stop_words == ["</s>"]


def test_a_system_part_of_the_callers_is_written_without_a_text() -> None:
    assert class_of("codellama")(system="In Python. ").get_prompt("U").startswith("In Python. ")
    assert BaseChatTemplate(system="<s>", eosys="</s>", user="U:").get_prompt("x") == "<s></s>U:x"
    assert MODELS.build("a new one", {"system": "<s>", "user": "U:"}).get_prompt("x") == "<s>U:x"
    assert BaseChatTemplate(system="<s>", meta_instruction=None, user="U:").get_prompt("x") == "U:x"


@pytest.mark.parametrize("name", ["llama2", "vicuna", "qwen", "chatglm"])
def test_what_does_not_chat_takes_texts_as_they_are(name: str) -> None:
    for capability in ("completion", "python"):
        template = class_of(name)(capability=capability)
        assert template.get_prompt("U") == template.get_prompt("U", sequence_start=False) == "U"
        assert template.messages2prompt("U") == "U"
        assert template.messages2prompt(turns("U", "A", "V")) == "UAV"


def test_what_fills_in() -> None:
    template = class_of("codellama")(capability="infilling")
    assert template.get_prompt(FILLED_IN) == "<PRE> def f():\n     <SUF>\n    return x <MID>"
    assert template.stop_words == ["<EOT>"]
    assert class_of("codellama")(capability="completion").stop_words is None
    with pytest.raises(InvalidMessage, match="exactly once"):
        template.get_prompt("no mark")


def test_an_unknown_capability_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="It is one of completion, chat") as caught:
        class_of("vicuna")(capability="voice")
    assert caught.value.param == "capability"


@pytest.mark.parametrize("alias", ALIASES)
def test_older_names_are_those_of_the_same_template(alias: str) -> None:
    assert MODELS.get(alias) is MODELS.get(ALIASES[alias])
    assert alias not in BUILTIN


def test_the_checkpoints_own_template() -> None:
    template = class_of("hf")(model_path="tiny-chat", trust_remote_code=True)
    text = "<|bos|><|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    assert template.get_prompt("U") == template.messages2prompt("U") == text
    assert template.messages2prompt(turns("U"), enable_thinking=None) == text
    assert template.messages2prompt([{"role": "assistant", "content": "An answer"}]).endswith("An answer")
    assert template.messages2prompt(turns("V"), sequence_start=False) == template.get_prompt("V", sequence_start=False)
    assert template.stop_words == ["<|im_end|>"]
    with pytest.raises(InvalidParameter, match="unknown"):
        template.messages2prompt(turns("U"), unknown=1)


OF_PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}{% if numbered %}Picture: {% endif %}<|image_pad|>"
    "{% elif part.type == 'video' %}<|video_pad|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}</>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_parts_that_stand_for_media(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint({"model_type": "llama"}, chat_template=OF_PARTS)
    template = class_of("hf")(folder)
    parts = [
        {"type": "text", "text": "Look: "},
        {"type": "image"},
        {"type": "video"},
        {"type": "text", "text": "What?"},
    ]
    conversation = [*turns("U", "A"), {"role": "user", "content": parts}]
    text = "<user>U</><assistant>A</><user>Look: {}<|image_pad|><|video_pad|>What?</><assistant>"
    assert template.messages2prompt(conversation) == text.format("")
    assert template.messages2prompt(conversation, numbered=True) == text.format("Picture: ")
    parts[1] = {"type": "image_url", "image_url": {"url": "a.png"}}
    assert template.messages2prompt(conversation) == text.format("")
    with pytest.raises(InvalidMessage, match="not a part that is understood"):
        template.messages2prompt([{"role": "user", "content": [{"type": "unknown"}]}])
