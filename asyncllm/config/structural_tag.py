"""The structural tag: the form of an answer in parts, as XGrammar, vLLM and SGLang spell it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from asyncllm.config.json_schema import MAX_SCHEMA, checked_schema
from asyncllm.errors import InvalidParameter

__all__ = [
    "AnyOf",
    "AnyText",
    "ConstString",
    "JsonText",
    "Pattern",
    "Sequence",
    "Tag",
    "TagPart",
    "TagsWithSeparator",
    "TriggeredTags",
    "checked_tag",
]

MAX_PARTS = 1000
MAX_DEPTH = 30


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of an answer."""


class ConstString(_Part, frozen=True, tag="const_string"):
    """This text."""

    value: str


class JsonText(_Part, frozen=True, tag="json_schema"):
    """JSON that matches the schema."""

    json_schema: Any
    style: Literal["json"] = "json"


class Pattern(_Part, frozen=True, tag="regex"):
    """A text that the expression matches."""

    pattern: str


class AnyText(_Part, frozen=True, tag="any_text"):
    """Any text that contains none of `excludes`, up to the end of the tag around it."""

    excludes: list[str] = []


class Sequence(_Part, frozen=True, tag="sequence"):
    """One part after the other."""

    elements: list[TagPart]


class AnyOf(_Part, frozen=True, tag="or"):
    """One of the parts."""

    elements: list[TagPart]


class Tag(_Part, frozen=True, tag="tag"):
    """A part between two texts."""

    begin: str
    content: TagPart
    end: str | list[str]

    @property
    def ends(self) -> list[str]:
        """Texts of which one closes the tag; empty: the tag has no end of its own."""
        return [end for end in ([self.end] if isinstance(self.end, str) else self.end) if end]


class TriggeredTags(_Part, frozen=True, tag="triggered_tags"):
    """Any text, in which one of `triggers` begins a tag."""

    triggers: list[str]
    tags: list[Tag]
    at_least_one: bool = False
    """The answer begins with a tag."""
    stop_after_first: bool = False

    def trigger_of(self, tag: Tag) -> str | None:
        """Return the trigger that the tag begins with, or None."""
        return next((trigger for trigger in self.triggers if trigger and tag.begin.startswith(trigger)), None)


class TagsWithSeparator(_Part, frozen=True, tag="tags_with_separator"):
    """Tags alone, with a text between every two."""

    tags: list[Tag]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


TagPart: TypeAlias = (
    ConstString | JsonText | Pattern | AnyText | Sequence | AnyOf | Tag | TriggeredTags | TagsWithSeparator
)


class _Structure(msgspec.Struct):
    begin: str
    schema: Any
    end: str


class _Triggered(msgspec.Struct):
    """The older spelling."""

    structures: list[_Structure]
    triggers: list[str]


def checked_tag(value: object, field: str) -> str:
    """Return the JSON text of a structural tag's part. `value`: in either spelling, or JSON text of it. Raises
    InvalidParameter."""
    try:
        if isinstance(value, str):
            value = json.loads(value)
        if not isinstance(value, Mapping):
            raise msgspec.ValidationError("Expected `object`")
        if "structures" in value:
            old = msgspec.convert(value, _Triggered)
            tags = [Tag(each.begin, JsonText(each.schema), each.end) for each in old.structures]
            part: TagPart = TriggeredTags(old.triggers, tags)
        else:
            part = msgspec.convert(value.get("format", value), TagPart)
        text = json.dumps(msgspec.to_builtins(_checked(part, field, [0], 0)), ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        if isinstance(error, InvalidParameter):
            raise
        reason = str(error) if isinstance(error, msgspec.ValidationError) else "it is not JSON, or too deep"
        raise InvalidParameter(f"The structural tag of {field} is not valid: {reason}. Correct it.", field) from None
    if len(text) > MAX_SCHEMA:
        raise InvalidParameter(
            f"The structural tag of {field} has {len(text)} characters, and at most {MAX_SCHEMA} are taken. Shorten "
            f"it.",
            field,
        )
    return text


def _checked(part: TagPart, field: str, seen: list[int], depth: int) -> TagPart:
    """Return a part with its schemas checked. `seen`: number of parts so far."""
    seen[0] += 1
    if seen[0] > MAX_PARTS or depth > MAX_DEPTH:
        raise InvalidParameter(
            f"The structural tag of {field} has more than {MAX_PARTS} parts or {MAX_DEPTH} levels. Shorten it.", field
        )

    def inner(each: Any) -> Any:
        return _checked(each, field, seen, depth + 1)

    match part:
        case JsonText():
            return JsonText(checked_schema(part.json_schema, field))
        case Sequence() | AnyOf():
            if not part.elements:
                raise msgspec.ValidationError("`elements` is empty")
            if isinstance(part, Sequence) and any(map(_endless, part.elements[:-1])):
                raise msgspec.ValidationError("only the last of a sequence may be text without an end")
            return type(part)([inner(each) for each in part.elements])
        case Tag():
            return Tag(part.begin, inner(part.content), part.end)
        case TriggeredTags() | TagsWithSeparator():
            if not part.tags:
                raise msgspec.ValidationError("`tags` is empty")
            for tag in part.tags:
                if isinstance(part, TriggeredTags) and part.trigger_of(tag) is None:
                    raise msgspec.ValidationError(f"no trigger begins the tag {tag.begin[:50]!r}")
                if _endless(tag):
                    raise msgspec.ValidationError(f"the tag {tag.begin[:50]!r} has no `end`")
            return msgspec.structs.replace(part, tags=[inner(tag) for tag in part.tags])
    return part


def _endless(part: TagPart) -> bool:
    """Return whether nothing but the end around it ends a part."""
    match part:
        case AnyText() | TriggeredTags():
            return True
        case Sequence():
            return bool(part.elements) and _endless(part.elements[-1])
        case AnyOf():
            return any(map(_endless, part.elements))
        case Tag():
            return not part.ends and _endless(part.content)
    return False
