"""Which format is chosen for a checkpoint, and what its special tokens are."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from asyncllm.errors import InvalidParameter
from asyncllm.text.replies.events import Text, Thought
from asyncllm.text.replies.formats import (
    ALIASES,
    REASONING_PARSERS,
    TEMPLATE_SIGNS,
    THINKING_SIGNS,
    TOOL_PARSERS,
    reply_format,
)
from asyncllm.text.replies.reply import Reply, ReplyFormat, Thinking
from asyncllm.text.tokenizer import Tokenizer


@pytest.mark.parametrize(("signs", "form"), TEMPLATE_SIGNS, ids=lambda each: getattr(each, "name", str(each)))
def test_a_template_shows_its_format(signs: tuple[str, ...], form: object) -> None:
    assert reply_format(" and ".join(signs), None).tools is form


@pytest.mark.parametrize(("signs", "thinking"), THINKING_SIGNS)
def test_a_template_shows_what_stands_around_reasoning(signs: tuple[str, ...], thinking: Thinking) -> None:
    assert reply_format(f"{{{{ '{' '.join(signs)}' }}}}", None).thinking == thinking


def test_names_go_before_the_template() -> None:
    template = "<tool_call></think>"
    chosen = reply_format(template, None, tool_parser="mistral", reasoning="magistral")
    assert (chosen.tools, chosen.thinking) == (TOOL_PARSERS["mistral"], REASONING_PARSERS["magistral"])
    none = reply_format(template, None, tool_parser="none", reasoning="none")
    assert (none.tools, none.thinking, none.splits) == (None, None, False)
    assert len(TOOL_PARSERS) == len({form.name for form in TOOL_PARSERS.values()}) + sum(map(len, ALIASES.values()))


@pytest.mark.parametrize("field", ["tool_parser", "reasoning"])
def test_an_unknown_name_is_refused_with_those_that_there_are(field: str) -> None:
    with pytest.raises(InvalidParameter, match="Did you mean") as caught:
        reply_format(None, None, **{field: "qwen3s"})  # type: ignore[arg-type]
    assert caught.value.param in ("tool_call_parser", "reasoning_parser")


@pytest.mark.parametrize(
    ("prompt", "continued", "inside"),
    [
        ("<user>Hi<assistant><think>\n", None, True),
        ("<user>Hi<assistant><think>\n\n</think>\n\n", None, False),
        ("<user>What is <think>?<assistant>", None, False),
        ("<user>Hi<assistant><think>\nHm", "<think>\nHm", True),
        ("<user>Hi<assistant><think>\nHm", "Hm", True),
        ("<user>Hi<assistant><think>\nHm</think>Well", "Hm</think>Well", False),
        ("<user><think><assistant>Well", "Well", False),
    ],
)
def test_the_end_of_the_prompt_says_whether_reasoning_has_begun(
    prompt: str, continued: str | None, inside: bool
) -> None:
    form = ReplyFormat(None, REASONING_PARSERS["qwen3"])
    assert form.begins_inside(prompt, continued) is inside


def test_a_marker_that_is_a_special_token_counts_as_that_token_alone(tokenizer_of: Callable[..., Tokenizer]) -> None:
    tokenizer = tokenizer_of("byte_level")
    form = ReplyFormat(None, Thinking("<|im_start|>think", "<|im_end|>"), tokenizer)
    codes = {spelling: form.tokens[tokenizer.token_id(spelling) or 0] for spelling in ("<|im_start|>", "<|im_end|>")}
    reply = Reply(form)
    assert reply.push("<|im_start|>think") == [Text("<|im_start|>think")]
    assert reply.push(codes["<|im_start|>"] + "think a <|im_end|>b" + codes["<|im_end|>"]) == [Thought("a <|im_end|>b")]
    # Where it has no place it is what it is spelled as.
    assert reply.push("c" + codes["<|im_start|>"]) + reply.end() == [Text("c"), Text("<|im_start|>")]
