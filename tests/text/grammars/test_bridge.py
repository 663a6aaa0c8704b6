"""Grammars as the bridge makes them: what they allow, what is refused, and how soon."""

from __future__ import annotations

import json
import random
import re
import time
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import asyncllm
from asyncllm.config.structured_output.response_format import GrammarSpec, as_response_format, grammar_of
from asyncllm.errors import InvalidParameter, UnsupportedFeature
from asyncllm.text.grammars.bridge import AnswerGrammar, GrammarCompiler, GrammarStart
from asyncllm.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_folder(Path(asyncllm.__file__).parent / "assets" / "tiny-chat")
VOCAB = TOKENIZER.vocab_size + 3
"""More rows than the tokenizer has tokens, as models have."""
EOS = list(TOKENIZER.eos_token_ids)
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Sky(Enum):
    CLEAR = "clear"
    RAIN = "rain"


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, VOCAB, EOS)


def spec_of(response_format: Any) -> GrammarSpec:
    spec = grammar_of(response_format)
    assert spec is not None
    return spec


def schema_spec(schema: Any) -> GrammarSpec:
    return spec_of({"type": "json_schema", "json_schema": {"schema": schema}})


def takes(compiler: GrammarCompiler, spec: GrammarSpec, text: str, *, spaced: bool = False) -> bool:
    """Whether the grammar takes the text as a whole answer, token by token, by its masks."""
    grammar = AnswerGrammar(compiler.compile(spec, spaced=spaced), GrammarStart())
    progress = grammar.start(())
    words = np.zeros(-(-VOCAB // 32), np.int32)
    for token in [*TOKENIZER.encode(text, add_bos=False), EOS[0]]:
        progress.fill(words)
        if not words.view(np.uint32)[token // 32] >> np.uint32(token % 32) & 1:
            return False
        progress.consume(token)
        assert progress.error is None
    return True


@pytest.mark.parametrize(
    ("response_format", "good", "bad"),
    [
        ({"type": "json_schema", "json_schema": {"schema": PERSON}}, '{"name": "Zoë", "age": 3}', '{"name": "Zoë"}'),
        ({"type": "json_schema", "schema": PERSON}, '{"name":"x","age":3}', '{"name": 1, "age": 3}'),
        ({"type": "json_schema", "json_schema": {"json_schema": json.dumps(PERSON)}}, '{"name":"x","age":3}', "{}"),
        ({"type": "json_object"}, '{"a": [1, null]}', "[1]"),
        ({"type": "json_object", "schema": PERSON}, '{"name":"x","age":3}', '{"a": 1}'),
        ({"type": "regex_schema", "regex_schema": "[0-9]{2}"}, "42", "421"),
        ({"type": "regex", "regex": "a|b+"}, "bb", "ab"),
        ({"type": "choice", "choice": ["yes (1)", "n\\o.\n"]}, "n\\o.\n", "no"),
        ({"type": "grammar", "grammar": 'start: "a" /[bc]/'}, "ac", "ad"),
        ({"type": "grammar", "grammar": 'root ::= "a" [bc]'}, "ab", "ad"),
    ],
)
def test_an_answer_is_what_was_asked_for(compiler: GrammarCompiler, response_format: Any, good: str, bad: str) -> None:
    spec = spec_of(response_format)
    assert takes(compiler, spec, good)
    assert not takes(compiler, spec, bad)


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        (json.dumps({"name": "x", "age": 3}), True),
        (json.dumps({"name": "x", "age": 3}, indent=2), True),
        (json.dumps({"name": "x", "age": 3}, indent="\t"), True),
        ('{"name":  "x", "age": 3}', False),
        ('{\n\n"name": "x", "age": 3}', False),
        ('{"name": "\\u00e9", "age": 3}', True),
        (' {"name": "x", "age": 3}', False),
    ],
)
def test_white_space_is_bounded(compiler: GrammarCompiler, text: str, taken: bool) -> None:
    assert takes(compiler, schema_spec(PERSON), text) is taken


def test_an_answer_behind_reasoning_may_begin_with_white_space(compiler: GrammarCompiler) -> None:
    for spaces, taken in (("", True), ("\n\n", True), (" ", True), ("\n\n\n", False)):
        assert takes(compiler, schema_spec(PERSON), spaces + '{"name": "x", "age": 3}', spaced=True) is taken
        assert takes(compiler, spec_of({"type": "choice", "choice": ["yes"]}), spaces + "yes", spaced=True) is taken


def test_masks_are_those_of_trying_each_token(compiler: GrammarCompiler) -> None:
    random.seed(7)
    compiled = compiler.compile(schema_spec(PERSON), spaced=False)
    words = np.zeros(-(-VOCAB // 32), np.int32)
    matcher, taken = compiled.copy(), list[int]()
    for _ in range(12):
        progress = AnswerGrammar(compiled, GrammarStart()).start(taken)
        progress.fill(words)
        allowed = set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())
        tried = {token for token in range(VOCAB) if matcher.validate_tokens([token]) == 1}
        assert allowed <= tried
        if allowed != tried:
            # Where only one text can follow, it is spelled as the tokenizer would.
            forced = max(map(TOKENIZER.token_bytes, tried), key=len)
            assert all(forced.startswith(TOKENIZER.token_bytes(token)) for token in tried)
        token = random.choice(sorted(allowed))
        assert matcher.consume_token(token)
        taken.append(token)


def refused(words: NDArray[np.int32]) -> set[int]:
    """The tokens that may not come."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: TOKENIZER.vocab_size]
    return set(np.flatnonzero(bits == 0).tolist())


def test_reasoning_is_free_and_what_follows_is_held(compiler: GrammarCompiler) -> None:
    opens, closes = 5, 6
    compiled = compiler.compile(spec_of({"type": "regex", "regex": "ab"}), spaced=False)
    words = np.zeros(-(-VOCAB // 32), np.int32)
    inside = AnswerGrammar(compiled, GrammarStart(inside=True, closes=closes)).start(())
    inside.fill(words)
    assert refused(words) == set(EOS)
    assert not inside.ended
    inside.consume(TOKENIZER.encode("x", add_bos=False)[0])
    inside.consume(closes)
    inside.fill(words)
    assert not (words == -1).any()
    maybe = AnswerGrammar(compiled, GrammarStart(opens=opens, closes=closes)).start(())
    maybe.fill(words)
    assert words[0] >> opens & 1
    maybe.consume(opens)
    maybe.fill(words)
    assert refused(words) == set(EOS)
    again = AnswerGrammar(compiled, GrammarStart(opens=opens, closes=closes)).start([opens, 9, closes])
    again.fill(words)
    assert not words[0] >> opens & 1
    called = AnswerGrammar(compiled, GrammarStart(inside=True, closes=closes, begins=TOKENIZER.token_id("a")))
    progress = called.start(TOKENIZER.encode("xa", add_bos=False))
    assert progress.error is None
    progress.fill(words)
    assert TOKENIZER.vocab_size - len(refused(words)) < 9


def test_where_an_answer_cannot_go_on_no_token_is_allowed(compiler: GrammarCompiler) -> None:
    progress = AnswerGrammar(compiler.compile(schema_spec(PERSON), spaced=False), GrammarStart()).start(())
    words = np.full(-(-VOCAB // 32), -1, np.int32)
    progress.consume(TOKENIZER.encode("x", add_bos=False)[0])
    assert progress.error is not None
    progress.fill(words)
    assert not words.any()


def test_the_text_of_a_grammar_gives_the_same_masks(compiler: GrammarCompiler) -> None:
    first = compiler.compile(schema_spec(PERSON), spaced=True)
    second = compiler.compile(schema_spec(PERSON), spaced=True)
    assert first.text.number != second.text.number
    again = compiler.compile(first.text.spec, spaced=first.text.spaced, tried=True)
    answer = TOKENIZER.encode(' {"name": "A', add_bos=False)
    masks = []
    for compiled in (first, again):
        words = np.zeros(-(-VOCAB // 32), np.int32)
        AnswerGrammar(compiled, GrammarStart()).start(answer).fill(words)
        masks.append(words.tolist())
    assert masks[0] == masks[1]
    assert any(masks[0])


UNSUPPORTED: list[tuple[Any, str]] = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "string", "not": {"pattern": "a"}}, "not"),
    ({"type": "object", "if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}}, "if"),
    ({"type": "array", "contains": {"const": 1}}, "contains"),
    ({"type": "string", "not": {"type": "string"}}, "Unsatisfiable|no text"),
    ({"type": "string", "format": "regex"}, "regex"),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "cases of a oneOf may overlap"),
    ({"$ref": "http://example.com/schema"}, "not present"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
    ({"$ref": "#"}, "response_format"),
    ({"allOf": [{"$id": "http://here/", "$ref": "other.json"}]}, "beside an"),
    ({"$ref": "#"}, "no text ends"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "no text ends"),
    ({"const": "\ud800"}, "surrogate"),
    ({"type": "object", "properties": {"\ud800": {}}}, "surrogate"),
    ({"type": "number", "maximum": float("inf")}, "number"),
    ({"type": "integer", "maximum": 2**1024 - 1}, "number"),
    ({"type": "number", "multipleOf": 1e-300}, "multipleOf"),
    ({"type": "array", "minItems": 5, "maxItems": 2}, "Unsatisfiable"),
    (False, "response_format"),
    ({"allOf": [{"anyOf": [{"required": [f"{n}a"]}, {"required": [f"{n}b"]}]} for n in range(14)]}, "response_format"),
]


@pytest.mark.parametrize(("schema", "word"), UNSUPPORTED, ids=range(len(UNSUPPORTED)))
def test_what_cannot_be_held_to_is_refused_at_once(compiler: GrammarCompiler, schema: Any, word: str) -> None:
    begun = time.process_time()
    with pytest.raises(InvalidParameter, match=word) as caught:
        compiler.compile(schema_spec(schema), spaced=False)
    assert caught.value.param == "response_format"
    assert time.process_time() - begun < 1
    assert "0x" not in str(caught.value)


def deep(levels: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def doubled(times: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(times):
        schema = {"anyOf": [{"type": "array", "items": schema}, {"type": "object", "properties": {"a": schema}}]}
    return schema


TOO_LARGE: list[Any] = [
    {"enum": [str(number) for number in range(100_000)]},
    {"type": "object", "properties": {f"p{number}": {} for number in range(2000)}},
    {"const": "x" * 65_536},
    {"description": "x" * 10_000_000},
    deep(100_000),
    {"anyOf": [{"const": number} for number in range(30_000)]},
    {"const": "x" * 1_000_000},
    {"type": "integer", "multipleOf": 999_983},
    {"type": "integer", "maximum": 10**5000},
    {"type": "number", "multipleOf": 12.3457},
    {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (97, 89, 83, 79)]},
    doubled(12),
    {1: {}},
    "{",
    5,
    None,
]


@pytest.mark.parametrize("schema", TOO_LARGE, ids=range(len(TOO_LARGE)))
def test_what_is_too_large_is_not_even_compiled(schema: Any) -> None:
    begun = time.process_time()
    with pytest.raises(InvalidParameter, match="response_format"):
        schema_spec(schema)
    assert time.process_time() - begun < 0.5


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "regex", "regex": "x" * 5000},
        {"type": "regex"},
        {"type": "choice", "choice": []},
        {"type": "choice", "choice": ["x"] * 5001},
        {"type": "grammar", "grammar": "x" * 17_000},
        {"type": "structural_tag"},
        {},
    ],
)
def test_other_formats_have_bounds_too(response_format: Any) -> None:
    with pytest.raises((InvalidParameter, UnsupportedFeature)) as caught:
        grammar_of(response_format)
    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "regex", "regex": "(a"},
        {"type": "regex", "regex": "(?=a)b"},
        {"type": "grammar", "grammar": "start: missing"},
        {"type": "grammar", "grammar": "root ::= ("},
        {"type": "grammar", "grammar": 'root ::= root "a"'},
        {"type": "grammar", "grammar": "start: <[99999999]>"},
        {"type": "grammar", "grammar": 'start: "\ud800"'},
        {"type": "regex", "regex": r"[^\s\S]"},
        {"type": "regex", "regex": "\ud800"},
        {"type": "choice", "choice": ["\ud800"]},
    ],
)
def test_broken_patterns_are_refused(compiler: GrammarCompiler, response_format: Any) -> None:
    with pytest.raises(InvalidParameter, match=r"response_format|GBNF"):
        compiler.compile(spec_of(response_format), spaced=False)


def test_a_rule_that_is_missing_is_named(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidParameter, match="'number' not found"):
        compiler.compile(spec_of({"type": "grammar", "grammar": "root ::= number"}), spaced=False)


HEAVY: list[Any] = [
    {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(1000)}},
    {"type": "string", "enum": [f"item {number}" for number in range(5000)]},
    {"type": "string", "const": "x" * 4000},
    {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
    {"type": "string", "minLength": 10**9},
    {"type": "integer", "multipleOf": 19_997},
    {"properties": {f"p{place}": {"type": "number", "multipleOf": 10.0**-place} for place in range(9)}},
    {"allOf": [{"type": "number", "multipleOf": 0.25}, {"multipleOf": 150}]},
    {"type": "string", "pattern": "^(([a-z]{1,50}){1,50}){1,50}$"},
    {"type": "string", "pattern": "^(a|aa|a?)+b$"},
    doubled(8),
    {"type": "regex", "regex": ".*a.{200}"},
    {"type": "regex", "regex": r"\p{L}{1000}"},
    {"type": "regex", "regex": "((a{1,100}){1,100}){1,100}"},
    {"type": "regex", "regex": "(a+)+b"},
    {"type": "regex", "regex": "a\0b"},
    {"type": "grammar", "grammar": 'root ::= root "a" | "b"'},
    {"type": "grammar", "grammar": "start: " + " | ".join(f'"{number}"' for number in range(1500))},
    {"type": "grammar", "grammar": 'start: %json {"type": "array", "minItems": 1000000}'},
]
"""What looks as if it took long, or for ever."""


@pytest.mark.parametrize("asked", HEAVY, ids=range(len(HEAVY)))
def test_what_is_heavy_is_held_to_in_no_time(compiler: GrammarCompiler, asked: Any) -> None:
    spec = spec_of(asked) if asked.get("type") in ("regex", "grammar") else schema_spec(asked)
    begun = time.process_time()
    progress = AnswerGrammar(compiler.compile(spec, spaced=False), GrammarStart()).start(())
    dice, words = random.Random(7), np.zeros(-(-VOCAB // 32), np.int32)
    for _ in range(60):
        progress.fill(words)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        if progress.ended or progress.error is not None or not len(allowed):
            break
        progress.consume(int(dice.choice(allowed)))
    assert time.process_time() - begun < 1


def test_options_of_the_library_are_not_the_clients(compiler: GrammarCompiler) -> None:
    schema = {**PERSON, "x-guidance": {"lenient": True, "whitespace_flexible": False}, "uniqueItems": True}
    with pytest.raises(InvalidParameter, match="uniqueItems"):
        compiler.compile(schema_spec({"type": "array", **schema}), spaced=False)


def test_nullable_allows_null(compiler: GrammarCompiler) -> None:
    spec = schema_spec({"type": "integer", "nullable": True})
    assert takes(compiler, spec, "null")
    assert takes(compiler, spec, "3")


def test_the_decimals_of_pydantic_are_held_to_their_pattern(compiler: GrammarCompiler) -> None:
    """It has a look-ahead, which grammars have not."""
    pattern = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
    spec = schema_spec({"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": pattern}]})
    for text in ("true", '"3"', '"-0.5"', '"+.5"', '"12."', '"0012.50"'):
        assert takes(compiler, spec, text), text
        assert text == "true" or re.match(pattern, text.strip('"'))
    for text in ('""', '"-"', '"."', '"-.+"', '"1.2.3"', '"a"'):
        assert not takes(compiler, spec, text), text


@pytest.mark.parametrize(
    ("tail", "good", "bad"),
    [
        (r"(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)", ("0", "-123.45", "007.1"), ("1234", "1.234")),
        (r"(?:\d{0,0}|(?=[\d.]{1,3}0*$)\d{0,0}\.\d{0,2}0*$)", ("0", "0.25", ".5"), ("1.5", "0.123")),
        (r"(?:\d{0,3}|(?=[\d.]{1,4}0*$)\d*\.\d*0*$)", ("123", "1.25", "12.5", ".123"), ("1234", "12.34")),
        (r"\d*\.?\d{0,2}0*$", ("123456", "1.25", "+.5"), ("1.234", ".", "")),
    ],
)  # fmt: skip
def test_decimals_have_the_digits_that_pydantic_allows(
    compiler: GrammarCompiler, tail: str, good: tuple[str, ...], bad: tuple[str, ...]
) -> None:
    pattern = r"^(?!^[-+.]*$)[+-]?0*" + tail
    spec = schema_spec({"type": "string", "pattern": pattern})
    for text in good:
        assert re.match(pattern, text)
        assert takes(compiler, spec, f'"{text}"'), text
    for text in bad:
        assert not takes(compiler, spec, f'"{text}"'), text


def test_what_stands_at_no_schemas_place_is_left(compiler: GrammarCompiler) -> None:
    literal = {"format": "odd", "x-guidance": 1, "nullable": True, "type": "string"}
    schema = {
        "type": "object",
        "properties": {"format": {"const": literal}, "nullable": True, "type": {"type": "string", "format": "int32"}},
        "required": ["format", "type"],
        "additionalProperties": False,
    }
    answer = {"format": literal, "type": "text"}
    assert takes(compiler, schema_spec(schema), json.dumps(answer))
    del literal["nullable"]
    assert not takes(compiler, schema_spec(schema), json.dumps({**answer, "format": {**literal, "nullable": False}}))


def test_objects_that_name_their_properties_have_no_others(compiler: GrammarCompiler) -> None:
    point = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    for schema in (point, {"$defs": {"p": point}, "$ref": "#/$defs/p"}, {"anyOf": [point]}):
        assert takes(compiler, schema_spec(schema), '{"x": 1}')
        assert not takes(compiler, schema_spec(schema), '{"x": 1, "y": 2}')
    nested = {"type": "object", "properties": {"p": point}}
    assert not takes(compiler, schema_spec(nested), '{"p": {"x": 1, "y": 2}}')
    for more in ({"additionalProperties": True}, {"patternProperties": {"^y$": {}}}, {"required": ["y"]}):
        assert takes(compiler, schema_spec({**point, **more}), '{"x": 1, "y": 2}')
    other = {"properties": {"y": {"type": "integer"}}}
    for two in (
        {"allOf": [other, point]},
        {**other, "anyOf": [point]},
        {"$defs": {"p": point}, **other, "$ref": "#/$defs/p"},
    ):
        assert takes(compiler, schema_spec(two), '{"y": 2, "x": 1}'), two


@pytest.mark.parametrize("pattern", ["^score$", "^(score|tag)$", "^(?:score)$"])
def test_patterns_of_names_are_properties(compiler: GrammarCompiler, pattern: str) -> None:
    spec = schema_spec(
        {
            "properties": {"score": {"type": "integer"}, "name": {"type": "string"}},
            "required": ["score"],
            "patternProperties": {pattern: {"minimum": 5}},
            "additionalProperties": False,
        }
    )
    progress = AnswerGrammar(compiler.compile(spec, spaced=False), GrammarStart()).start(())
    for token in TOKENIZER.encode('{"score": 7, "name": "a"', add_bos=False):
        progress.consume(token)
    words = np.zeros(-(-VOCAB // 32), np.int32)
    progress.fill(words)
    assert progress.error is None
    allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB])
    assert ("," in {TOKENIZER.decode([int(token)]).strip() for token in allowed}) is ("tag" in pattern)
    assert takes(compiler, spec, '{"score": 7}')
    assert not takes(compiler, spec, '{"score": 3}')


def test_formats_of_other_standards_are_notes(compiler: GrammarCompiler) -> None:
    for name in ("password", "int32", "path", "binary"):
        assert takes(compiler, schema_spec({"type": "string", "format": name, "maxLength": 3.0}), '"abc"')
    assert not takes(compiler, schema_spec({"type": "string", "format": "date", "maxLength": 20.0}), '"abc"')


def test_kinds_told_apart_by_a_tag(compiler: GrammarCompiler) -> None:
    """As pydantic writes a union with a discriminator whose values are defaults."""
    kinds = {
        name: {"type": "object", "properties": {"kind": {"const": name, "default": name}, name: {"type": "integer"}}}
        for name in ("cat", "dog")
    }
    tag = {"propertyName": "kind", "mapping": {name: f"#/$defs/{name}" for name in kinds}}
    schema = {"$defs": kinds, "oneOf": [{"$ref": f"#/$defs/{name}"} for name in kinds], "discriminator": tag}
    assert takes(compiler, schema_spec(schema), '{"kind": "dog", "dog": 3}')
    assert not takes(compiler, schema_spec(schema), '{"dog": 3}')
    assert not takes(compiler, schema_spec(schema), '{"kind": "bird"}')


def test_a_class_stands_for_its_schema(compiler: GrammarCompiler) -> None:
    import dataclasses

    import msgspec
    import pydantic

    made = [
        dataclasses.make_dataclass("Point", [("x", int)]),
        msgspec.defstruct("Point", [("x", int)]),
        pydantic.create_model("Point", x=(int, ...)),
    ]
    for kind in made:
        spec = spec_of(as_response_format(kind))
        assert takes(compiler, spec, '{"x": 3}')
        assert not takes(compiler, spec, '{"x": "3"}')
    assert takes(compiler, spec_of(as_response_format(list[made[0]])), '[{"x": 3}]')  # type: ignore[valid-type]
    assert takes(compiler, spec_of(as_response_format(Sky)), '"rain"')
    assert not takes(compiler, spec_of(as_response_format(Sky)), '"snow"')
    with pytest.raises(InvalidParameter, match="Driver"):
        as_response_format(type("Driver", (), {}))


def test_a_run_is_found_once_and_its_masks_are_the_grammars(compiler: GrammarCompiler) -> None:
    """Tokens of a run are looked up, and what is drawn there is what llguidance itself allows."""
    form = {
        "type": "object",
        "properties": {"reference": {"const": "as told by the station"}, "sky": {"enum": ["clear blue", "clear grey"]}},
        "required": ["reference", "sky"],
        "additionalProperties": False,
    }
    grammar = AnswerGrammar(compiler.compile(schema_spec(form), spaced=False), GrammarStart())
    hurried, plain = grammar.start(()), grammar.start(())
    known, asked = np.zeros((2, -(-VOCAB // 32)), np.int32)
    in_runs = 0
    for seed in range(200):
        run = hurried.forced()
        hurried.fill(known)
        plain.fill(asked)
        assert known.tolist() == asked.tolist()
        allowed = np.flatnonzero(np.unpackbits(known.view(np.uint8), bitorder="little"))
        if len(run) > 1:
            assert allowed.tolist() == run[:1]
            in_runs += 1
        token = int(np.random.default_rng(seed).choice(allowed))
        hurried.consume(token)
        plain.consume(token)
        assert hurried.forced()[: max(len(run) - 1, 0)] == run[1:]
        if hurried.ended:
            break
    assert hurried.ended
    assert in_runs > 10
