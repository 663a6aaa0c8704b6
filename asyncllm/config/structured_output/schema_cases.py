"""Rewrite keywords of JSON schemas that the grammar library lacks as cases (`anyOf`) in keywords that it has.

`not`, `if`, `dependentRequired` and their like are conditions. Where the opposite of a condition can be said by itself,
a schema is the same as a choice of schemas without it. What cannot be said is left, and the library refuses it by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, permutations
from typing import Any

from asyncllm.config.structured_output.prepared_schema import each_schema
from asyncllm.config.structured_output.schema_joins import as_json, both, types_of

__all__ = ["with_cases"]

MAX_CASES = 64
"""Maximum number of cases of one schema."""
MAX_LISTED = 60_000
"""Maximum length of all lists without repetition that are written out."""
MAX_PLACES = 16
"""Maximum length of a list in which one item has to be of a kind."""
MAX_COPIED = 20_000
"""Maximum number of parts that are repeated in cases."""
MAX_REFERENCES = 8

ABOUT = {"$schema", "$id", "$anchor", "$defs", "definitions", "title", "description", "$comment", "default", "examples"}
"""Keywords that constrain nothing by themselves. They stay with the schema, not with its cases."""
BESIDE = {"$ref", "$dynamicRef", "allOf", "anyOf", "dependentSchemas", "if", "oneOf"}
"""Keywords that may name further properties of the same object."""
CONDITIONS = {"not", "if", "dependentRequired", "dependentSchemas"}
OPPOSITES = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}
"""Keyword -> the type it is about, the keyword of its opposite, and what that adds to the value."""

Cases = list[Any] | None
"""Schemas of which one holds; None: it cannot be said."""


def with_cases(schema: Any) -> Any:
    """Return the schema with cases for the keywords that can be said by them."""
    return _Rewriter(schema).rewritten(schema)


class _Rewriter:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = MAX_COPIED

    def rewritten(self, schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        whole = {name: each_schema(name, value, self.rewritten) for name, value in schema.items()}
        whole = self._containing(self._without_repetition(self._named(_without_trifles(whole))))
        parts = whole.get("allOf")
        inner = [each for each in parts if _is_condition(each)] if isinstance(parts, list) else []
        rest = _without(whole, *CONDITIONS, "then", "else", *ABOUT)
        if inner:
            rest["allOf"] = [each for each in parts or () if each not in inner]
            rest = rest if rest["allOf"] else _without(rest, "allOf")
        cases: list[Any] = [{}]
        for each in (whole, *inner):
            for alternatives in self._conditions(each, rest):
                if alternatives is None or len(cases) * len(alternatives) > MAX_CASES:
                    return whole
                cases = [both(case, other) for case in cases for other in alternatives]
        if len(cases) > 1 and not self._may_copy(rest, len(cases)):
            return whole
        about = {name: value for name, value in whole.items() if name in ABOUT}
        cases = [joined for joined in (both(rest, case) for case in cases) if joined is not False]
        if len(cases) == 1 and isinstance(cases[0], Mapping):
            return {**cases[0], **about}
        return {"anyOf": cases, **about} if cases else {"enum": [], **about}

    def _may_copy(self, schema: Any, times: int) -> bool:
        """Return whether so many copies of a schema leave the whole small enough, and count them."""
        left = [schema]
        while left and self._left > 0:
            part = left.pop()
            self._left -= times
            if isinstance(part, Mapping):
                left += part.values()
            elif isinstance(part, list):
                left += part
        return self._left > 0

    def _conditions(self, schema: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[Cases]:
        """Yield the cases of each condition in a schema. `known`: what else holds for its values."""
        if "not" in schema:
            yield self._opposite(schema["not"], known)
        if "if" in schema:
            opposite = self._opposite(schema["if"], known)
            holds, otherwise = both(schema["if"], schema.get("then", True)), schema.get("else", True)
            yield None if opposite is None else [holds, *(both(each, otherwise) for each in opposite)]
        for name, names in _entries(schema, "dependentRequired"):
            yield [_lacks(name), {"required": [name, *names]}] if _is_texts(names) else None
        for name, value in _entries(schema, "dependentSchemas"):
            yield [_lacks(name), both({"required": [name]}, value)]

    def _opposite(self, schema: Any, known: Mapping[str, Any]) -> Cases:
        """Return the cases in which a value for which `known` holds is not of this schema."""
        schema = self._resolved(schema)
        if isinstance(schema, bool):
            return [] if schema else [{}]
        if not isinstance(schema, Mapping):
            return None
        cases: list[Any] = []
        for keyword, value in schema.items():
            found = [] if keyword in ABOUT else self._opposite_of(keyword, value, known)
            if found is None:
                return None
            cases += found
        return cases if len(cases) <= MAX_CASES else None

    def _opposite_of(self, keyword: str, value: Any, known: Mapping[str, Any]) -> Cases:
        match keyword:
            case "not":
                return [value]
            case "type":
                return _other_types(value, known)
            case "const":
                return self._other_values([value], known)
            case "enum" if isinstance(value, list):
                return self._other_values(value, known)
            case "required" if _is_texts(value):
                return [{"type": "object", **_lacks(name)} for name in value]
            case "properties" if isinstance(value, Mapping):
                return self._other_properties(value, known)
            case "allOf" if isinstance(value, list):
                parts = [self._opposite(each, known) for each in value]
                return None if None in parts else [case for part in parts for case in part or ()]
            case "anyOf" if isinstance(value, list):
                cases: list[Any] = [{}]
                for each in value:
                    found = self._opposite(each, known)
                    if found is None or len(found) * len(cases) > MAX_CASES:
                        return None
                    cases = [both(case, other) for case in cases for other in found]
                return cases
        if keyword in OPPOSITES and isinstance(value, int | float) and not isinstance(value, bool):
            kind, other, more = OPPOSITES[keyword]
            return [] if value + more < 0 and more else [{"type": kind, other: value + more}]
        return None

    def _other_properties(self, properties: Mapping[str, Any], known: Mapping[str, Any]) -> Cases:
        named = known.get("properties")
        cases = []
        for name, value in properties.items():
            there = self._resolved(named.get(name, {}) if isinstance(named, Mapping) else {})
            others = self._opposite(value, there if isinstance(there, Mapping) else {})
            if others is None:
                return None
            cases += [{"type": "object", "required": [name], "properties": {name: other}} for other in others]
        return cases

    def _other_values(self, values: Sequence[Any], known: Mapping[str, Any]) -> Cases:
        """Return the values that are known to be possible, except these."""
        listed = self._values(known)
        excluded = {as_json(value) for value in values}
        if listed is not None:
            return [{"enum": [value for value in listed if as_json(value) not in excluded]}]
        kinds = types_of(known)
        if kinds == {"string"}:
            texts = [value for value in values if isinstance(value, str)]
            return [{"pattern": _other_texts(texts)}] if texts else [{}]
        if kinds == {"integer"} and all(isinstance(value, int | str) for value in values):
            numbers = sorted({value for value in values if isinstance(value, int) and not isinstance(value, bool)})
            ends = [None, *numbers, None]
            return [
                {name: end for name, end in (("exclusiveMinimum", low), ("exclusiveMaximum", high)) if end is not None}
                for low, high in pairwise(ends)
                if low is None or high is None or high - low > 1
            ]
        return None

    def _values(self, schema: Any) -> list[Any] | None:
        """Return all values of a schema, if they are listed."""
        schema = self._resolved(schema)
        if not isinstance(schema, Mapping) or _without(schema, "enum", "const", "type", *ABOUT):
            return None
        if isinstance(schema.get("enum"), list) and "const" not in schema:
            return list(schema["enum"])
        if "const" in schema and "enum" not in schema:
            return [schema["const"]]
        return [True, False] if schema.get("type") == "boolean" else None

    def _resolved(self, schema: Any) -> Any:
        """Return what a reference within the document refers to, or the schema itself."""
        for _ in range(MAX_REFERENCES):
            reference = schema.get("$ref") if isinstance(schema, Mapping) else None
            if not isinstance(reference, str) or not reference.startswith("#/") or _without(schema, "$ref", *ABOUT):
                break
            found = self._root
            for part in reference[2:].split("/"):
                found = found.get(part) if isinstance(found, Mapping) else None
            if found is None:
                break
            schema = found
        return schema

    def _named(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Turn listed names of properties, and patterns of names, into properties."""
        names, others = schema.get("propertyNames"), schema.get("additionalProperties", True)
        if not isinstance(names, Mapping) or {"properties", "patternProperties"} & schema.keys():
            return schema
        listed = self._values(names)
        made = {**_without(schema, "propertyNames"), "additionalProperties": False}
        if listed is not None:
            return {**made, "properties": {name: others for name in listed if isinstance(name, str)}}
        if not _without(names, "type", "pattern") and isinstance(names.get("pattern"), str):
            return {**made, "patternProperties": {names["pattern"]: others}}
        return schema

    def _without_repetition(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Write out the lists in which no item occurs twice, if there are few."""
        if schema.get("uniqueItems") is not True or schema.get("type") != "array":
            return schema
        least, most = schema.get("minItems", 0), schema.get("maxItems", MAX_PLACES)
        if not isinstance(least, int) or not isinstance(most, int):
            return schema
        if most <= 1:
            return _without(schema, "uniqueItems")
        values = self._values(schema.get("items"))
        if values is None or _without(schema, "uniqueItems", "type", "items", "minItems", "maxItems", *ABOUT):
            return schema
        values = list({as_json(value): value for value in values}.values())
        most = min(most, len(values))
        orders = sum(math.perm(len(values), size) for size in range(least, most + 1))
        if orders * len(as_json(values)) > MAX_LISTED:
            return schema
        lists = [list(each) for size in range(least, most + 1) for each in permutations(values, size)]
        return {"enum": lists, **{name: value for name, value in schema.items() if name in ABOUT}}

    def _containing(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Write out the places of an item that a short list contains."""
        most, least = schema.get("maxItems"), schema.get("minItems", 0)
        if "contains" not in schema or {"maxContains", "prefixItems", "additionalItems"} & schema.keys():
            return schema
        if schema.get("type") != "array" or schema.get("minContains", 1) != 1 or not isinstance(least, int):
            return schema
        item = schema.get("items", True)
        if not isinstance(most, int) or not 0 < most <= MAX_PLACES or isinstance(item, list):
            return schema
        if not self._may_copy(item, most * most):
            return schema
        wanted, rest = both(item, schema["contains"]), _without(schema, "contains", "minContains", *ABOUT)
        cases = [
            {**rest, "prefixItems": [*[item] * place, wanted], "minItems": max(least, place + 1)}
            for place in range(most)
        ]
        return {"anyOf": cases, **{name: value for name, value in schema.items() if name in ABOUT}}


def _without_trifles(schema: dict[str, Any]) -> dict[str, Any]:
    """Leave out keywords that constrain nothing, and spell those of older drafts as later ones do."""
    made = dict(schema)
    if isinstance(dependencies := made.get("dependencies"), Mapping):
        del made["dependencies"]
        listed = {name: value for name, value in dependencies.items() if isinstance(value, list)}
        made["dependentRequired"] = {**listed, **made.get("dependentRequired", {})}
        schemas = {name: value for name, value in dependencies.items() if name not in listed}
        made["dependentSchemas"] = {**schemas, **made.get("dependentSchemas", {})}
    if "if" not in made or not {"then", "else"} & made.keys():
        made = _without(made, "if", "then", "else")
    if "contains" not in made:
        made = _without(made, "minContains", "maxContains")
    nothing = {"uniqueItems": (False,), "not": (False,), "propertyNames": (True, {}, {"type": "string"})}
    nothing |= {"unevaluatedProperties": (True, {}), "unevaluatedItems": (True, {})}
    nothing |= {"dependentRequired": ({},), "dependentSchemas": ({},)}
    made = {name: value for name, value in made.items() if not any(value == each for each in nothing.get(name, ()))}
    if "unevaluatedProperties" in made and not (BESIDE | {"additionalProperties"}) & made.keys():
        made["additionalProperties"] = made.pop("unevaluatedProperties")
    return made


def _without(schema: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name not in names}


def _lacks(name: str) -> dict[str, Any]:
    return {"properties": {name: False}}


def _entries(schema: Mapping[str, Any], keyword: str) -> Iterable[tuple[Any, Any]]:
    value = schema.get(keyword)
    return value.items() if isinstance(value, Mapping) else ()


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_condition(schema: Any) -> bool:
    """Return whether a schema says nothing but a condition. It may depend on what is said beside it."""
    return (
        isinstance(schema, Mapping)
        and bool({"if", "not"} & schema.keys())
        and not _without(schema, "if", "then", "else", "not", *ABOUT)
    )


def _other_types(value: Any, known: Mapping[str, Any]) -> Cases:
    excluded, possible = types_of({"type": value}), types_of(known)
    if "integer" in excluded and "number" in possible - excluded:
        return None  # a number that is no integer
    if "number" in excluded:
        possible = possible - {"integer"}
    left = sorted(possible - excluded)
    return [{"type": left}] if left else []


def _other_texts(texts: Sequence[str]) -> str:
    """Return an expression for every text except these."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for letter in text:
            node = node.setdefault(letter, {})
        node[""] = {}
    return f"^{_beyond(tree)}$"


def _beyond(node: dict[str, Any]) -> str:
    letters = [letter for letter in node if letter]
    excluded = "".join(f"\\{letter}" if letter in r"\]^-[&~" else letter for letter in letters)
    parts = [f"[^{excluded}][\\s\\S]*"] if letters else [r"[\s\S]+"]
    parts += [("\\" if letter in r"\.+*?()|[]{}^$/-&~#" else "") + letter + _beyond(node[letter]) for letter in letters]
    parts += [] if "" in node else [""]
    return f"({'|'.join(parts)})"
