"""Gemma's call format: call:NAME{key:value}, with bare keys and texts between marks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from asyncllm.errors import UnsupportedFeature
from asyncllm.text.replies.call_rules import CalledTool, CallGrammar, CallRules, checked_names, names_of
from asyncllm.text.replies.reader import Reader, ToolFormat
from asyncllm.text.replies.source import Reading
from asyncllm.text.replies.values import MAX_DEPTH, ArgumentsWriter, properties_of, read_literal, types_of

__all__ = ["FUNCTIONGEMMA", "GEMMA4"]

NAME = re.compile(r"[\w.-]")
SCALARS = frozenset({"string", "integer", "number", "boolean", "null"})
BARE = re.compile("[^,\\]}\udc00-\udfff]")


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

    grammar = _grammar(opener, closer, quote)
    return ToolFormat(name, (opener,), read, inside=(closer, quote), grammars=(grammar,))


KEYWORDS = {"type", "properties", "required", "items", "enum", "const", "additionalProperties"}
"""Keywords that determine a value's rules."""
BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
"""Keywords that limit numbers."""
ANNOTATIONS = {"title", "description", "default", "examples", "$schema"}


def _grammar(opener: str, closer: str, quote: str) -> CallGrammar:
    def rules(grammar: CallRules) -> str:
        calls = []
        for tool in grammar.tools:
            checked_names(tool, r"[^\w.-]")
            arguments = _object_rules(grammar, tool, tool.prepared, quote, 0)
            calls.append(grammar.rule(f"{grammar.literal('call:' + tool.name)} {arguments} {grammar.literal(closer)}"))
        return grammar.several(grammar.rule(" | ".join(calls)), opener, "")

    return CallGrammar(opener, rules)


def _object_rules(grammar: CallRules, tool: CalledTool, schema: Any, quote: str, depth: int) -> str:
    entries = []
    for name, needed in names_of(schema):
        value = _value_rules(grammar, tool, properties_of(schema).get(name, {}), quote, depth + 1)
        key = name if NAME.fullmatch(name[:1]) and re.fullmatch(r"[\w.-]+", name) else f"{quote}{name}{quote}"
        entries.append((grammar.rule(f"{grammar.literal(key + ':')} {value}"), needed))
    return grammar.rule(f"{grammar.literal('{')} {grammar.listed(entries, ',')} {grammar.literal('}')}")


def _value_rules(grammar: CallRules, tool: CalledTool, schema: Any, quote: str, depth: int) -> str:
    """Return the rule for a value of a schema, from its types, properties and items."""
    if not isinstance(schema, Mapping):
        schema = {}
    if (tool.strict and set(schema) - KEYWORDS - BOUNDS - ANNOTATIONS) or depth > MAX_DEPTH:
        raise UnsupportedFeature(
            f"The tool {tool.name!r} is strict, and the model's format of calls is held to types, properties, items "
            f"and lists of values alone. Leave strict out, or the other keywords: "
            f"{', '.join(sorted(set(schema) - KEYWORDS - BOUNDS - ANNOTATIONS))}.",
            "tools",
        )
    text = f"{grammar.literal(quote)} {grammar.until(quote)}"
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values and not any(isinstance(value, dict) for value in values):
        written = [f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value) for value in values]
        return grammar.rule(" | ".join(map(grammar.literal, written)))
    rules = []
    for kind in sorted(types_of(schema) or {"string", "number", "boolean", "null"}):
        match kind:
            case "object":
                rules.append(_object_rules(grammar, tool, schema, quote, depth))
            case "array":
                item = _value_rules(grammar, tool, schema.get("items"), quote, depth + 1)
                rules.append(f'"[" ({item} ("," {item})*)? "]"')
            case "string":
                rules.append(text)
            case _:
                bounds = {key: schema[key] for key in BOUNDS & set(schema)}
                rules.append(grammar.json({"type": kind, **bounds}, lenient=not tool.strict))
    return grammar.rule(" | ".join(rules))


def _object(reader: Reader, quote: str, depth: int) -> Reading:
    """Read an object and write it as JSON. Return whether it is complete."""
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
        writer.quote()
        closed = yield from source.until(reader.markers(quote), writer.string_piece)
        if closed is not None:
            writer.quote()
        return closed is not None
    first = yield from source.peek()
    if first == "{":
        return (yield from _object(reader, quote, depth))
    if first == "[":
        return (yield from _list(reader, quote, depth))
    if first in ("'", '"') and first:
        literal = yield from read_literal(source)
        reader.output.arguments(literal or "")
        return literal is not None
    # Some replies leave the marks of a text out.
    bare = yield from source.matching(BARE)
    if not (yield from source.peek()):
        return False
    ArgumentsWriter(reader.output.arguments).value(bare.strip(), SCALARS)
    return True


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
