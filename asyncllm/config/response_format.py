"""What an answer shall look like: the spellings of `response_format`, and the one form that they come to."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from asyncllm.errors import InvalidParameter, UnsupportedFeature, short

__all__ = ["GrammarSpec", "as_response_format", "grammar_of"]

FIELD = "response_format"

MAX_SCHEMA = 64 * 1024
MAX_GRAMMAR = 16 * 1024
MAX_REGEX = 4096
MAX_LITERAL = 4096
MAX_CHOICES = 5000
MAX_PARTS = 20_000
MAX_DEPTH = 100
MAX_OPTIONAL = 1000
"""Bounds of what a grammar is made from. Beyond them compiling or using it takes seconds."""


class GrammarSpec(msgspec.Struct, frozen=True):
    """What an answer is held to."""

    kind: Literal["json_schema", "regex", "choice", "grammar"]
    source: str
    """JSON text of a schema or of a list of choices; else the pattern or grammar itself."""


def as_response_format(value: Any) -> Any:
    """Return what a class stands for: its JSON schema, of a msgspec Struct, a dataclass or a pydantic model."""
    if not isinstance(value, type):
        return value
    if callable(make := getattr(value, "model_json_schema", None)):
        schema = make()
    elif issubclass(value, msgspec.Struct) or hasattr(value, "__dataclass_fields__"):
        schema = msgspec.json.schema(value)
    else:
        raise InvalidParameter(
            f"{FIELD} is the class {value.__name__}. A class is a msgspec Struct, a dataclass or a pydantic model.",
            FIELD,
        )
    return {"type": "json_schema", "json_schema": {"name": value.__name__, "schema": _closed(schema)}}


def _closed(schema: Any) -> Any:
    """The schema of a class without further properties, which a class has no place for."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(each) for name, each in schema.items()}
    return {**closed, "additionalProperties": False} if isinstance(schema.get("properties"), dict) else closed


def grammar_of(value: Mapping[str, Any] | None) -> GrammarSpec | None:
    """Return what a `response_format` asks for; None for plain text. Raises InvalidParameter, UnsupportedFeature."""
    if value is None:
        return None
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            schema = value.get("schema")
            return _schema({"type": "object"} if schema is None else schema)
        case "json_schema":
            inner = value.get("json_schema", value)
            inner = inner if isinstance(inner, Mapping) else {}
            return _schema(inner.get("schema", inner.get("json_schema")))
        case "regex_schema":
            return GrammarSpec("regex", _text(value.get("regex_schema"), MAX_REGEX))
        case "regex":
            return GrammarSpec("regex", _text(value.get("regex", value.get("pattern")), MAX_REGEX))
        case "grammar":
            return GrammarSpec("grammar", _text(value.get("grammar"), MAX_GRAMMAR))
        case "choice":
            return _choice(value.get("choice"))
        case kind:
            raise UnsupportedFeature(
                f"{FIELD} is of type {short(kind)}. The types are: text, json_object, json_schema, regex_schema, "
                f"regex, choice, grammar.",
                FIELD,
            )


def _text(value: object, most: int) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidParameter(f"{FIELD} holds no text for its type. Give one.", FIELD)
    if len(value) > most:
        raise InvalidParameter(
            f"The pattern or grammar has {len(value)} characters, and at most {most} are taken. Shorten it.", FIELD
        )
    return value


def _choice(value: object) -> GrammarSpec:
    if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
        raise InvalidParameter(f"The choice of {FIELD} is a list of texts. Give at least one.", FIELD)
    if len(value) > MAX_CHOICES or sum(map(len, value)) > MAX_SCHEMA:
        raise InvalidParameter(
            f"There are {len(value)} choices, and at most {MAX_CHOICES} of {MAX_SCHEMA} characters together are taken.",
            FIELD,
        )
    return GrammarSpec("choice", json.dumps(value))


def _schema(schema: object) -> GrammarSpec:
    if isinstance(schema, str):
        if len(schema) > MAX_SCHEMA:
            raise _too_large(f"{len(schema)} characters")
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise InvalidParameter(f"The schema of {FIELD} is a text, and no JSON. Send an object.", FIELD) from None
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, Mapping):
        raise InvalidParameter(f"{FIELD} has no schema. A JSON schema is an object.", FIELD)
    for part in _parts(schema):
        _check_part(part)
    text = json.dumps(_prepared(schema), ensure_ascii=False)
    if len(text) > MAX_SCHEMA:
        raise _too_large(f"{len(text)} characters")
    return GrammarSpec("json_schema", text)


def _too_large(what: str) -> InvalidParameter:
    return InvalidParameter(
        f"The schema of {FIELD} has {what}, more than answers can be held to. Simplify it, or split the request.", FIELD
    )


def _parts(schema: Any) -> Iterator[Any]:
    """Every value in a schema, without recursion. Raises InvalidParameter for too many or too deep ones."""
    left = [(schema, 0)]
    count = 0
    while left:
        value, depth = left.pop()
        count += 1
        if depth > MAX_DEPTH:
            raise _too_large(f"more than {MAX_DEPTH} levels")
        if count + len(left) > MAX_PARTS:
            raise _too_large(f"more than {MAX_PARTS} parts")
        yield value
        if isinstance(value, Mapping):
            left.extend((each, depth + 1) for each in value.values())
        elif isinstance(value, list | tuple):
            left.extend((each, depth + 1) for each in value)


def _check_part(part: Any) -> None:
    if isinstance(part, str) and len(part) > MAX_LITERAL:
        raise _too_large(f"a text of {len(part)} characters")
    if isinstance(part, list) and len(part) > MAX_CHOICES:
        raise _too_large(f"a list of {len(part)} entries")
    if isinstance(part, Mapping):
        if not all(isinstance(name, str) for name in part):
            raise InvalidParameter(f"The schema of {FIELD} has a key that is no text. JSON's keys are texts.", FIELD)
        properties, required = part.get("properties"), part.get("required")
        if isinstance(properties, Mapping):
            optional = len(properties) - (len(required) if isinstance(required, list) else 0)
            if optional > MAX_OPTIONAL:
                raise _too_large(f"{optional} optional properties")


def _prepared(value: Any) -> Any:
    """The schema without what would be an option of the library, and with `nullable` spelled out."""
    if isinstance(value, list | tuple):
        return [_prepared(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    made = {name: _prepared(each) for name, each in value.items() if name != "x-guidance"}
    if made.get("nullable") is True and isinstance(made.get("type"), str | list):
        del made["nullable"]
        return {"anyOf": [made, {"type": "null"}]}
    return made
