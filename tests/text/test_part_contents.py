"""Images in chat templates that take contents as lists of parts alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncllm import ChatTemplateConfig
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.image_marks import IMAGE_MARK, OWN_END, VIDEO_MARK
from asyncllm.text.templates.jinja_template import JinjaTemplate
from asyncllm.text.templates.part_contents import PartContents

IN_ORDER = """{% for message in messages %}{{ message.role }}:{% for part in message.content -%}
{% if part.type == 'text' %}{{ part.text }}{% elif part.type == 'image' %}<img>{% else %}<{{ part.type }}>{% endif %}
{%- endfor %};{% endfor %}"""
IMAGES_FIRST = """{% for message in messages %}{{ message.role }}: {% for part in message.content -%}
{% if part.type == 'image' %}{{ '<img>\n' }}{% endif %}{% endfor %}{% for part in message.content -%}
{% if part.type == 'text' %}{{ part.text + ' ' }}{% endif %}{% endfor %};{% endfor %}"""
NUMBERED = """{% set ns = namespace(count=0) %}{% for message in messages %}{% for part in message.content -%}
{% if part.type == 'image' %}{% set ns.count = ns.count + 1 %}<img {{ ns.count }}>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endfor %}"""
ON_DEMAND = """{% set ns = namespace(count=0) %}{% for m in messages %}{{ m.role }}:{% if m.content is string -%}
{{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'image' %}{% set ns.count = ns.count + 1 -%}
{% if numbered %}Picture {{ ns.count }}: {% endif %}<img>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif -%}
;{% endfor %}"""
TEXTS_ONLY = """{% for message in messages %}{% for part in message.content -%}
{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %};{% endfor %}"""
REFUSING = """{% for message in messages %}{% for part in message.content -%}
{% if part.type != 'text' %}{{ raise_exception('no images') }}{% endif %}{{ part.text }}{% endfor %};{% endfor %}"""


def marked(text: str) -> str:
    return text.format(image=IMAGE_MARK, video=VIDEO_MARK, end=OWN_END)


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        (IN_ORDER, "see {image} and {image}", "user:see {image}<img>{end} and {image}<img>{end};"),
        (IN_ORDER, "{video}, {image}", "user:{video}<video>{end}, {image}<img>{end};"),
        (IN_ORDER, "see nothing, <img>", "user:see nothing, <img>;"),
        (IN_ORDER, "see <img> {image}", "user:see <img> <img>;"),
        (IMAGES_FIRST, "see {image}", "user: {image}<img>\n{end}see  ;"),
        (NUMBERED, "see {image}", "see {image}<img 1>{end}"),
        (NUMBERED, "{image}{image}", "<img 1><img 2>"),
        (TEXTS_ONLY, "see {image}", "see {image};"),
        (REFUSING, "see {image}", "see {image};"),
    ],
)
def test_marks_stand_where_the_template_writes(source: str, content: str, expected: str) -> None:
    contents = PartContents(JinjaTemplate(source, {}, "here"))
    messages: list[dict[str, Any]] = [{"role": "user", "content": marked(content)}]
    assert contents.render(messages, add_generation_prompt=False, variables={}) == marked(expected)


def test_a_template_of_parts_is_told_from_others(tmp_path: Path) -> None:
    messages: Any = [{"role": "user", "content": marked("see {image}")}]
    for source, expected in ((IN_ORDER, "user:see {image}<img>{end};"), ("{{ messages[0].content }}", "see {image}")):
        template = ChatTemplate.open(tmp_path, ChatTemplateConfig(chat_template=source))
        assert template.render(messages) == marked(expected)


def test_variables_change_what_is_written_for_an_image(tmp_path: Path) -> None:
    """Qwen-VL's add_vision_id."""
    template = ChatTemplate.open(tmp_path, ChatTemplateConfig(chat_template=ON_DEMAND))
    messages: Any = [
        {"role": "user", "content": marked("see {image} and {image}")},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": marked("{image}?")},
    ]
    plain = "user:see {image}<img>{end} and {image}<img>{end};assistant:Two.;user:{image}<img>{end}?;"
    numbered = (
        "user:see Picture 1: {image}<img>{end} and Picture 2: {image}<img>{end};assistant:Two.;"
        "user:Picture 3: {image}<img>{end}?;"
    )
    assert template.render(messages) == template.render(messages, variables={"numbered": False}) == marked(plain)
    assert template.render(messages, variables={"numbered": True}) == marked(numbered)
    assert template.render([*messages[1:2], {"role": "user", "content": "x"}], variables={"numbered": True}) == (
        "assistant:Two.;user:x;"
    )
