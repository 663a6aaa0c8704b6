"""Calls written as JSON objects: a name and arguments, in any order, alone or in a list."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from asyncllm.text.replies.reader import Reader
from asyncllm.text.replies.source import Reading

__all__ = ["CALL_KEYS", "Keys", "read_calls", "read_list", "read_object"]


class Keys(NamedTuple):
    """Names of the fields of a call object."""

    name: frozenset[str]
    arguments: frozenset[str]
    both: bool = False
    """Whether an object without arguments is not a call."""
    known: bool = False
    """Whether an object that names no tool of the request is not a call."""


CALL_KEYS = Keys(frozenset({"name"}), frozenset({"arguments", "parameters"}))


def read_calls(reader: Reader, keys: Keys = CALL_KEYS) -> Reading:
    """Read an object or a list of them. Return whether it was a call."""
    source = reader.source
    yield from source.space()
    if not (yield from source.literal("[")):
        return (yield from read_object(reader, keys))
    return (yield from read_list(reader, keys))


def read_list(reader: Reader, keys: Keys, first: str | None = None) -> Reading:
    """Read a list whose bracket has been read. Return whether its first object was a call. `first`: the first key of
    that object, if it and the bracket before it have been read."""
    if not (yield from read_object(reader, keys, first)):
        return False
    while (yield from reader.attempt(_further_object(reader, keys))):
        pass
    yield from reader.source.space()
    yield from reader.source.literal("]")
    return True


def _further_object(reader: Reader, keys: Keys) -> Reading:
    """Read a comma and another call."""
    yield from reader.source.space()
    return (yield from reader.source.literal(",")) and (yield from read_object(reader, keys))


def read_object(reader: Reader, keys: Keys = CALL_KEYS, first: str | None = None) -> Reading:
    """Read one call and return whether it was one. If not, the source keeps the text that was read. `first`: the first
    key, if it and the bracket before it have been read."""
    source, output = reader.source, reader.output
    yield from source.space()
    if first is None and not (yield from source.literal("{")):
        return False
    name: str | None = None
    early: list[str] | None = None
    begun = complete = False
    while True:
        yield from source.space()
        key, first = first, None
        if key is None:
            if (yield from source.literal("}")):
                break
            yield from source.literal(",")
            yield from source.space()
            key = yield from source.json_string()
        if key is not None:
            yield from source.space()
        if key is None or not (yield from source.literal(":")):
            if begun:
                # The arguments are complete; the rest is text.
                output.finish(complete=complete)
            return begun
        yield from source.space()
        if key in keys.name and not begun:
            name = yield from source.json_string()
            if not name or (keys.known and name not in reader.tools):
                return False
        elif key in keys.arguments and not begun:
            if name is None:
                early = []
                complete = yield from _arguments(reader, early.append)
                continue
            output.start(name)
            begun = True
            complete = yield from _arguments(reader, output.arguments)
            if not complete:
                output.finish(complete=False)
                return True
        else:
            yield from source.json_value(_drop)
    if not begun:
        if name is None or (keys.both and early is None):
            return False
        output.start(name)
        output.arguments("{}" if early is None else "".join(early))
        complete = complete or early is None
    output.finish(complete=complete)
    return True


def _arguments(reader: Reader, sink: Callable[[str], None]) -> Reading:
    """Read arguments. Some models write them as a string of JSON, or as null if there are none."""
    source = reader.source
    first = yield from source.peek()
    if first == '"':
        text = yield from source.json_string()
        sink(_from_text(text or ""))
        return text is not None
    if first in ("{", "["):
        return (yield from source.json_value(sink))
    parts: list[str] = []
    complete = yield from source.json_value(parts.append)
    text = "".join(parts)
    sink("{}" if text == "null" else text)
    return complete


def _from_text(text: str) -> str:
    """Return the JSON of arguments that were written as a string: what it holds if that is an object, else itself."""
    if not text.strip():
        return "{}"
    try:
        return text if isinstance(json.loads(text), dict) else json.dumps(text, ensure_ascii=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def _drop(piece: str) -> None:
    pass
