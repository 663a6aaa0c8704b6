"""Conditions in JSON schemas: what they allow is what the `jsonschema` package finds valid."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import time
from typing import Any

import jsonschema
import pytest

from asyncllm.errors import InvalidParameter
from asyncllm.text.grammars.bridge import GrammarCompiler
from tests.text.grammars.test_bridge import EOS, TOKENIZER, VOCAB, schema_spec, takes

TEXT: dict[str, Any] = {"type": "string"}
NUMBER: dict[str, Any] = {"type": "integer"}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, VOCAB, EOS)


def thing(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), **more}


def only_if(name: str, value: Any, **more: Any) -> dict[str, Any]:
    return {"if": {"properties": {name: {"const": value}}}, **more}


KINDS = {"kind": {"enum": ["x", "y", "z"]}, "v": NUMBER, "w": TEXT}
LETTERS = {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True}
NAMED = {"type": "object", "additionalProperties": NUMBER}
ZIP = {"country": TEXT, "zip": TEXT}
REFERRED = {"$defs": {"Kind": {"type": "string", "enum": ["x", "y"]}}}

CASES: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "a text": ({**TEXT, "not": {"const": "a"}}, ["b", "aa", ""], ["a"]),
    "texts": ({**TEXT, "not": {"enum": ["a.b", "ab", "é"]}}, ["a", "axb", "x\ny"], ["ab", "a.b", "é"]),
    "integers": ({**NUMBER, "not": {"enum": [0, 1, 5]}}, [-1, 2, 4, 6], [0, 1, 5]),
    "a type": ({"not": {"type": "string"}}, [1, None, [1], {"a": 1}], ["s"]),
    "a bound": ({**NUMBER, "not": {"minimum": 5}}, [4, -3], [5, 6]),
    "either": ({**TEXT, "not": {"anyOf": [{"const": "a"}, {"minLength": 3}]}}, ["b", "bb"], ["a", "bbb"]),
    "together": (
        thing({"a": TEXT, "b": TEXT}, **{"not": {"required": ["a", "b"]}}),
        [{"a": "x"}, {}],
        [{"a": "x", "b": ""}],
    ),
    "then": (
        thing(KINDS, "kind", **only_if("kind", "x", then={"required": ["v"]})),
        [{"kind": "y"}, {"kind": "x", "v": 1}],
        [{"kind": "x"}],
    ),
    "else": (
        thing(
            {"k": {"type": "boolean"}, "v": NUMBER},
            "k",
            **only_if("k", True, then={"required": ["v"]}, **{"else": {"properties": {"v": False}}}),
        ),
        [{"k": False}, {"k": True, "v": 1}],
        [{"k": True}, {"k": False, "v": 1}],
    ),
    "patterns": (
        thing(
            ZIP,
            "country",
            "zip",
            **only_if(
                "country",
                "US",
                then={"properties": {"zip": {"pattern": "^[0-9]{5}$"}}},
                **{"else": {"properties": {"zip": {"pattern": "^[A-Z]{2}$"}}}},
            ),
        ),
        [{"country": "US", "zip": "12345"}, {"country": "UK", "zip": "AB"}],
        [{"country": "US", "zip": "AB"}, {"country": "UK", "zip": "12345"}],
    ),
    "several": (
        thing(
            KINDS,
            "kind",
            allOf=[only_if("kind", "x", then={"required": ["v"]}), only_if("kind", "y", then={"required": ["w"]})],
        ),
        [{"kind": "z"}, {"kind": "x", "v": 1}, {"kind": "y", "w": "a"}],
        [{"kind": "x", "w": "a"}, {"kind": "y", "v": 1}],
    ),
    "a reference": (
        thing(
            {"k": {"$ref": "#/$defs/Kind"}, "v": NUMBER}, "k", **only_if("k", "x", then={"required": ["v"]}), **REFERRED
        ),
        [{"k": "y"}, {"k": "x", "v": 1}],
        [{"k": "x"}],
    ),
    "needed": (
        thing({"a": TEXT, "b": TEXT}, dependentRequired={"a": ["b"]}),
        [{}, {"b": "x"}, {"a": "x", "b": "y"}],
        [{"a": "x"}],
    ),
    "needed schema": (
        thing({"a": TEXT, "b": TEXT}, dependentSchemas={"a": {"properties": {"b": {"maxLength": 2}}}}),
        [{"b": "xxx"}, {"a": "x", "b": "y"}],
        [{"a": "x", "b": "yyy"}],
    ),
    "names by pattern": ({**NAMED, "propertyNames": {"pattern": "^a+$"}}, [{}, {"aa": 1}], [{"b": 1}, {"a": "x"}]),
    "names in a list": (
        {**NAMED, "propertyNames": {"$ref": "#/$defs/Kind"}, **REFERRED},
        [{}, {"x": 1, "y": 2}],
        [{"b": 1}, {"x": "x"}],
    ),
    "no others": (thing({"a": TEXT}, unevaluatedProperties=False), [{}, {"a": "x"}], [{"b": 1}]),
    "once each": (LETTERS, [[], ["a"], ["c", "a", "b"]], [["a", "a"]]),
    "once each of one": ({"type": "array", "items": TEXT, "uniqueItems": True, "maxItems": 1}, [["x"]], [["x", "y"]]),
    "as often": ({"type": "array", "items": TEXT, "uniqueItems": False}, [["x", "x"]], [1]),
    "among": (
        {"type": "array", "items": NUMBER, "contains": {"const": 3}, "maxItems": 4},
        [[3], [1, 3], [1, 2, 3, 3]],
        [[], [1], [1, 2, 3, 3, 3]],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_conditions_hold(compiler: GrammarCompiler, name: str) -> None:
    schema, good, bad = CASES[name]
    spec = schema_spec(schema)
    for value in good:
        jsonschema.validate(value, schema)
        assert takes(compiler, spec, json.dumps(value, ensure_ascii=False)), value
    for value in bad:
        assert not jsonschema.Draft202012Validator(schema).is_valid(value)
        assert not takes(compiler, spec, json.dumps(value, ensure_ascii=False)), value


def test_an_escape_is_no_way_round_a_text_that_is_excluded(compiler: GrammarCompiler) -> None:
    assert not takes(compiler, schema_spec(CASES["a text"][0]), '"\\u0061"')


@pytest.mark.parametrize("keyword", ["not", "if", "dependentRequired", "dependentSchemas", "contains"])
def test_cases_of_cases_are_refused_before_they_are_too_many(keyword: str) -> None:
    schema: Any = {"const": "x"}
    for _ in range(12 if keyword == "contains" else 32):
        condition = (
            {"a": ["b"]} if keyword == "dependentRequired" else {"required": ["a", "b"], "properties": {"c": schema}}
        )
        condition = {"a": condition} if keyword == "dependentSchemas" else condition
        schema = thing({"a": schema, "b": TEXT}, **{keyword: condition, "then": {"required": ["a"]}})
        schema = {"type": "array", "items": schema, "maxItems": 9, "contains": {}} if keyword == "contains" else schema
    begun = time.process_time()
    with contextlib.suppress(InvalidParameter):
        schema_spec(schema)
    assert time.process_time() - begun < 1


@pytest.mark.parametrize(
    "schema",
    [
        {"minimum": "a", "not": {"minimum": True}, "maximum": 3},
        {"type": "object", "required": 5, "dependentRequired": {"a": 5}, "not": {"required": 7}},
        {
            "type": ["object", {}],
            "required": [{}],
            "properties": 3,
            "if": {"required": [[]]},
            "then": {"properties": 4},
        },
        {"propertyNames": 3, "dependencies": {"a": 3}, "enum": 4, "not": {"enum": 4, "const": {}}},
        {"type": "array", "items": 3, "minItems": "a", "maxItems": 3, "uniqueItems": True, "contains": 3},
        {"allOf": {"if": 1}, "if": 3, "then": 4, "else": [], "dependentSchemas": 3, "unevaluatedProperties": 3},
        {"minLength": 2, "if": {"minLength": "a", "required": ["a"]}, "then": {"minLength": 1.5}, "$ref": 3},
    ],
    ids=range(7),
)
def test_what_is_no_schema_is_refused(compiler: GrammarCompiler, schema: Any) -> None:
    with contextlib.suppress(InvalidParameter):
        compiler.compile(schema_spec(schema), spaced=False)


def test_nothing_else_is_ever_allowed(compiler: GrammarCompiler) -> None:
    """Schemas at random, each refused or held to."""
    chance = random.Random(5)
    leaves: list[Any] = [True, {"const": "x"}, {"enum": ["x", 1, 2]}, TEXT, NUMBER, {"minimum": 2}, {"const": 1.0}]
    leaves += [{"const": True}, {"type": "boolean"}, {"$ref": "#/$defs/Kind"}, {**TEXT, "not": {"const": "x"}}]

    def part(levels: int) -> dict[str, Any]:
        made: dict[str, Any] = {"properties": {name: chance.choice(leaves) for name in chance.sample("abc", 2)}}
        if chance.random() < 0.5:
            made["required"] = chance.sample("abc", chance.randint(0, 2))
        if levels and chance.random() < 0.4:
            made[chance.choice(["not", "if"])] = part(0)
            made[chance.choice(["then", "else"])] = part(0)
        if levels and chance.random() < 0.3:
            made["dependentRequired"] = {chance.choice("abc"): chance.sample("abc", 2)}
        return made

    values = ["x", "xx", 1, 2, True, None]
    answers = [
        dict(zip(names, given, strict=True))
        for size in range(4)
        for names in itertools.combinations("abc", size)
        for given in itertools.product(values, repeat=size)
    ]
    held = 0
    for _ in range(150):
        schema = {"type": "object", **part(1), **REFERRED, chance.choice(["not", "title"]): part(1)}
        try:
            spec = schema_spec(schema)
            compiler.compile(spec, spaced=False)
        except InvalidParameter:
            continue
        held += 1
        valid = jsonschema.Draft202012Validator(schema).is_valid
        for answer in chance.sample(answers, 20):
            assert valid(answer) or not takes(compiler, spec, json.dumps(answer)), (schema, answer)
    assert held > 20
