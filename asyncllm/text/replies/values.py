"""Convert call arguments that models do not write as JSON to JSON while they arrive."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from asyncllm.text.replies.source import Reading, Source

__all__ = ["ArgumentsWriter", "properties_of", "read_literal", "types_of"]

PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
KINDS: Mapping[type, frozenset[str]] = {
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    str: frozenset({"string"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
    type(None): frozenset({"null"}),
}
MAX_DEPTH = 64
WORD = re.compile(r"[\w.+-]")


def properties_of(schema: Any) -> Mapping[str, Any]:
    """Return the schemas of the parameters that a tool's schema names."""
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def types_of(schema: Any) -> frozenset[str]:
    """Return the JSON types that a parameter may have; empty: any."""
    if not isinstance(schema, Mapping):
        return frozenset()
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(each for each in named if isinstance(each, str))
    if isinstance(values := schema.get("enum"), list):
        return frozenset().union(*(KINDS.get(type(value), frozenset()) for value in values))
    for name in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(name), list):
            found = [types_of(part) for part in parts]
            return frozenset().union(*found) if all(found) else frozenset()
    return frozenset()


class ArgumentsWriter:
    """Writes an object's JSON piece by piece, as `json.dumps` would."""

    def __init__(self, sink: Callable[[str], None]) -> None:
        self._sink = sink
        self._first = True

    def begin(self) -> None:
        self._sink("{")

    def key(self, name: str) -> None:
        self._sink(f"{'' if self._first else ', '}{_dumped(name)}: ")
        self._first = False

    def open_string(self) -> None:
        self._sink('"')

    def string_piece(self, text: str) -> None:
        self._sink(_dumped(text)[1:-1])

    def raw(self, text: str) -> None:
        """Write JSON text."""
        self._sink(text)

    def value(self, text: str, types: frozenset[str]) -> None:
        """Write a value that was given as text: as one of the `types` if it is one, otherwise as a string."""
        self._sink(_as_json(text, types))

    def end(self) -> None:
        self._sink("}")


def _as_json(text: str, types: frozenset[str]) -> str:
    stripped = text.strip()
    candidate = PYTHON_WORDS.get(stripped, stripped)
    if candidate.lower() in ("true", "false", "null") and (not types or "string" not in types):
        candidate = candidate.lower()
    try:
        value = json.loads(candidate, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return _dumped(text)
    kinds = KINDS[type(value)]
    if not types or kinds & types:
        return candidate
    return _dumped(text)


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _dumped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def read_literal(source: Source, depth: int = 0) -> Reading:
    """Read a literal of Python or JSON and return it as JSON; None if there is none."""
    first = yield from source.peek()
    if first in ("'", '"') and first:
        return (yield from _quoted(source, first))
    if first in ("[", "(", "{") and first:
        if depth >= MAX_DEPTH:
            return None
        return (yield from _collection(source, first, depth))
    word = yield from source.matching(WORD)
    word = PYTHON_WORDS.get(str(word), str(word))
    if word in ("true", "false", "null"):
        return word
    try:
        number = json.loads(word, parse_constant=_no_constant)
    except ValueError:
        return None
    return word if isinstance(number, int | float) else None


def _collection(source: Source, first: str, depth: int) -> Reading:
    closing = {"[": "]", "(": ")", "{": "}"}[first]
    yield from source.literal(first)
    parts: list[str] = []
    while True:
        yield from source.space()
        if (yield from source.literal(closing)):
            break
        if parts:
            if not (yield from source.literal(",")):
                return None
            yield from source.space()
            if (yield from source.literal(closing)):
                break
        value = yield from read_literal(source, depth + 1)
        if value is None:
            return None
        if first == "{":
            yield from source.space()
            if not value.startswith('"') or not (yield from source.literal(":")):
                return None
            yield from source.space()
            entry = yield from read_literal(source, depth + 1)
            if entry is None:
                return None
            value = f"{value}: {entry}"
        parts.append(value)
    return f"{{{', '.join(parts)}}}" if first == "{" else f"[{', '.join(parts)}]"


ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


def _quoted(source: Source, quote: str) -> Reading:
    yield from source.literal(quote)
    plain = re.compile(f"[^\\\\{quote}\udc00-\udfff]")
    parts: list[str] = []
    while True:
        parts.append((yield from source.matching(plain)))
        if (yield from source.literal(quote)):
            break
        if not (yield from source.literal("\\")):
            return None
        letter = yield from source.character()
        if not letter:
            return None
        if letter in HEX_DIGITS:
            digits = ""
            for _ in range(HEX_DIGITS[letter]):
                digits += yield from source.character()
            try:
                parts.append(chr(int(digits, 16)))
            except (ValueError, OverflowError):
                return None
        else:
            # A backslash in front of anything else stands for itself, as in Python.
            parts.append(ESCAPES.get(letter, letter if letter in "\\'\"/" else f"\\{letter}"))
    # Surrogates that are spelled out in pairs make one character.
    text = "".join(parts).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return _dumped(text)
