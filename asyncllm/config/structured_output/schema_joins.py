"""Join two JSON schemas to one for which both hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["as_json", "both", "types_of"]

TYPES = {"null", "boolean", "object", "array", "number", "string"}
TOGETHER = {"additionalProperties", "patternProperties", "unevaluatedProperties", "additionalItems", "unevaluatedItems"}
"""Keywords whose meaning depends on those beside them."""
LARGER = {"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"}
SMALLER = {"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"}
"""Bounds, of which the larger or the smaller is the one that counts."""


def types_of(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that the keyword `type` allows."""
    kinds = schema.get("type", None)
    if isinstance(kinds, str):
        return {kinds}
    return {str(kind) for kind in kinds} if isinstance(kinds, list) else set(TYPES)


def both(first: Any, second: Any) -> Any:
    """Return a schema for the values of both; False if there is obviously none. One with the keywords of both is
    returned if it means the same, since `allOf` keeps objects open for properties that it does not name."""
    if first is False or second is False:
        return False
    if first is True or first == {}:
        return second
    if second is True or second == {}:
        return first
    if not isinstance(first, Mapping) or not isinstance(second, Mapping):
        return {"allOf": [first, second]}
    first, second = _listed(first), _listed(second)
    if TOGETHER & second.keys() or {"patternProperties", "unevaluatedProperties"} & first.keys():
        return {"allOf": [first, second]}
    if {"items", "prefixItems"} & first.keys() and {"items", "prefixItems"} & second.keys():
        return {"allOf": [first, second]}
    made = dict(first)
    for keyword, value in second.items():
        there = made.get(keyword)
        if keyword == "properties" and isinstance(value, Mapping):
            others = first.get("additionalProperties", True)
            named = dict(there) if isinstance(there, Mapping) else {}
            for name, schema in value.items():
                named[name] = both(named.get(name, others), schema)
            made[keyword] = named
        elif keyword not in made or as_json(there) == as_json(value):
            made[keyword] = value
        elif keyword == "required" and _are(str, there, value):
            made[keyword] = list(dict.fromkeys([*(there or ()), *value]))
        elif keyword == "type":
            made[keyword] = _common_types(first, second)
        elif keyword in LARGER and _are(int | float, [there], [value]):
            made[keyword] = max(there, value)
        elif keyword in SMALLER and _are(int | float, [there], [value]):
            made[keyword] = min(there, value)
        elif keyword == "enum" and isinstance(there, list) and isinstance(value, list):
            values = {as_json(each) for each in value}
            made[keyword] = [each for each in there if as_json(each) in values]
        else:
            return {"allOf": [first, second]}
    return False if _is_empty(made) else made


def as_json(value: Any) -> str:
    """Return the JSON text of a value, which is the same for values that are equal in JSON."""
    return json.dumps(_canonical(value), sort_keys=True, default=repr)


def _canonical(value: Any) -> Any:
    match value:
        case float() if value.is_integer():
            return int(value)
        case list() | tuple():
            return [_canonical(each) for each in value]
        case Mapping():
            return {name: _canonical(each) for name, each in value.items()}
    return value


def _listed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema with a `const` as `enum`."""
    if "const" not in schema or "enum" in schema:
        return schema
    return {name: value for name, value in schema.items() if name != "const"} | {"enum": [schema["const"]]}


def _are(kind: Any, *lists: Any) -> bool:
    return all(
        isinstance(each, list) and all(isinstance(value, kind) and not isinstance(value, bool) for value in each)
        for each in lists
    )


def _common_types(first: Mapping[str, Any], second: Mapping[str, Any]) -> Any:
    one, other = types_of(first), types_of(second)
    kinds = (one & other) | ({"integer"} if "integer" in one | other and "number" in one ^ other else set())
    kinds &= (one | {"integer"}) if "number" in one else one
    kinds &= (other | {"integer"}) if "number" in other else other
    kinds -= {"integer"} if "number" in kinds else set()
    return next(iter(kinds)) if len(kinds) == 1 else sorted(kinds)


def _is_empty(schema: Mapping[str, Any]) -> bool:
    """Return whether no value is of this schema, as far as can be seen."""
    if schema.get("type") == [] or schema.get("enum") == []:
        return True
    named, required = schema.get("properties"), schema.get("required")
    if not isinstance(named, Mapping) or not isinstance(required, list) or types_of(schema) != {"object"}:
        return False
    return any(named.get(name) is False for name in required if isinstance(name, str))
