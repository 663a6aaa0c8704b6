"""The structural tag: the form of an answer in parts, as XGrammar, vLLM and SGLang spell it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, cast

import msgspec
from msgspec import Meta

from asyncllm.config.structured_output.json_schema import MAX_SCHEMA, checked_schema
from asyncllm.errors import InvalidParameter, short

__all__ = [
    "AnyOf",
    "AnyText",
    "AnyTokens",
    "ConstString",
    "Grammar",
    "JsonText",
    "Pattern",
    "Repeat",
    "Sequence",
    "Style",
    "Tag",
    "TagPart",
    "TagsWithSeparator",
    "Token",
    "TriggeredTags",
    "checked_tag",
]

MAX_PARTS = 1000
MAX_DEPTH = 30
MAX_REPEATS = 1000

Style: TypeAlias = Literal["qwen_xml", "minimax_xml", "deepseek_xml", "glm_xml"]
"""How a model writes the parameters of a call, each by itself."""


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of an answer."""


class ConstString(_Part, frozen=True, tag="const_string"):
    """This text."""

    value: str


class JsonText(_Part, frozen=True, tag="json_schema"):
    """JSON that matches the schema, or parameters of its properties."""

    json_schema: Any
    style: Literal["json"] | Style = "json"
    any_order: bool = False
    """Has to be false: properties come in the schema's order."""
    max_whitespace_cnt: Annotated[int, Meta(ge=0, le=1000)] | None = None
    """Maximum number of white-space characters between JSON's tokens; None: a line end with an indent."""


class QwenParameters(_Part, frozen=True, tag="qwen_xml_parameter"):
    """The older name of the style `qwen_xml`."""

    json_schema: Any


class Pattern(_Part, frozen=True, tag="regex"):
    """A text that the expression matches."""

    pattern: str


class AnyText(_Part, frozen=True, tag="any_text"):
    """Any text that contains none of `excludes`, up to the end of the tag around it."""

    excludes: list[str] = []
    max_tokens: None = None
    max_chars: None = None


class Token(_Part, frozen=True, tag="token"):
    """One token, by its id or, if it is a special one, its spelling."""

    token: Annotated[int, Meta(ge=0)] | str


class AnyTokens(_Part, frozen=True, tag="any_tokens"):
    """Any tokens but these, up to the token that ends the tag around it."""

    exclude_tokens: list[Annotated[int, Meta(ge=0)] | str] = []
    max_tokens: None = None


class Grammar(_Part, frozen=True, tag="grammar"):
    """A text of the grammar, which is in GBNF or Lark."""

    grammar: Annotated[str, Meta(min_length=1, max_length=16 * 1024)]


class Repeat(_Part, frozen=True, tag="repeat"):
    """The part, between `min` and `max` times; -1: any number of times."""

    min: Annotated[int, Meta(ge=0, le=MAX_REPEATS)]
    max: Annotated[int, Meta(ge=-1, le=MAX_REPEATS)]
    content: TagPart


class _Counted(_Part, frozen=True):
    content: TagPart


class Optional(_Counted, frozen=True, tag="optional"):
    """The part, or nothing."""


class Star(_Counted, frozen=True, tag="star"):
    """The part, any number of times."""


class Plus(_Counted, frozen=True, tag="plus"):
    """The part, at least once."""


class Sequence(_Part, frozen=True, tag="sequence"):
    """One part after the other."""

    elements: list[TagPart]


class AnyOf(_Part, frozen=True, tag="or"):
    """One of the parts."""

    elements: list[TagPart]


class Tag(_Part, frozen=True, tag="tag"):
    """A part between two texts."""

    begin: str | Token
    content: TagPart
    end: str | list[str] | Token

    @property
    def ends(self) -> list[str | Token]:
        """Texts or tokens of which one closes the tag; empty: the tag has no end of its own."""
        return [end for end in (self.end if isinstance(self.end, list) else [self.end]) if end]


class TriggeredTags(_Part, frozen=True, tag="triggered_tags"):
    """Any text, in which one of `triggers` begins a tag."""

    triggers: list[str]
    tags: list[Tag]
    at_least_one: bool = False
    """The answer begins with a tag."""
    stop_after_first: bool = False
    excludes: list[str] = []
    """Texts that are not in the text between tags."""

    def trigger_of(self, tag: Tag) -> str | None:
        """Return the trigger that the tag begins with, or None."""
        begin = tag.begin if isinstance(tag.begin, str) else ""
        return next((trigger for trigger in self.triggers if trigger and begin.startswith(trigger)), None)


class Dispatch(_Part, frozen=True, tag="dispatch"):
    """Any text, in which each pattern is followed by its part."""

    rules: list[tuple[str, TagPart]]
    loop: bool = True
    excludes: list[str] = []


class TagsWithSeparator(_Part, frozen=True, tag="tags_with_separator"):
    """Tags alone, with a text between every two."""

    tags: list[Tag]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


TagPart: TypeAlias = (
    ConstString
    | JsonText
    | QwenParameters
    | Pattern
    | Grammar
    | AnyText
    | AnyTokens
    | Token
    | Sequence
    | AnyOf
    | Repeat
    | Optional
    | Star
    | Plus
    | Tag
    | TriggeredTags
    | Dispatch
    | TagsWithSeparator
)
COUNTS = {Optional: (0, 1), Star: (0, -1), Plus: (1, -1)}


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

    def inner(each: TagPart) -> TagPart:
        return _checked(each, field, seen, depth + 1)

    match part:
        case QwenParameters():
            return inner(JsonText(part.json_schema, "qwen_xml"))
        case JsonText():
            if part.any_order:
                raise msgspec.ValidationError("`any_order` is not implemented: properties come in the schema's order")
            return msgspec.structs.replace(part, json_schema=checked_schema(part.json_schema, field))
        case Optional() | Star() | Plus():
            return inner(Repeat(*COUNTS[type(part)], part.content))
        case Repeat():
            if -1 < part.max < part.min:
                raise msgspec.ValidationError("`max` is less than `min`")
            if part.max != 1 and _endless(part.content):
                raise msgspec.ValidationError("text without an end cannot be repeated")
            return Repeat(part.min, part.max, inner(part.content))
        case Dispatch():
            tags = [Tag(pattern, content, "") for pattern, content in part.rules]
            triggers = [pattern for pattern, _ in part.rules]
            return inner(TriggeredTags(triggers, tags, False, not part.loop, part.excludes))
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
                    raise msgspec.ValidationError(f"no trigger begins the tag {short(tag.begin)}")
                if _endless(tag):
                    raise msgspec.ValidationError(f"the tag {short(tag.begin)} has no `end`")
            return msgspec.structs.replace(part, tags=[cast("Tag", inner(tag)) for tag in part.tags])
    return part


def _endless(part: TagPart) -> bool:
    """Return whether nothing but the end around it ends a part."""
    match part:
        case AnyText() | AnyTokens() | TriggeredTags() | Dispatch():
            return True
        case Repeat() | Optional() | Star() | Plus():
            return _endless(part.content)
        case Sequence():
            return bool(part.elements) and _endless(part.elements[-1])
        case AnyOf():
            return any(map(_endless, part.elements))
        case Tag():
            return not part.ends and _endless(part.content)
    return False
