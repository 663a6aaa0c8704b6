"""Conversations with calls of tools, as the checkpoints' templates ask for them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from asyncllm.text.chat_template import ChatTemplate
from asyncllm.types import Message

ARGUMENTS: dict[str, Any] = {"city": "Zürich", "days": 2}
RAW = '{"city":"Zürich", "days": 2}'
CALLS = "{% for c in m.tool_calls %}<call>{{ c.function.name }}:"
END = "</call>{% endfor %}"
LOOP = "{% for m in messages %}<{{ m.role }}>"
CONTENT = "{% if m.content %}{{ m.content }}{% endif %}"
TEMPLATES = {
    "object": LOOP + CONTENT + CALLS + "{{ c.function.arguments | tojson }}" + END + "{% endfor %}",
    "items": LOOP + CONTENT + CALLS + "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}"
    + END + "{% endfor %}",
    "pairs": LOOP + CONTENT + CALLS + "{% for k, v in c.function.arguments|items %}{{ k }}={{ v }};{% endfor %}"
    + END + "{% endfor %}",
    "text": LOOP + CONTENT + CALLS + "{{ '' + c.function.arguments }}" + END + "{% endfor %}",
    "printed": LOOP + CONTENT + CALLS + "{{ c.function.arguments }}" + END + "{% endfor %}",
    "either": LOOP + CONTENT + CALLS + "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
    "{{ c.function.arguments | tojson }}{% endif %}" + END + "{% endfor %}",
    "none": LOOP + CONTENT + "{% endfor %}",
}  # fmt: skip
WRITTEN = {
    "object": '{"city": "Zürich", "days": 2}',
    "items": "city=Zürich;days=2;",
    "pairs": "city=Zürich;days=2;",
    "text": RAW,
    "printed": RAW,
    "either": RAW,
}


def conversation(arguments: Any, content: str | None = None) -> list[Message]:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
    ]


@pytest.mark.parametrize("name", TEMPLATES)
def test_arguments_of_clients_are_what_the_template_takes(checkpoint: Callable[..., Path], name: str) -> None:
    template = ChatTemplate.open(checkpoint(chat_template=TEMPLATES[name]))
    expected = f"<call>weather:{WRITTEN[name]}</call>" if name in WRITTEN else ""
    assert template.render(conversation(RAW)) == f"<user>Q<assistant>{expected}<tool>sunny"


@pytest.mark.parametrize("name", TEMPLATES)
def test_arguments_that_are_objects_are_written_as_in_transformers(checkpoint: Callable[..., Path], name: str) -> None:
    folder = checkpoint(chat_template=TEMPLATES[name])
    template = ChatTemplate.open(folder)
    text = template.render(conversation(ARGUMENTS))
    if name in ("text", "printed"):
        assert json.dumps(ARGUMENTS, ensure_ascii=False) in text
    else:
        oracle = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        assert text == oracle.apply_chat_template(conversation(ARGUMENTS), tokenize=False)


@pytest.mark.parametrize("raw", ["", "{", "[1]", '"x"', '{"a": ' + "9" * 5000 + "}", "[" * 100_000])
@pytest.mark.parametrize("name", TEMPLATES)
def test_arguments_that_are_no_object_do_not_break_a_conversation(
    checkpoint: Callable[..., Path], name: str, raw: str
) -> None:
    template = ChatTemplate.open(checkpoint(chat_template=TEMPLATES[name]))
    text = template.render(conversation(raw))
    assert raw in text or json.dumps(raw) in text or name in ("none", "pairs", "object")


@pytest.mark.parametrize(("source", "written"), [
    ("{% if m.content is none %}nothing{% else %}{{ m.content }}{% endif %}", "nothing"),
    ("{{ m.content | default('', true) }}", ""),
    ("{{ m.content }}", ""),
    ("{{ '' + m.content }}", ""),
    ("{{ m.content | trim }}", ""),
    ("{% if m.content is string %}{{ m.content }}{% else %}nothing{% endif %}", "nothing"),
])  # fmt: skip
def test_null_stays_null_where_the_template_gets_along_with_it(
    checkpoint: Callable[..., Path], source: str, written: str
) -> None:
    template = ChatTemplate.open(checkpoint(chat_template=LOOP + source + "{% endfor %}"))
    assert template.render(conversation(RAW)) == f"<user>Q<assistant>{written}<tool>sunny"
    assert template.render(conversation(RAW, "So:")) == "<user>Q<assistant>So:<tool>sunny"


def test_a_result_has_the_name_of_the_tool_that_was_called(checkpoint: Callable[..., Path]) -> None:
    template = ChatTemplate.open(checkpoint(chat_template=LOOP + "{{ m.name or '' }}{% endfor %}"))
    assert template.render(conversation(RAW)) == "<user><assistant><tool>weather"
    named: list[Message] = [
        *conversation(RAW)[:2],
        {"role": "tool", "content": "", "name": "mine", "tool_call_id": "call_1"},
    ]
    assert template.render(named) == "<user><assistant><tool>mine"
    assert template.render(conversation(RAW)[2:]) == "<tool>"


def test_calls_of_any_shape_are_left_to_the_template(checkpoint: Callable[..., Path]) -> None:
    template = ChatTemplate.open(checkpoint(chat_template=LOOP + "{{ m.tool_calls | tojson }}{% endfor %}"))
    for calls in ([5], ["x"], [{}], [{"function": 5}], [{"function": {}}], [{"id": 5, "function": {"name": 5}}]):
        text = template.render([{"role": "assistant", "content": "", "tool_calls": calls}], add_generation_prompt=False)
        assert text == "<assistant>" + json.dumps(calls)


@pytest.mark.parametrize("missing", [{}, {"arguments": None}])
def test_a_call_without_arguments_has_none(checkpoint: Callable[..., Path], missing: dict[str, Any]) -> None:
    """For templates that iterate over them, too."""
    written = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% for k, v in "
    written += "c.function.arguments.items() %}{{ k }}{{ v }}{% endfor %};{% endfor %}{% endfor %}"
    template = ChatTemplate.open(checkpoint(chat_template=written))
    called = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "now", **missing}}]}]
    assert template.render(called, add_generation_prompt=False) == "now;"


def test_ids_are_short_where_the_template_takes_no_others(checkpoint: Callable[..., Path]) -> None:
    """As Mistral's do. The id of a result is its call's, and an id of the right form stays."""
    checked = "{% if c.id|length != 9 %}{{ raise_exception('nine') }}{% endif %}{{ c.id }}"
    source = LOOP + CALLS + checked + END + "{% if m.role == 'tool' %}{{ m.tool_call_id }}{% endif %}{% endfor %}"
    template = ChatTemplate.open(checkpoint(chat_template=source))
    rendered = [template.render(conversation(RAW))]
    own = conversation(RAW)
    own[1]["tool_calls"][0]["id"] = own[2]["tool_call_id"] = "aB3dE6gH9"
    rendered.append(template.render(own))
    found = [re.fullmatch(r"<user><assistant><call>weather:(\w{9})</call><tool>(\w{9})", text) for text in rendered]
    assert all(match is not None and match[1] == match[2] for match in found), rendered
    assert rendered[1].endswith("<tool>aB3dE6gH9")
    other = conversation(RAW)
    other[1]["tool_calls"][0]["id"] = "call_2"
    assert template.render(other) != rendered[0]
