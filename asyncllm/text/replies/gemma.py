"""Gemma's calls: call:NAME{key:value}, with bare keys and texts between marks."""

from __future__ import annotations

import re

from asyncllm.text.replies.reader import Reader, ToolFormat
from asyncllm.text.replies.source import Reading
from asyncllm.text.replies.values import MAX_DEPTH, ArgumentsWriter, read_literal

__all__ = ["FUNCTIONGEMMA", "GEMMA4"]

NAME = re.compile(r"[\w.-]")


def _format(name: str, opener: str, closer: str, quote: str) -> ToolFormat:
    def read(reader: Reader, marker: str) -> Reading:
        source, output = reader.source, reader.output
        if not (yield from source.literal("call:")):
            return False
        tool = yield from source.matching(NAME)
        if not tool or (yield from source.peek()) != "{":
            return False
        output.start(tool)
        complete = yield from _object(reader, quote, 0)
        output.finish(complete=complete)
        yield from source.space()
        yield from source.literal(closer)
        return True

    return ToolFormat(name, (opener,), read, inside=(closer, quote))


def _object(reader: Reader, quote: str, depth: int) -> Reading:
    """Read an object and write it as JSON. Returns whether it came to its end."""
    source = reader.source
    writer = ArgumentsWriter(reader.output.arguments)
    yield from source.literal("{")
    writer.begin()
    first = True
    while True:
        yield from source.space()
        if (yield from source.literal("}")):
            writer.end()
            return True
        if not first and not (yield from source.literal(",")):
            return False
        first = False
        yield from source.space()
        key: list[str] = []
        if (yield from source.literal(quote)):
            if (yield from source.until(reader.markers(quote), key.append)) is None:
                return False
        else:
            key.append((yield from source.matching(NAME)))
        yield from source.space()
        if not key[0] or not (yield from source.literal(":")):
            return False
        yield from source.space()
        writer.key("".join(key))
        if not (yield from _value(reader, quote, depth + 1)):
            return False


def _value(reader: Reader, quote: str, depth: int) -> Reading:
    source = reader.source
    if depth > MAX_DEPTH:
        return False
    if (yield from source.literal(quote)):
        writer = ArgumentsWriter(reader.output.arguments)
        writer.open_string()
        closed = yield from source.until(reader.markers(quote), writer.string_piece)
        if closed is not None:
            writer.open_string()
        return closed is not None
    first = yield from source.peek()
    if first == "{":
        return (yield from _object(reader, quote, depth))
    if first == "[":
        return (yield from _list(reader, quote, depth))
    literal = yield from read_literal(source)
    reader.output.arguments(literal or "")
    return literal is not None


def _list(reader: Reader, quote: str, depth: int) -> Reading:
    source = reader.source
    yield from source.literal("[")
    reader.output.arguments("[")
    first = True
    while True:
        yield from source.space()
        if (yield from source.literal("]")):
            reader.output.arguments("]")
            return True
        if not first:
            if not (yield from source.literal(",")):
                return False
            reader.output.arguments(", ")
            yield from source.space()
        first = False
        if not (yield from _value(reader, quote, depth + 1)):
            return False


GEMMA4 = _format("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTIONGEMMA = _format("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>")
