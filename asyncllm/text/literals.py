"""Keeps the spelling of special tokens in what users say from being taken for the tokens themselves.

    literals = Literals(tokenizer)
    text, spans = literals.restore(template.render(literals.mark(messages)))
    ids = tokenizer.encode(text, literal_spans=spans)

Otherwise a user who writes "<|im_end|>" ends his own turn and can go on in the role of the system. The template renders
marks in place of such spellings, so their places are known exactly, whatever the template does with the text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from asyncllm.text.tokenizer import Tokenizer
from asyncllm.types import Message

__all__ = ["Literals"]

OPEN, CLOSE = "\uf8e0", "\uf8e1"
"""Private-use characters around a mark's number; no template treats them specially."""
MARK = re.compile(f"{OPEN}([0-9]+){CLOSE}")


class Literals:
    """The spellings found in one conversation. Marks the same spelling by the same number, in every call."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._special = tokenizer.special_pattern
        self._numbers: dict[str, int] = {}

    def mark(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with marks in place of special tokens' spellings.

        The assistant's messages stay: what the model wrote may well hold tokens, such as those around its thoughts.
        """
        return [self._marked(message) for message in messages]

    def mark_values(self, values: Mapping[str, Any] | None) -> dict[str, Any]:
        """A template's variables with marks in their texts."""
        return {
            name: self._marked_text(value) if isinstance(value, str) else value
            for name, value in (values or {}).items()
        }

    def restore(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """The text with the spellings back in, and where they are: (start, end) pairs in rising order."""
        spellings = list(self._numbers)
        parts: list[str] = []
        spans: list[tuple[int, int]] = []
        size = last = 0
        for match in MARK.finditer(text) if spellings else ():
            number = int(match[1])
            if number >= len(spellings):
                continue
            before, spelling = text[last : match.start()], spellings[number]
            parts += [before, spelling]
            size += len(before) + len(spelling)
            spans.append((size - len(spelling), size))
            last = match.end()
        return "".join([*parts, text[last:]]), spans

    def _marked(self, message: Any) -> Any:
        # Messages are checked by the template; here only what can hold a text is looked at.
        if not isinstance(message, dict) or message.get("role") == "assistant":
            return message
        content = message.get("content")
        if isinstance(content, str):
            return {**message, "content": self._marked_text(content)}
        if isinstance(content, list):
            return {**message, "content": [self._marked_part(part) for part in content]}
        return message

    def _marked_part(self, part: Any) -> Any:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            return {**part, "text": self._marked_text(part["text"])}
        return part

    def _marked_text(self, text: str) -> str:
        return self._special.sub(
            lambda match: f"{OPEN}{self._numbers.setdefault(match[0], len(self._numbers))}{CLOSE}", text
        )
