"""The grammar of a structural tag."""

from __future__ import annotations

from collections.abc import Sequence as List

import msgspec

from asyncllm.config.structured_output.structural_tag import (
    AnyOf,
    AnyText,
    AnyTokens,
    ConstString,
    Grammar,
    JsonText,
    Pattern,
    Repeat,
    Sequence,
    Tag,
    TagPart,
    TagsWithSeparator,
    Token,
    TriggeredTags,
)
from asyncllm.errors import InvalidParameter, short
from asyncllm.text.grammars.lark import ANY_TEXT, WHITE_SPACE, Lark, escaped
from asyncllm.text.grammars.parameters import parameters_rule

__all__ = ["tag_rule"]

End = str | Token


def tag_rule(rules: Lark, source: str, field: str, stops: List[int]) -> str:
    """Return the rule for the part whose JSON text is `source`. `stops`: tokens that end an answer. Raises
    InvalidParameter for what the model's tokenizer or its format of parameters lacks."""
    part: TagPart = msgspec.json.decode(source, type=TagPart)
    return _TagRules(rules, field, stops).part(part, ())


class _TagRules:
    """Writes the rules of one structural tag."""

    def __init__(self, rules: Lark, field: str, stops: List[int]) -> None:
        self._rules = rules
        self._field = field
        self._stops = stops

    def part(self, part: TagPart, ends: List[End]) -> str:
        """Return the rule for a part and one of `ends`, if there are any."""
        rules = self._rules
        match part:
            case AnyText():
                return self._text(part.excludes, ends)
            case AnyTokens():
                return self._tokens(part, ends)
            case Sequence():
                *first, last = part.elements
                return " ".join([*(self.part(each, ()) for each in first), self.part(last, ends)])
            case AnyOf():
                return _any([self.part(each, ends) for each in part.elements])
            case Repeat(0, 1):
                return _any([self.part(part.content, ends), self._one_of(ends) or '""'])
            case Tag():
                return self._tag(part, "", ends)
            case TriggeredTags():
                return self._triggered(part, ends)
            case TagsWithSeparator():
                tag = rules.rule(_any([self._tag(each, "", ()) for each in part.tags]))
                more = "" if part.stop_after_first else f"({rules.literal(part.separator)} {tag})*"
                return f"({tag} {more}){'' if part.at_least_one else '?'} {self._one_of(ends)}"
        return f"{self._ending(part)} {self._one_of(ends)}"

    def _ending(self, part: TagPart) -> str:
        """Return the rule for a part that has an end of its own."""
        rules = self._rules
        match part:
            case ConstString():
                return rules.literal(part.value)
            case JsonText(style="json"):
                count = part.max_whitespace_cnt
                space = WHITE_SPACE if count is None else rf"[ \n\t]{{0,{count}}}"
                return rules.json(part.json_schema, white_space=space)
            case JsonText():
                return parameters_rule(rules, part, self._field)
            case Pattern():
                return rules.pattern(part.pattern)
            case Grammar():
                return rules.grammar(part.grammar, self._field)
            case Token():
                return self._literal(part)
            case Repeat(least, most):
                content = rules.rule(self.part(part.content, ()))
                return f"{content}{{{least},{'' if most < 0 else most}}}" if most else '""'
        raise AssertionError(part)

    def _triggered(self, part: TriggeredTags, ends: List[End]) -> str:
        rules = self._rules
        tags: dict[str, list[str]] = {}
        for tag in part.tags:
            trigger = part.trigger_of(tag) or ""
            tags.setdefault(trigger, []).append(self._tag(tag, trigger, ()))
        after = {trigger: rules.rule(_any(found)) for trigger, found in tags.items()}
        first = _any([f"{rules.literal(trigger)} {rest}" for trigger, rest in after.items()])
        plain = [trigger for trigger in tags if rules.special(trigger) is None]

        def before(trigger: str) -> str:
            others = [each for each in plain if each not in trigger and trigger not in each]
            return self._without([*part.excludes, *others]) if part.excludes or others else ANY_TEXT

        later = _any([f"{rules.until(trigger, before(trigger))} {rest}" for trigger, rest in after.items()])
        text = self._text([*part.excludes, *plain], ends)
        if part.stop_after_first:
            close = self._one_of(ends)
            return f"{first} {close}" if part.at_least_one else _any([f"{later} {close}", text])
        return f"{first if part.at_least_one else ''} {later}* {text}"

    def _tag(self, tag: Tag, begun: str, ends: List[End]) -> str:
        """Return the rule for a tag, of which `begun` is written already, and one of `ends`."""
        begin = tag.begin if isinstance(tag.begin, Token) else tag.begin.removeprefix(begun)
        if not tag.ends:
            return f"{self._literal(begin)} {self.part(tag.content, ends)}"
        return f"{self._literal(begin)} {self.part(tag.content, tag.ends)} {self._one_of(ends)}"

    def _text(self, excludes: List[str], ends: List[End]) -> str:
        """Return the rule for any text without `excludes`, up to one of `ends`."""
        text = self._without(excludes)
        return _any([self._until(end, text) for end in ends]) if ends else text

    def _until(self, end: End, text: str) -> str:
        return f"{text} {self._literal(end)}" if isinstance(end, Token) else self._rules.until(end, text)

    def _without(self, excludes: List[str]) -> str:
        return self._rules.text_without([rf"(.|\n)*{escaped(each)}(.|\n)*" for each in excludes if each])

    def _tokens(self, part: AnyTokens, ends: List[End]) -> str:
        """Return the rule for any tokens, up to one of `ends`."""
        closing = [self._rules.special(end) if isinstance(end, str) else self._id(end) for end in ends]
        if None in closing:
            raise InvalidParameter(
                f"The structural tag of {self._field} has any_tokens in a tag whose end is a text. Let it end with a "
                f"special token, or send any_text.",
                self._field,
            )
        excluded = {*map(self._id, map(Token, part.exclude_tokens)), *closing, *self._stops}
        return f"<[^{','.join(map(str, sorted(each for each in excluded if each is not None)))}]>* {self._one_of(ends)}"

    def _id(self, token: Token) -> int:
        """Return the id of a token. Raises InvalidParameter if the tokenizer has no such special token."""
        found = token.token if isinstance(token.token, int) else self._rules.special(token.token)
        if found is None or not self._rules.has_token(found):
            raise InvalidParameter(
                f"The structural tag of {self._field} names a token {short(token.token)}, which the model's tokenizer "
                f"does not have as a special token. Correct it, or send its id.",
                self._field,
            )
        return found

    def _literal(self, text: End) -> str:
        return f"<[{self._id(text)}]>" if isinstance(text, Token) else self._rules.literal(text)

    def _one_of(self, ends: List[End]) -> str:
        return _any([self._literal(end) for end in ends]) if ends else ""


def _any(rules: List[str]) -> str:
    return f"({' | '.join(rules)})"
