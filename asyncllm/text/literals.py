"""Literals keeps spellings of special tokens in user text from being read as the tokens themselves.

    literals = Literals(tokenizer)
    text, spans = literals.restore(template.render(literals.mark(messages)))
    ids = tokenizer.encode(text, literal_spans=spans)

Otherwise a user who writes "<|im_end|>" would end the turn and could continue in the role of the system. The template
renders marks instead of such spellings, so their positions are known exactly, whatever the template does with the text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from asyncllm.errors import InvalidMessage
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.types import Message

__all__ = ["Literals"]

NUMBER_DIGITS = 7
FORMAT_KEYS = frozenset({"role", "type"})
"""Keys whose values a template compares with known ones. A role that no chat has is refused anyway."""


class Literals:
    """The spellings found in one conversation. Each spelling has one number, in all calls.

    A mark begins with digits that are drawn per conversation, so no client can write one. It consists only of digits,
    because templates leave them unchanged whatever they do to a text: trimming, quoting, changing case.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._spellings = tokenizer.spellings
        self._numbers: dict[str, int] = {}
        self._opening = str(10**17 + secrets.randbelow(9 * 10**17))
        self._mark = re.compile(f"{self._opening}([0-9]{{{NUMBER_DIGITS}}})")

    def mark(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with marks in place of special tokens' spellings in all texts, including the assistant's.

        The end of a text that the next text could complete to a spelling is marked too. Raises InvalidMessage for
        messages that are nested too deeply.
        """
        # The template checks messages; here only values that can contain a text matter.
        try:
            return [self._marked(message) if isinstance(message, dict) else message for message in messages]
        except RecursionError:
            raise InvalidMessage("The messages are nested too deeply. Send flatter ones.") from None

    def mark_values(self, values: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return a template's variables with marks in their texts."""
        return {name: self._marked(value) for name, value in (values or {}).items()}

    def mark_text(self, text: str) -> str:
        """Return the text with marks in place of special tokens' spellings."""
        parts: list[str] = []
        last = 0
        for match in self._spellings.pattern.finditer(text):
            parts += [text[last : match.start()], self._mark_of(match[0])]
            last = match.end()
        end = self._spellings.open_end(text, last)
        if text[end:].strip() == "":  # A template may trim it.
            return "".join([*parts, text[last:]]) if parts else text
        return "".join([*parts, text[last:end], self._mark_of(text[end:])])

    def restore(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """Return the text with the spellings restored, and their positions: (start, end) pairs in ascending order."""
        spellings = list(self._numbers)
        parts: list[str] = []
        spans: list[tuple[int, int]] = []
        size = last = 0
        for match in self._mark.finditer(text) if spellings else ():
            number = int(match[1])
            if number >= len(spellings):  # The template has cut a mark.
                continue
            before, spelling = text[last : match.start()], spellings[number]
            parts += [before, spelling]
            size += len(before) + len(spelling)
            spans.append((size - len(spelling), size))
            last = match.end()
        return "".join([*parts, text[last:]]), spans

    def _mark_of(self, spelling: str) -> str:
        return f"{self._opening}{self._numbers.setdefault(spelling, len(self._numbers)):0{NUMBER_DIGITS}}"

    def _marked(self, value: Any, key: object = None) -> Any:
        match value:
            case str():
                if key in FORMAT_KEYS:
                    return value
                return self._marked_arguments(value) if key == "arguments" else self.mark_text(value)
            case dict():
                return {self._marked_name(name): self._marked(part, name) for name, part in value.items()}
            case list() | tuple():
                return [self._marked(part) for part in value]
        return value

    def _marked_name(self, name: Any) -> Any:
        # A template compares names with known ones, so only spellings inside them are marked.
        return (
            self._spellings.pattern.sub(lambda match: self._mark_of(match[0]), name) if isinstance(name, str) else name
        )

    def _marked_arguments(self, text: str) -> str:
        """Return the marked arguments of a call, which may be JSON: a template may decode the escapes in it."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return self.mark_text(text)
        marked = self._marked(value)
        return self.mark_text(text if marked == value else json.dumps(marked, ensure_ascii=False))
