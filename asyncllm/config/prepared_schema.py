"""A JSON schema in the words that the grammar library knows: the same answers, fewer keywords.

Only what stands at a schema's place is rewritten; a property may be called `format`, and a constant may have one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["prepared_schema"]

SCHEMA = {
    *("items", "additionalItems", "additionalProperties", "contains", "else", "if", "not", "propertyNames", "then"),
    *("unevaluatedItems", "unevaluatedProperties"),
}
SCHEMAS = {"allOf", "anyOf", "items", "oneOf", "prefixItems"}
NAMED = {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
"""Keywords whose value is a schema, a list of schemas, or schemas by name."""

FORMATS = {
    *("date-time", "time", "date", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
    *("uri", "uri-reference", "uri-template", "iri", "iri-reference", "uuid", "regex", "json-pointer"),
    "relative-json-pointer",
}
"""The formats of JSON Schema. Any other is a note for the reader, as OpenAPI's `int32` and `password` are."""

COUNTS = {"maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"}


def prepared_schema(schema: Any) -> Any:
    """Return the schema; what is none, such as a boolean, as it is."""
    if not isinstance(schema, Mapping):
        return schema
    made = {name: _value(name, value) for name, value in schema.items() if name != "x-guidance"}
    if made.get("format", "") not in (*FORMATS, ""):
        del made["format"]
    tag = made.get("discriminator")
    if isinstance(tag, Mapping) and isinstance(tag.get("propertyName"), str) and isinstance(made.get("oneOf"), list):
        # A tag with a default is optional in the schema; an answer without it would be of every kind.
        made["oneOf"] = [{"allOf": [each, {"required": [tag["propertyName"]]}]} for each in made["oneOf"]]
    if made.get("nullable") is True and isinstance(made.get("type"), str | list):
        del made["nullable"]
        return {"anyOf": [made, {"type": "null"}]}
    return made


def _value(keyword: str, value: Any) -> Any:
    if keyword in SCHEMAS and isinstance(value, list | tuple):
        return [prepared_schema(each) for each in value]
    if keyword in SCHEMA:
        return prepared_schema(value)
    if keyword in NAMED and isinstance(value, Mapping):
        return {name: prepared_schema(each) for name, each in value.items()}
    if keyword in COUNTS and isinstance(value, float) and value.is_integer():
        return int(value)
    return value
