"""What comes between the turns of a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncllm.errors import InvalidMessage
from asyncllm.model import MODELS
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.types import Message
from tests.text.conversations import JINJA, turns

WRITES_THE_SPACE = (
    "llama2",
    "codellama",
    "deepseek",
    "deepseek-vl",
    "deepseek-vl2",
    "janus",
    "molmo",
    "llava-v1",
    "mini-gemini-vicuna",
    "internvl-zh",
)
"""Templates whose prompt ends with "Assistant:" or "[/INST]", so that the model itself writes the space behind it."""
CONTINUED = [
    (turns("U"), "A", turns("V")),
    ([{"role": "system", "content": "S"}, *turns("U", "A", "V")], "B\n\nC", turns("W")),
    (turns("U", "Begun"), " and ended", turns("V")),
    (turns("U"), "A", [{"role": "user", "content": "V"}, {"role": "user", "content": "W"}]),
]


@pytest.mark.parametrize(("messages", "answer", "new"), CONTINUED)
@pytest.mark.parametrize("name", [*MODELS.names(), "chatml", "trimming"])
def test_continuation_follows_the_answer(
    checkpoint: Callable[..., Path], name: str, messages: list[Message], answer: str, new: list[Message]
) -> None:
    folder = checkpoint(chat_template=JINJA.get(name))
    template = ChatTemplate.open(folder, None if name in JINJA else name)
    if name in WRITES_THE_SPACE and messages[-1]["role"] == "user":
        answer = " " + answer
    rest = template.continuation(messages, answer, new)
    assert rest is not None
    history = [*messages]
    said = answer if history[-1]["role"] == "user" else history.pop()["content"] + answer
    whole = template.render([*history, {"role": "assistant", "content": said.strip()}, *new])
    assert template.render(messages) + answer + rest == whole


def test_continuation_where_the_template_trims_answers(checkpoint: Callable[..., Path]) -> None:
    template = ChatTemplate.open(checkpoint(chat_template=JINJA["trimming"]))
    expected = "<|im_end|>\n<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n"
    assert template.continuation(turns("U"), " A \n", turns("V")) == expected
    assert template.continuation(turns("U"), "", turns("V")) == expected


def test_no_continuation_where_the_template_rewrites_history(checkpoint: Callable[..., Path]) -> None:
    source = (
        "{% for m in messages %}{{ m.role }}:{{ m.content.split('</think>')[-1] }};{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    template = ChatTemplate.open(checkpoint(chat_template=source))
    assert template.continuation(turns("U"), "plain", turns("V")) == ";user:V;assistant:"
    assert template.continuation(turns("U"), "hmm</think>done", turns("V")) is None
    last_only = "{{ messages[-1].content }}"
    assert ChatTemplate.open(checkpoint(chat_template=last_only)).continuation(turns("U"), "A", turns("V")) is None


@pytest.mark.parametrize("name", ["chatml", "trimming"])
def test_a_later_turn_of_a_jinja_template(checkpoint: Callable[..., Path], name: str) -> None:
    template = ChatTemplate.open(checkpoint(chat_template=JINJA[name]))
    later = "\n<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n"
    assert template.get_prompt("V", sequence_start=False) == later
    assert template.messages2prompt(turns("V"), sequence_start=False) == later
    assert template.messages2prompt("V") == template.get_prompt("V") == template.render(turns("V"))
    with pytest.raises(InvalidMessage, match="one user message"):
        template.messages2prompt(turns("U", "A", "V"), sequence_start=False)
