"""GrammarSpec: the form of an answer, built from any spelling of `response_format`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal, get_origin

import msgspec

from asyncllm.config.structured_output.json_schema import MAX_CHOICES, MAX_SCHEMA, checked_schema
from asyncllm.config.structured_output.structural_tag import checked_tag
from asyncllm.errors import InvalidParameter, UnsupportedFeature, short

__all__ = ["GrammarSpec", "as_response_format", "grammar_of"]

FIELD = "response_format"

MAX_GRAMMAR = 16 * 1024
MAX_REGEX = 4096
"""Limits of a grammar's source. Beyond them compiling or using it takes seconds."""

MAX_WHITE_SPACE = 100
WHITE_SPACE = re.compile(
    rf"(?=.{{0,{MAX_WHITE_SPACE}}}\Z)(?:[ \n\t\r()|?*+]|\\[ntrs]|\[(?:[ \n\t\r]|\\[ntr])+\]|\{{\d+(?:,\d*)?\}})*",
    re.DOTALL,
)
"""White space that JSON allows between its tokens -> its spelling in a regular expression."""


class GrammarSpec(msgspec.Struct, frozen=True):
    """The grammar of an answer."""

    kind: Literal["json_schema", "regex", "choice", "grammar", "tags", "calls"]
    source: str
    """JSON text of a schema, a list of choices or a structural tag's part; otherwise the pattern or grammar itself. For
    tool calls it is Lark with the rule `answer`."""
    white_space: str | None = None
    """For a schema: the regular expression of white space between JSON's tokens, if it is not the default."""

    @property
    def field(self) -> str:
        """The parameter that sets the grammar."""
        return "tools" if self.kind == "calls" else FIELD


def as_response_format(value: Any) -> Any:
    """Return the `response_format` of a type, either a pydantic model or a type that msgspec supports. Other values are
    returned unchanged."""
    if not isinstance(value, type) and get_origin(value) is None:
        return value
    name = getattr(value, "__name__", "answer")
    if callable(make := getattr(value, "model_json_schema", None)):
        schema = make()
    else:
        try:
            schema = msgspec.json.schema(value)
        except TypeError:
            raise InvalidParameter(
                f"{FIELD} is the type {name}, which has no JSON schema. Pass a msgspec Struct, a dataclass, a "
                f"TypedDict, an Enum, a pydantic model, or lists and unions of the first four.",
                FIELD,
            ) from None
    return {"type": "json_schema", "json_schema": {"name": name, "schema": _closed(schema)}}


def _closed(schema: Any) -> Any:
    """Return the schema of a class without additional properties, since a class has no place for them."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(each) for name, each in schema.items()}
    return {**closed, "additionalProperties": False} if isinstance(schema.get("properties"), dict) else closed


def grammar_of(value: Mapping[str, Any] | None) -> GrammarSpec | None:
    """Return the grammar of a `response_format`, or None for plain text. Raises InvalidParameter,
    UnsupportedFeature."""
    if value is None:
        return None
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            schema = value.get("schema")
            return _schema({"type": "object"} if schema is None else schema, value)
        case "json_schema":
            inner = value.get("json_schema", value)
            inner = inner if isinstance(inner, Mapping) else {}
            return _schema(inner.get("schema", inner.get("json_schema")), value)
        case "regex_schema":
            return GrammarSpec("regex", _text(value.get("regex_schema"), MAX_REGEX))
        case "regex":
            return GrammarSpec("regex", _text(value.get("regex", value.get("pattern")), MAX_REGEX))
        case "grammar":
            return GrammarSpec("grammar", _text(value.get("grammar"), MAX_GRAMMAR))
        case "choice":
            return _choice(value.get("choice"))
        case "structural_tag":
            return GrammarSpec("tags", checked_tag(value.get("structural_tag", value), FIELD))
        case kind:
            raise UnsupportedFeature(
                f"{FIELD} is of type {short(kind)}. The types are: text, json_object, json_schema, regex_schema, "
                f"regex, choice, grammar, structural_tag.",
                FIELD,
            )


def _text(value: object, limit: int) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidParameter(f"{FIELD} holds no text for its type. Give one.", FIELD)
    if len(value) > limit:
        raise InvalidParameter(
            f"The pattern or grammar has {len(value)} characters, and at most {limit} are taken. Shorten it.", FIELD
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


def _schema(schema: object, asked: Mapping[str, Any]) -> GrammarSpec:
    text = json.dumps(checked_schema(schema, FIELD), ensure_ascii=False)
    return GrammarSpec("json_schema", text, _white_space(asked.get("whitespace_pattern")))


def _white_space(pattern: object) -> str | None:
    if pattern is None:
        return None
    if not isinstance(pattern, str) or not WHITE_SPACE.fullmatch(pattern):
        raise InvalidParameter(
            "The whitespace_pattern is an expression of blanks, tabs and line ends only, as in '[ ]?', of up to "
            f"{MAX_WHITE_SPACE} characters; empty: there is no white space. Correct it.",
            FIELD,
        )
    return pattern.replace(r"\s", r"[ \t\n\r]")
