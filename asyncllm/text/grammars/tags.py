"""The grammar of a structural tag."""

from __future__ import annotations

from collections.abc import Sequence as List

import msgspec

from asyncllm.config.structural_tag import (
    AnyOf,
    AnyText,
    ConstString,
    JsonText,
    Pattern,
    Sequence,
    Tag,
    TagPart,
    TagsWithSeparator,
    TriggeredTags,
)
from asyncllm.text.grammars.lark import WHITE_SPACE, Lark, escaped

__all__ = ["tag_rule"]


def tag_rule(rules: Lark, source: str) -> str:
    """Return the rule for the part whose JSON text is `source`."""
    part: TagPart = msgspec.json.decode(source, type=TagPart)
    return _part(rules, part, ())


def _part(rules: Lark, part: TagPart, ends: List[str]) -> str:
    """Return the rule for a part and one of `ends`, if there are any."""
    match part:
        case ConstString():
            return f"{rules.literal(part.value)} {_one_of(rules, ends)}"
        case JsonText():
            return f"{rules.json(part.json_schema, white_space=WHITE_SPACE)} {_one_of(rules, ends)}"
        case Pattern():
            return f"{rules.pattern(part.pattern)} {_one_of(rules, ends)}"
        case AnyText():
            return _text(rules, part.excludes, ends)
        case Sequence():
            *first, last = part.elements
            return " ".join([*(_part(rules, each, ()) for each in first), _part(rules, last, ends)])
        case AnyOf():
            return _any([_part(rules, each, ends) for each in part.elements])
        case Tag():
            return _tag(rules, part, "", ends)
        case TriggeredTags():
            return _triggered(rules, part, ends)
        case TagsWithSeparator():
            tag = rules.rule(_any([_tag(rules, each, "", ()) for each in part.tags]))
            more = "" if part.stop_after_first else f"({rules.literal(part.separator)} {tag})*"
            return f"({tag} {more}){'' if part.at_least_one else '?'} {_one_of(rules, ends)}"


def _triggered(rules: Lark, part: TriggeredTags, ends: List[str]) -> str:
    tags: dict[str, list[str]] = {}
    for tag in part.tags:
        trigger = part.trigger_of(tag) or ""
        tags.setdefault(trigger, []).append(_tag(rules, tag, trigger, ()))
    after = {trigger: rules.rule(_any(found)) for trigger, found in tags.items()}
    first = _any([f"{rules.literal(trigger)} {rest}" for trigger, rest in after.items()])
    later = _any([f"{rules.until(trigger)} {rest}" for trigger, rest in after.items()])
    text = _text(rules, [trigger for trigger in tags if rules.special(trigger) is None], ends)
    if part.stop_after_first:
        close = _one_of(rules, ends)
        return f"{first} {close}" if part.at_least_one else _any([f"{later} {close}", text])
    return f"{first if part.at_least_one else ''} {later}* {text}"


def _tag(rules: Lark, tag: Tag, begun: str, ends: List[str]) -> str:
    """Return the rule for a tag, of which `begun` is written already, and one of `ends`."""
    begin = rules.literal(tag.begin.removeprefix(begun))
    if not tag.ends:
        return f"{begin} {_part(rules, tag.content, ends)}"
    return f"{begin} {_part(rules, tag.content, tag.ends)} {_one_of(rules, ends)}"


def _text(rules: Lark, excludes: List[str], ends: List[str]) -> str:
    """Return the rule for any text without `excludes`, up to one of `ends`."""
    text = rules.text_without([rf"(.|\n)*{escaped(each)}(.|\n)*" for each in excludes if each])
    return _any([rules.until(end, text) for end in ends]) if ends else text


def _one_of(rules: Lark, texts: List[str]) -> str:
    return _any([rules.literal(text) for text in texts]) if texts else ""


def _any(rules: List[str]) -> str:
    return f"({' | '.join(rules)})"
