"""Convert call arguments that models do not write as JSON to JSON while they arrive."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from asyncllm.text.replies.source import Codes, Reading, Source

__all__ = ["ArgumentsWriter", "properties_of", "read_literal", "read_value", "types_of"]

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
OTHER_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("str", "text"), "string"),
    **dict.fromkeys(("int", "long"), "integer"),
    **dict.fromkeys(("float", "double"), "number"),
    "bool": "boolean",
    "dict": "object",
    **dict.fromkeys(("list", "tuple"), "array"),
}
"""Names of types that clients write in place of JSON Schema's."""
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
        return frozenset({OTHER_NAMES.get(named, named)})
    if isinstance(named, list):
        return frozenset(OTHER_NAMES.get(each, each) for each in named if isinstance(each, str))
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

    def quote(self) -> None:
        """Write the quotation mark before or after a string."""
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


def read_value(
    writer: ArgumentsWriter, types: frozenset[str], read: Callable[[Callable[[str], None]], Reading]
) -> Reading:
    """Write a value of the `types`, given as text; a string is written as it arrives. `read` passes the text to a sink,
    and returns None if it is cut. Return what it returned."""
    if types == {"string"}:
        writer.quote()
        end = yield from read(writer.string_piece)
        if end is not None:
            writer.quote()
        return end
    parts: list[str] = []
    end = yield from read(parts.append)
    if end is None:
        writer.quote()
        writer.string_piece("".join(parts))
    else:
        writer.value("".join(parts), types)
    return end


def _as_json(text: str, types: frozenset[str]) -> str:
    stripped = text.strip()
    candidate = PYTHON_WORDS.get(stripped, stripped)
    if candidate.lower() in ("true", "false", "null") and (not types or "string" not in types):
        candidate = candidate.lower()
    try:
        value = json.loads(candidate, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        literal = _literal_of(stripped) if not types or types & {"array", "object"} else None
        if literal is None and types & {"integer", "number"}:
            literal = _number(stripped)
        if literal is None:
            return _dumped(text)
        candidate, value = literal, json.loads(literal)
    kinds = KINDS[type(value)]
    if not types or kinds & types:
        return candidate
    return _dumped(text)


def _literal_of(text: str) -> str | None:
    """Return a list or a dict that Python would read, as JSON; None if the text is neither."""
    source = Source(Codes())
    source.feed(text)
    source.close()

    def whole() -> Reading:
        value = yield from read_literal(source)
        return value if text[:1] in ("[", "{") and not (yield from source.peek()) else None

    try:
        next(whole())
    except StopIteration as end:
        found: str | None = end.value
        return found
    raise AssertionError("a closed source waits for no more text")


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _dumped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def read_literal(source: Source, depth: int = 0) -> Reading:
    """Read a literal of Python or JSON and return it as JSON; None if there is none. A set becomes a list."""
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
    return _number(str(word))


def _number(word: str) -> str | None:
    """Return a number of JSON or Python as JSON; None if the word is none. Leading zeros are dropped."""
    try:
        json.loads(word, parse_constant=_no_constant)
        return word
    except ValueError:
        pass
    for kind in (int, float):
        try:
            return json.dumps(kind(word), allow_nan=False)
        except ValueError:
            continue
    return None


def _collection(source: Source, first: str, depth: int) -> Reading:
    closing = {"[": "]", "(": ")", "{": "}"}[first]
    yield from source.literal(first)
    parts: list[str] = []
    is_dict = first == "{"
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
        if is_dict:
            yield from source.space()
            if not parts and (yield from source.peek()) in (",", "}"):
                is_dict = False
                parts.append(value)
                continue
            if not value.startswith('"') or not (yield from source.literal(":")):
                return None
            yield from source.space()
            entry = yield from read_literal(source, depth + 1)
            if entry is None:
                return None
            value = f"{value}: {entry}"
        parts.append(value)
    return f"{{{', '.join(parts)}}}" if is_dict else f"[{', '.join(parts)}]"


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
