"""Replies are split alike, whatever the pieces that they arrive in."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from asyncllm.text.replies.events import CallStart
from asyncllm.text.replies.formats import ALIASES, TOOL_FORMATS
from asyncllm.text.replies.reply import Reply
from tests.text.replies.samples import KIMI, SAMPLES, TOOLS, Sample, events_of, form, said

NAMES = sorted(SAMPLES)


@pytest.mark.parametrize("name", NAMES)
def test_a_reply_says_what_its_model_meant(name: str) -> None:
    sample = SAMPLES[name]
    assert said(events_of(sample, [sample.raw])) == sample.said
    if not any(word in name for word in ("cut", "too few", "that is no object", "not JSON")):
        for _, arguments in sample.said.calls:
            assert isinstance(json.loads(arguments), dict)


def test_each_format_has_a_sample() -> None:
    known = {form(sample.tools, None).tools for sample in SAMPLES.values()}
    assert [each.name for each in TOOL_FORMATS if each not in known] == []
    assert set(ALIASES) <= {each.name for each in TOOL_FORMATS}


@pytest.mark.parametrize("name", NAMES)
def test_every_split_in_two_and_single_characters_give_the_same_events(name: str) -> None:
    sample = SAMPLES[name]
    whole = events_of(sample, [sample.raw])
    assert events_of(sample, list(sample.raw)) == whole
    for place in range(1, len(sample.raw)):
        assert events_of(sample, [sample.raw[:place], sample.raw[place:]]) == whole


@st.composite
def mutated(draw: st.DrawFn) -> tuple[Sample, list[str]]:
    """A reply with parts dropped, doubled and swapped, in random pieces."""
    sample = SAMPLES[draw(st.sampled_from(NAMES))]
    text = sample.raw
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(len(text), start + 20)))
        other = SAMPLES[draw(st.sampled_from(NAMES))].raw
        insert = draw(st.sampled_from(["", text[start:end] * 2, other, "<", "{", '"', "\\", "[", "\n", "</think>"]))
        text = text[:start] + insert + text[end:]
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return sample, pieces


@settings(max_examples=300, deadline=None)
@given(mutated())
def test_any_text_in_any_pieces_gives_the_same_events(case: tuple[Sample, list[str]]) -> None:
    sample, pieces = case
    whole = events_of(sample, ["".join(pieces)])
    said(whole)
    assert events_of(sample, pieces) == whole


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(NAMES), st.text(alphabet="<tool_call>{}[]\"'\\/ \nabfunctions=:,1é|", max_size=60))
def test_what_holds_no_marker_comes_back_as_it_is(name: str, text: str) -> None:
    sample = SAMPLES[name]
    assume("harmony" not in name or not re.search(r"<\||assistant", text))  # its markers and roles have these letters
    found = said(events_of(sample._replace(inside=False), list(text)))
    if not found.calls and not found.thought:
        assert found.text == text


@pytest.mark.parametrize("tools", [each.name for each in TOOL_FORMATS if each.answer is None])
def test_without_tools_calls_are_text(tools: str) -> None:
    for sample in SAMPLES.values():
        if sample.tools == tools and not sample.inside and sample.thinking is None:
            reply = Reply(form(tools, None))
            assert said(reply.push(sample.raw) + reply.end()).text == sample.raw


def test_the_second_of_two_calls_is_left_out_where_one_may_come() -> None:
    sample = SAMPLES["hermes"]
    for pieces in ([sample.raw], list(sample.raw)):
        reply = Reply(form("hermes", "qwen3"), TOOLS, max_calls=1)
        events = [event for piece in pieces for event in reply.push(piece)] + reply.end()
        assert said(events) == sample.said._replace(calls=sample.said.calls[:1])
        assert reply.over
        assert reply.num_complete == 1


@pytest.mark.parametrize("split", [lambda raw: [raw], list])
def test_line_ends_in_arguments_are_json(split: Callable[[str], list[str]]) -> None:
    """Models write code with its line ends as they are; outside a call the text stays as it is."""
    code = '{"city": "a\n\tb\\n", "tags": [\n"\u0001"]}'
    for name in ("hermes", "mistral"):
        call = f'{{"name": "weather", "arguments": {code}}}'
        marked = f"[TOOL_CALLS]weather[ARGS]{code}" if name == "mistral" else f"<tool_call>{call}</tool_call>"
        reply = Reply(form(name, None), TOOLS)
        found = said([event for piece in split(marked) for event in reply.push(piece)] + reply.end())
        [(_, arguments)] = found.calls
        assert json.loads(arguments) == {"city": "a\n\tb\n", "tags": ["\u0001"]}
    reply = Reply(form("llama3_json", None), TOOLS)
    plain = '{"name": "a\n", "other": "b\n"}'
    assert said([event for piece in split(plain) for event in reply.push(piece)] + reply.end()).text == plain


def ids(name: str, pieces: list[str]) -> list[str | None]:
    """The ids of the calls in a reply of that format, None where the model wrote none."""
    reply = Reply(form(name, None), TOOLS)
    events = [event for piece in pieces for event in reply.push(piece)] + reply.end()
    return [event.id for event in events if isinstance(event, CallStart)]


@pytest.mark.parametrize("pieces", [[KIMI], list(KIMI)])
def test_calls_have_the_ids_that_the_model_writes(pieces: list[str]) -> None:
    """Kimi's template writes a call's id in the next prompt. Two calls never have the same."""
    assert ids("kimi_k2", pieces) == ["functions.weather:0", "functions.now:1"]
    assert ids("kimi_k2", [KIMI.replace("now:1", "weather:0")]) == ["functions.weather:0", None]
    assert ids("kimi_k2", [KIMI.replace("functions.now:1", "now")]) == ["functions.weather:0", None]


@pytest.mark.parametrize("split", [lambda raw: [raw], list])
def test_mistrals_ids_of_nine_letters_or_digits_are_kept(split: Callable[[str], list[str]]) -> None:
    raw = "[TOOL_CALLS]weather[CALL_ID]{}[ARGS]{{}}[TOOL_CALLS]now[CALL_ID]{}[ARGS]{{}}"
    assert ids("mistral", split(raw.format("aB3dE6gH9", "000000001"))) == ["aB3dE6gH9", "000000001"]
    assert ids("mistral", split(raw.format("call_1", "Zürich123"))) == [None, None]
    assert ids("mistral", split(raw.format("aB3dE6gH9", "aB3dE6gH9"))) == ["aB3dE6gH9", None]


def test_a_call_without_a_name_is_of_the_only_tool() -> None:
    reply = Reply(form("kimi_k2", None), {"now": {}})
    begin, arguments, end = "tool_call_begin", "tool_call_argument_begin", "tool_call_end"
    raw = f"<|tool_calls_section_begin|><|{begin}|>0<|{arguments}|>{{}}<|{end}|><|tool_calls_section_end|>"
    assert said(reply.push(raw) + reply.end()).calls == (("now", "{}"),)


@pytest.mark.parametrize("kind", ["int", "integer", "float"])
def test_types_by_other_names_are_those_of_json(kind: str) -> None:
    reply = Reply(form("qwen3_coder", None), {"f": {"type": "object", "properties": {"x": {"type": kind}}}})
    raw = "<function=f><parameter=x>\n3\n</parameter></function>"
    assert said(reply.push(raw) + reply.end()).calls == (("f", '{"x": 3}'),)


LONG: dict[str, Any] = {
    "hermes": ('<tool_call>{"name": "f", "arguments": {"x": "', '"}}</tool_call>'),
    "hermes, held": ('<tool_call>{"arguments": {"x": "', '"}, "name": "f"}</tool_call>'),
    "qwen3_coder": ("<function=weather><parameter=city>", "</parameter></function>"),
    "mistral": ('[TOOL_CALLS]f[ARGS]{"x": "', '"}'),
}


@pytest.mark.parametrize("name", LONG)
def test_the_time_grows_with_the_length_and_no_faster(name: str) -> None:
    before, after = LONG[name]

    def seconds(size: int) -> float:
        reply = Reply(form(name.partition(",")[0], None), TOOLS)
        start = time.process_time()
        reply.push(before)
        for _ in range(size // 4):
            reply.push("ab<\\"[:3] + "c")
        reply.push(after)
        reply.end()
        assert reply.num_complete == 1
        return time.process_time() - start

    small = min(seconds(20_000) for _ in range(3))
    # Sixteen times would be quadratic.
    assert seconds(80_000) < 10 * small + 0.05


def test_thinking_is_known_as_it_goes() -> None:
    reply = Reply(form(None, "qwen3"), inside=True)
    assert reply.thinking
    reply.push("a</think>")
    assert not reply.thinking
    reply.push("b<think>")
    assert reply.thinking
