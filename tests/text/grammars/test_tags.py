"""Structural tags as XGrammar, vLLM and SGLang spell them: what they allow, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncllm.config.response_format import grammar_of
from asyncllm.errors import InvalidParameter
from asyncllm.text.grammars.bridge import GrammarCompiler
from tests.text.grammars.test_bridge import EOS, TOKENIZER, VOCAB, spec_of, takes

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
ANY: dict[str, Any] = {"type": "any_text"}
BOLD: dict[str, Any] = {"begin": "<b>", "content": ANY, "end": "</b>"}
CALL: dict[str, Any] = {
    "begin": "<function=weather>",
    "content": {"type": "json_schema", "json_schema": CITY},
    "end": "</function>",
}
CALLED = '<function=weather>{"city": "Bonn"}</function>'


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def triggered(**options: Any) -> dict[str, Any]:
    time = {"begin": "<function=time>", "content": text("now"), "end": ["</function>", "</f>"]}
    return {"type": "triggered_tags", "triggers": ["<function="], "tags": [CALL, {"type": "tag", **time}], **options}


def tags(**options: Any) -> dict[str, Any]:
    return {"type": "tags_with_separator", "tags": [BOLD, CALL], "separator": ", ", **options}


CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (text('a "quoted"\n/word/ é'), ['a "quoted"\n/word/ é'], ["a", ""]),
    ({"type": "json_schema", "json_schema": CITY}, ['{"city": "Bonn"}'], ["{}", CALLED]),
    ({"type": "regex", "pattern": r"[a-c]+/\d"}, ["abc/1"], ["abc", "/1"]),
    (ANY, ["", "anything\nat all", CALLED], []),
    ({"type": "any_text", "excludes": ["<b>"]}, ["", "a < b>"], ["a <b> c"]),
    (
        {"type": "sequence", "elements": [text("one "), {"type": "tag", **BOLD}, ANY]},
        ["one <b>x</b>", "one <b></b> rest <b>"],
        ["one ", "two <b>x</b>", "one <b>x"],
    ),
    (
        {"type": "or", "elements": [text("yes"), text("no"), {"type": "tag", **CALL}]},
        ["yes", "no", CALLED],
        ["y", "yesno"],
    ),
    (
        {"type": "tag", **BOLD, "end": ["</b>", "."]},
        ["<b>x</b>", "<b>x.", "<b>.", "<b></b>"],
        ["<b>x", "<b>x</b>.", "x."],
    ),
    ({"type": "tag", **BOLD, "end": ""}, ["<b>", "<b>x</b>"], ["x"]),
    (
        triggered(),
        ["", "plain < text", CALLED, f"First {CALLED} then <function=time>now</f>.", f"{CALLED}{CALLED}"],
        ["<function=", "<function=other>", "<function=weather>{}</function>", f"a {CALLED[:-1]}", "<function=time>now"],
    ),
    (triggered(at_least_one=True), [CALLED, f"{CALLED} and {CALLED}."], ["", "plain", f"a {CALLED}"]),
    (triggered(stop_after_first=True), ["", "plain", f"a {CALLED}"], [f"{CALLED} and", f"{CALLED}{CALLED}"]),
    (triggered(stop_after_first=True, at_least_one=True), [CALLED], ["", f"a {CALLED}", f"{CALLED}."]),
    (tags(), ["", CALLED, f"<b>x</b>, {CALLED}, <b></b>"], ["x", f"{CALLED},", f"{CALLED}{CALLED}"]),
    (tags(at_least_one=True), [CALLED, f"{CALLED}, {CALLED}"], ["", ", "]),
    (tags(stop_after_first=True), ["", CALLED], [f"{CALLED}, {CALLED}"]),
    (
        {"type": "tag", "begin": "<all>", "content": triggered(), "end": "</all>"},
        ["<all></all>", f"<all>a {CALLED} b</all>"],
        ["<all>", f"<all>{CALLED}", "<all></all>x", "<all><function=x></all>"],
    ),
    (
        {
            "type": "tag",
            "begin": "<all>",
            "content": {"type": "sequence", "elements": [text("a"), {"type": "or", "elements": [ANY, tags()]}]},
            "end": "</all>",
        },
        ["<all>a</all>", "<all>ab</all>", f"<all>a{CALLED}</all>"],
        ["<all>b</all>", "<all>ab"],
    ),
    # A special token is one token, not its spelling.
    (
        {"type": "triggered_tags", "triggers": ["<|im_start|>"], "tags": [{**CALL, "begin": "<|im_start|>call"}]},
        ["plain", 'a <|im_start|>call{"city": "Bonn"}</function> b'],
        ["<|im_start|>", "<|im_start|>x"],
    ),
]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, VOCAB, EOS)


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize(("form", "right", "wrong"), CASES, ids=[f"{i}-{c[0]['type']}" for i, c in enumerate(CASES)])
def test_each_form_takes_its_texts(
    compiler: GrammarCompiler, form: dict[str, Any], right: list[str], wrong: list[str], spaced: bool
) -> None:
    spec = spec_of({"type": "structural_tag", "format": form})
    assert [each for each in right if not takes(compiler, spec, each, spaced=spaced)] == []
    assert [each for each in wrong if takes(compiler, spec, each, spaced=spaced)] == []


def test_the_older_spelling_and_json_text_are_the_same() -> None:
    old = {
        "type": "structural_tag",
        "structures": [{"begin": CALL["begin"], "schema": CITY, "end": CALL["end"]}],
        "triggers": ["<function="],
    }
    form = {"type": "triggered_tags", "triggers": ["<function="], "tags": [CALL]}
    new = {"type": "structural_tag", "format": form}
    spellings = [old, new, *({"type": "structural_tag", "structural_tag": json.dumps(each)} for each in (old, new))]
    assert len({spec_of(each) for each in spellings}) == 1


def nested(levels: int) -> dict[str, Any]:
    form = text("x")
    for _ in range(levels):
        form = {"type": "sequence", "elements": [form]}
    return form


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (None, "Expected `object`"),
        ("x", "Expected `object`"),
        ({}, "missing required field `type`"),
        ({"type": "other"}, "'other'"),
        ({"type": "const_string", "value": 5}, "Expected `str`, got `int`"),
        ({"type": "const_string"}, "missing required field `value`"),
        ({"type": "const_string", "value": "a", "x": 1}, "unknown field `x`"),
        ({"type": "json_schema", "json_schema": {"const": "x" * 70_000}}, "response_format"),
        ({"type": "json_schema", "json_schema": CITY, "style": "qwen_xml"}, "qwen_xml"),
        ({"type": "sequence", "elements": []}, "is empty"),
        ({"type": "sequence", "elements": [ANY, text("a")]}, "only the last"),
        ({"type": "triggered_tags", "triggers": [], "tags": [CALL]}, "no trigger"),
        ({"type": "triggered_tags", "triggers": [""], "tags": [CALL]}, "no trigger"),
        ({"type": "triggered_tags", "triggers": ["<"], "tags": []}, "is empty"),
        ({"type": "triggered_tags", "triggers": ["<b"], "tags": [{**BOLD, "end": ""}]}, "no `end`"),
        ({"type": "or", "elements": [text("a")] * 1001}, "parts"),
        (nested(40), "levels"),
        (nested(500), "levels|too deep"),
        (text("x" * 70_000), "characters"),
    ],
)
def test_what_is_no_structural_tag_is_refused(form: Any, reason: str) -> None:
    with pytest.raises(InvalidParameter, match=reason) as caught:
        grammar_of({"type": "structural_tag", "format": form})
    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema", "json_schema": {"not": {}}},
        {"type": "regex", "pattern": "(a"},
        {"type": "regex", "pattern": "(?=a)b"},
        text("\ud800"),
    ],
)
def test_broken_parts_are_refused(compiler: GrammarCompiler, form: Any) -> None:
    with pytest.raises(InvalidParameter, match="response_format"):
        compiler.compile(spec_of({"type": "structural_tag", "format": form}), spaced=False)
