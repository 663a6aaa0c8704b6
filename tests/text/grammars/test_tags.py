"""Structural tags as XGrammar, vLLM and SGLang spell them: what they allow, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncllm.config.structured_output.response_format import grammar_of
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


TRIP: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where to."},
        "days": {"type": "integer"},
        "kind": {"enum": ["train", "bus"]},
        "via": {"$ref": "#/$defs/via"},
    },
    "required": ["city", "kind"],
    "$defs": {"via": {"type": "array", "items": {"type": "string"}}},
}


def parameters(style: str, schema: Any = TRIP) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema, "style": style}


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
    ({"type": "optional", "content": text("x")}, ["", "x"], ["xx"]),
    ({"type": "plus", "content": text("x")}, ["x", "xxx"], [""]),
    ({"type": "star", "content": {"type": "or", "elements": [text("x"), text("yz")]}}, ["", "x", "xyzx"], ["y"]),
    ({"type": "repeat", "min": 1, "max": 3, "content": text("x")}, ["x", "xxx"], ["", "xxxx"]),
    ({"type": "repeat", "min": 2, "max": -1, "content": text("x")}, ["xx", "xxxxx"], ["x"]),
    ({"type": "repeat", "min": 0, "max": 0, "content": text("x")}, [""], ["x"]),
    (
        {"type": "tag", **BOLD, "content": {"type": "optional", "content": ANY}},
        ["<b></b>", "<b>x</b>"],
        ["<b>x", "x</b>"],
    ),
    (
        {
            "type": "sequence",
            "elements": [
                {"type": "grammar", "grammar": 'root ::= "yes" | "no" more\nmore ::= "!"+'},
                {"type": "grammar", "grammar": 'start: "," more\nmore: /[0-9]+/'},
            ],
        },
        ["yes,12", "no!!,1"],
        ["no,1", "yes", "yes,"],
    ),
    (
        {
            "type": "dispatch",
            "rules": [["<b>", text("bold</b>")], ["<i>", text("it</i>")]],
            "excludes": ["</end>"],
        },
        ["", "plain", "a <b>bold</b> b <i>it</i><b>bold</b> c"],
        ["a <b>x", "a <b>x <i>it</i>", "a </end>", "<i>it"],
    ),
    (
        {"type": "dispatch", "rules": [["<b>", text("bold")]], "loop": False},
        ["", "plain", "a <b>bold"],
        ["<b>bold ", "<b>"],
    ),
    # What XGrammar's own classes write.
    (
        {"type": "json_schema", "json_schema": CITY, "style": "json", "any_order": False, "max_whitespace_cnt": 0},
        ['{"city":"Bonn"}'],
        ['{"city": "Bonn"}', '{ "city":"Bonn"}'],
    ),
    ({**ANY, "excludes": [], "max_tokens": None, "max_chars": None}, ["", "x"], []),
    # A special token is one token, not its spelling.
    (
        {
            "type": "tag",
            "begin": {"type": "token", "token": "<|im_start|>"},
            "content": {"type": "any_tokens"},
            "end": {"type": "token", "token": 5},
        },
        ["<|im_start|>some words<|im_start|>and more<|image|>", "<|im_start|><|image|>"],
        ["<|im_start|>some words", "some words"],
    ),
    (
        {"type": "sequence", "elements": [text("a"), {"type": "token", "token": 3}, text("b")]},
        ["a<|im_start|>b"],
        ["ab", "a<|im_start|>"],
    ),
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
        ({"type": "json_schema", "json_schema": CITY, "style": "cohere_xml"}, "cohere_xml"),
        ({"type": "json_schema", "json_schema": CITY, "any_order": True}, "any_order"),
        ({"type": "any_text", "max_tokens": 5}, "max_tokens"),
        ({"type": "any_tokens", "max_tokens": 5}, "max_tokens"),
        ({"type": "exclude_token", "exclude_tokens": [5]}, "exclude_token"),
        ({"type": "repeat", "min": 3, "max": 2, "content": text("x")}, "`max` is less"),
        ({"type": "repeat", "min": -1, "max": 2, "content": text("x")}, "min"),
        ({"type": "repeat", "min": 0, "max": 10**9, "content": text("x")}, "max"),
        ({"type": "star", "content": ANY}, "without an end"),
        ({"type": "sequence", "elements": [{"type": "optional", "content": ANY}, text("a")]}, "only the last"),
        ({"type": "dispatch", "rules": []}, "is empty"),
        ({"type": "dispatch", "rules": [["", text("a")]]}, "no trigger"),
        ({"type": "dispatch", "rules": [["a", ANY]]}, "no `end`"),
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
        {"type": "grammar", "grammar": 'root ::= "a'},
        {"type": "grammar", "grammar": 'start: "a" rest'},
        {"type": "token", "token": "<|nothing|>"},
        {"type": "token", "token": 10**6},
        {"type": "tag", "begin": "a", "content": {"type": "any_tokens"}, "end": "b"},
        parameters("qwen_xml", {"type": "object", "properties": {"a b": {}}}),
        parameters("qwen_xml", {"type": "object", "properties": {"a": {"type": "string", "pattern": "b"}}}),
        parameters("qwen_xml", {"anyOf": [CITY, {}]}),
        parameters("glm_xml", {"type": "array"}),
        text("\ud800"),
    ],
)
def test_broken_parts_are_refused(compiler: GrammarCompiler, form: Any) -> None:
    with pytest.raises(InvalidParameter, match=r"response_format|The grammar is not valid") as caught:
        compiler.compile(spec_of({"type": "structural_tag", "format": form}), spaced=False)
    assert caught.value.param == "response_format"


STYLES = {
    "qwen_xml": ("<parameter={}>", "</parameter>"),
    "minimax_xml": ('<parameter name="{}">', "</parameter>"),
    "glm_xml": ("<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>"),
    "deepseek_xml": ('<｜DSML｜parameter name="{}" string="', "</｜DSML｜parameter>"),
}


@pytest.mark.parametrize("style", STYLES)
def test_parameters_one_by_one(compiler: GrammarCompiler, style: str) -> None:
    spec = spec_of({"type": "structural_tag", "format": {**BOLD, "type": "tag", "content": parameters(style)}})

    def written(*pairs: tuple[str, str], between: str = "\n") -> str:
        head, closer = STYLES[style]
        mark = {"city": 'true">', "kind": 'true">'} if style == "deepseek_xml" else {}
        other = 'false">' if style == "deepseek_xml" else ""
        each = [f"{head.format(key)}{mark.get(key, other)}{value}{closer}" for key, value in pairs]
        return f"<b>{between}{between.join(each)}{between}</b>"

    city, kind = ("city", "New\nYork, {'<b>'}"), ("kind", "bus")
    right = [
        written(city, kind),
        written(city, kind, between=""),
        written(city, ("days", "12"), kind, ("via", '["Bonn", "Köln"]')),
    ]
    wrong = [
        written(city),
        written(kind, city),
        written(city, ("days", "soon"), kind),
        written(city, ("kind", "car")),
        written(city, kind, ("via", "Bonn")),
        written(city, kind, ("other", "x")),
        written(city, kind, city),
    ]
    assert [each for each in right if not takes(compiler, spec, each)] == []
    assert [each for each in wrong if takes(compiler, spec, each)] == []


def test_the_older_name_of_qwens_parameters_is_the_same() -> None:
    old = {"type": "qwen_xml_parameter", "json_schema": TRIP}
    specs = [spec_of({"type": "structural_tag", "format": form}) for form in (old, parameters("qwen_xml"))]
    assert specs[0] == specs[1]
