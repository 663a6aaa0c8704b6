"""Lark writes llguidance grammars rule by rule. They refer to a special token by its id.

Syntax: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from asyncllm.errors import InvalidParameter
from asyncllm.text.tokenizer import Tokenizer

__all__ = ["ANY_TEXT", "Lark", "as_lark", "escaped"]

ANY_TEXT = "/(.|\\n)*/"
"""Any text without special tokens."""

IN_SLASHES = {"/": r"\/", "\n": r"\n"}

REGEX_CHARACTERS = re.compile(r"[^A-Za-z0-9_ ]")

TIGHT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space between JSON's tokens as models' templates write it, which forces most tokens of a call."""
WHITE_SPACE = r"( |\n[ \t]{0,40})"
"""White space between JSON's tokens: one space, or a line end with an indent. With unbounded white space models may
never stop writing it."""
LENIENT = {"lenient": True, "coerce_one_of": True}
"""Ignore unsupported keywords of a schema rather than refuse them."""
ESCAPES = {"json_allow_general_unicode_escapes": True}


def escaped(text: str) -> str:
    """Return a text escaped for Rust's regular expressions."""
    return REGEX_CHARACTERS.sub(lambda match: f"\\x{{{ord(match[0]):x}}}", text)


def as_lark(grammar: str, field: str) -> str:
    """Return a grammar in Lark, which may be in GBNF. Raises InvalidParameter for broken GBNF."""
    if "::=" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # its parser raises any kind of error
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise InvalidParameter(f"The grammar is not valid GBNF: {reason}. Correct it, or send Lark.", field) from None


class Lark:
    """A grammar under construction."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """`tokenizer`: spellings of its special tokens stand for these tokens. None: they are plain text."""
        self._tokenizer = tokenizer
        self._lines: list[str] = []
        self._known: dict[str, str] = {}
        """Body of a rule -> its name."""

    @property
    def text(self) -> str:
        """The rules so far."""
        return "\n".join(self._lines) + "\n"

    def rule(self, body: str, name: str | None = None, *, lazy: bool = False) -> str:
        """Add a rule and return its name. Equal rules share one. `lazy`: a single lexeme, which ends as early as
        possible."""
        known = self._known.get("[lazy]" * lazy + body)
        if known is not None and name is None:
            return known
        name = name or f"r{len(self._lines)}"
        self._known["[lazy]" * lazy + body] = name
        self._lines.append(f"{name}{'[lazy]' * lazy}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """Add a terminal, which is one regular expression, and return its name."""
        known = self._known.get(body)
        if known is None:
            known = self._known[body] = f"T{len(self._lines)}"
            self._lines.append(f"{known}: {body}")
        return known

    def literal(self, text: str) -> str:
        """Return the rule for a text, in which special tokens are tokens."""
        parts = [quoted if isinstance(quoted, str) else f"<[{quoted}]>" for quoted in self._parts(text)]
        return " ".join(parts) or '""'

    def special(self, text: str) -> int | None:
        """Return the id of the special token that a text begins with, or None."""
        for match in self._found(text):
            if match.start() == 0:
                return self._id(match[0])
        return None

    def until(self, closer: str, text: str = ANY_TEXT) -> str:
        """Return the rule for any `text` up to and including `closer`."""
        parts = self._parts(closer)
        if all(isinstance(part, str) for part in parts):
            return self.rule(f"{text} {' '.join(map(str, parts))}", lazy=True)
        rest = list(parts)
        if isinstance(rest[0], str):
            # It ends with the closer's beginning when the token arrives, or the token does not arrive.
            text = f"{text} {rest.pop(0)}"
        marks = [part if isinstance(part, str) else f"<[{part}]>" for part in rest]
        return " ".join([self.terminal(text), *marks])

    def text_without(self, patterns: Sequence[str]) -> str:
        """Return the rule for any text that none of the regular expressions matches completely."""
        return self.terminal(" & ".join([ANY_TEXT, *(f"~/{pattern}/" for pattern in patterns)]))

    def pattern(self, pattern: str) -> str:
        """Return the rule for a text that the regular expression matches."""
        closed = re.sub(r"\\.|/|\n", lambda match: IN_SLASHES.get(match[0], match[0]), pattern, flags=re.DOTALL)
        return self.terminal(f"/{closed}/")

    def json(self, schema: Any, *, white_space: str | None = None, lenient: bool = False) -> str:
        """Return the rule for a JSON value. `white_space`: expression for the space between its tokens; None: as
        templates write it."""
        options: dict[str, Any] = TIGHT if white_space is None else {"whitespace_pattern": white_space}
        options = options | (LENIENT if lenient else {}) | ESCAPES
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}")

    def grammar(self, grammar: str, field: str) -> str:
        """Return the rule for a text of a grammar in GBNF or Lark, whose rules are its own. Raises InvalidParameter."""
        return self.rule(f"%lark {{\n{as_lark(grammar, field)}\n}}")

    def has_token(self, token: int) -> bool:
        """Return whether the tokenizer has a token of this id."""
        return self._tokenizer is not None and token < self._tokenizer.vocab_size

    def _found(self, text: str) -> list[re.Match[str]]:
        return [] if self._tokenizer is None else list(self._tokenizer.spellings.pattern.finditer(text))

    def _id(self, spelling: str) -> int | None:
        return None if self._tokenizer is None else self._tokenizer.token_id(spelling)

    def _parts(self, text: str) -> list[str | int]:
        """Return a text as quoted strings and ids of special tokens."""
        parts: list[str | int] = []
        last = 0
        for match in self._found(text):
            token = self._id(match[0])
            if token is None:
                continue
            if match.start() > last:
                parts.append(json.dumps(text[last : match.start()]))
            parts.append(token)
            last = match.end()
        if last < len(text):
            parts.append(json.dumps(text[last:]))
        return parts
