"""Rewrite a JSON schema with keywords that the grammar library supports, without changing the accepted answers.

Only schemas are rewritten, since a property may be named `format` and a constant may contain such a key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from asyncllm.config.structured_output.decimal_patterns import plain_decimal

__all__ = ["each_schema", "prepared_schema"]

SCHEMA = {
    *("items", "additionalItems", "additionalProperties", "contains", "else", "if", "not", "propertyNames", "then"),
    *("unevaluatedItems", "unevaluatedProperties"),
}
SCHEMAS = {"allOf", "anyOf", "items", "oneOf", "prefixItems"}
NAMED = {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
"""Keywords whose value is a schema, a list of schemas, or a map of names to schemas."""

FORMATS = {
    *("date-time", "time", "date", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
    *("uri", "uri-reference", "uri-template", "iri", "iri-reference", "uuid", "regex", "json-pointer"),
    "relative-json-pointer",
}
"""The formats of JSON Schema. Others, such as OpenAPI's `int32` and `password`, constrain nothing."""

COUNTS = {"maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"}


NAMES = re.compile(r"\^(?:([\w-]+)|\((?:\?:)?([\w-]+(?:\|[\w-]+)*)\))\$")
"""A pattern of names written out."""
JOINED = {"allOf", "dependentSchemas", "else", "if", "not", "then", "unevaluatedProperties"}
CASES = {"$ref", "anyOf", "oneOf"}
OBJECT = {"properties", "required"}
"""Keywords by which two parts of a schema describe one object: both have the first, or each has one of the others."""


def prepared_schema(schema: Any) -> Any:
    """Return the schema in keywords of the grammar library. A boolean is returned unchanged.

    An object with named properties allows no others unless the schema mentions them: models that may add properties do
    so, and neither the callers' types nor the grammars of other servers have any.
    """
    made = _respelled(schema)
    return made if _joins(schema) else _closed(made)


def _respelled(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    made = {name: each_schema(name, value, _respelled) for name, value in schema.items() if name != "x-guidance"}
    for name in COUNTS & made.keys():
        if isinstance(made[name], float) and made[name].is_integer():
            made[name] = int(made[name])
    if made.get("format", "") not in (*FORMATS, ""):
        del made["format"]
    if isinstance(made.get("pattern"), str):
        made["pattern"] = plain_decimal(made["pattern"])
    tag = made.get("discriminator")
    if isinstance(tag, Mapping) and isinstance(tag.get("propertyName"), str) and isinstance(made.get("oneOf"), list):
        # A tag with a default is optional in the schema; an answer without it would match every variant.
        made["oneOf"] = [{"allOf": [each, {"required": [tag["propertyName"]]}]} for each in made["oneOf"]]
    if isinstance(made.get("patternProperties"), Mapping):
        _name_patterns(made)
    if made.get("nullable") is True and isinstance(made.get("type"), str | list):
        del made["nullable"]
        return {"anyOf": [made, {"type": "null"}]}
    return made


def _name_patterns(made: dict[str, Any]) -> None:
    """Turn patterns that match only names written out, such as ^a$ and ^(a|b)$, into properties. To the library they
    allow a further property behind one that has such a name, and then no name for it."""
    patterns = dict(made["patternProperties"])
    properties = dict(made["properties"]) if isinstance(made.get("properties"), Mapping) else {}
    for pattern in list(patterns):
        names = NAMES.fullmatch(pattern)
        if names is None:
            continue
        schema = patterns.pop(pattern)
        for name in (names[1] or names[2]).split("|"):
            properties[name] = {"allOf": [properties[name], schema]} if name in properties else schema
    made["patternProperties"], made["properties"] = patterns, properties
    for keyword in ("patternProperties", "properties"):
        if not made[keyword]:
            del made[keyword]


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    made = {name: each_schema(name, value, _closed) for name, value in schema.items()}
    named, required = schema.get("properties"), schema.get("required", ())
    lists_all = isinstance(named, Mapping) and isinstance(required, list | tuple) and {*map(str, required)} <= {*named}
    if lists_all and "patternProperties" not in schema:
        made.setdefault("additionalProperties", False)
    return made


def each_schema(keyword: str, value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a keyword's value with every schema in it changed."""
    if keyword in SCHEMAS and isinstance(value, list | tuple):
        return [change(each) for each in value]
    if keyword in SCHEMA:
        return change(value)
    if keyword in NAMED and isinstance(value, Mapping):
        return {name: change(each) for name, each in value.items()}
    return value


def _joins(schema: Any) -> bool:
    """Return whether an object's properties are named in two places."""
    left: list[Any] = [schema]
    while left:
        each = left.pop()
        if isinstance(each, Mapping):
            if JOINED & each.keys() or (CASES & each.keys() and OBJECT & each.keys()):
                return True
            for name, value in each.items():
                each_schema(name, value, left.append)
    return False
