"""Calls written as Python calls with keyword arguments: Llama 4, LFM2, Olmo 3."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from asyncllm.text.replies.call_rules import CallGrammar, CallRules, checked_names
from asyncllm.text.replies.json_calls import read_object
from asyncllm.text.replies.reader import Reader, ToolFormat
from asyncllm.text.replies.source import Reading
from asyncllm.text.replies.values import properties_of, read_literal, types_of

__all__ = ["LFM2", "OLMO3", "PYTHONIC"]

NAME = re.compile(r"[\w.-]")
START, END = "<|tool_call_start|>", "<|tool_call_end|>"
PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"


def _at_start(reader: Reader) -> Reading:
    return (yield from _listed(reader, _call))


def _listed(reader: Reader, read: Callable[[Reader], Reading]) -> Reading:
    """Read a list of calls, and the mark after it, which may be missing."""
    source = reader.source
    yield from source.space()
    if not (yield from source.literal("[")) or not (yield from read(reader)):
        return False
    while (yield from reader.attempt(_further(reader, read))):
        pass
    yield from source.space()
    yield from source.literal("]")
    yield from source.space()
    if not (yield from source.literal(END)):
        yield from source.literal(PYTHON_END)
    return True


def _further(reader: Reader, read: Callable[[Reader], Reading]) -> Reading:
    yield from reader.source.space()
    return (yield from reader.source.literal(",")) and (yield from read(reader))


def _call_or_object(reader: Reader) -> Reading:
    """Read a call of either kind: LFM2 writes JSON if its prompt asks for it."""
    yield from reader.source.space()
    read = read_object if (yield from reader.source.peek()) == "{" else _call
    return (yield from read(reader))


def _call(reader: Reader) -> Reading:
    """Read one whole call, since only its end distinguishes it from other bracketed text."""
    source, output = reader.source, reader.output
    yield from source.space()
    name = yield from source.matching(NAME)
    if not name or name[0].isdigit() or not (yield from source.literal("(")):
        return False
    arguments: list[str] = []
    while True:
        yield from source.space()
        if (yield from source.literal(")")):
            break
        if arguments:
            if not (yield from source.literal(",")):
                return False
            yield from source.space()
            if (yield from source.literal(")")):
                break
        key = yield from source.matching(NAME)
        yield from source.space()
        if not key or not (yield from source.literal("=")):
            return False
        yield from source.space()
        value = yield from read_literal(source)
        if value is None:
            return False
        arguments.append(f"{json.dumps(key, ensure_ascii=False)}: {value}")
    output.start(name)
    output.arguments(f"{{{', '.join(arguments)}}}")
    output.finish(complete=True)
    return True


def _marked(reader: Reader, opener: str) -> Reading:
    return (yield from _listed(reader, _call_or_object))


def _lines(reader: Reader, opener: str) -> Reading:
    return (yield from reader.calls(_call, "</function_calls>"))


def _grammar(
    opener: str,
    before: str = "",
    between: str = "",
    after: str = "",
    *,
    lookalike: Callable[[Sequence[str]], str] | None = None,
) -> CallGrammar:
    def rules(grammar: CallRules) -> str:
        calls = []
        for tool in grammar.tools:
            entries = []
            for name, needed in checked_names(tool, r"[^\w.-]"):
                is_truth = types_of(properties_of(tool.schema).get(name)) == {"boolean"}
                value = '("True" | "False" | "true" | "false")' if is_truth else grammar.part(tool, name)
                entries.append((grammar.rule(f"{grammar.literal(name + '=')} {value}"), needed))
            arguments = grammar.listed(entries, ", ")
            calls.append(grammar.rule(f"{grammar.literal(tool.name + '(')} {arguments} {grammar.literal(')')}"))
        each = grammar.rule(" | ".join(calls))
        return grammar.rule(f"{grammar.literal(before)} {grammar.several(each, between, after)}")

    return CallGrammar(opener, rules, lookalike=lookalike)


PYTHONIC = ToolFormat(
    "pythonic",
    (PYTHON_START,),
    _marked,
    at_start=_at_start,
    inside=(PYTHON_END,),
    grammars=(_grammar("", "[", ", ", "]", lookalike=lambda names: r"\s*\[(.|\n)*"),),
)
"""Llama 3.2 and 4, ToolACE."""
LFM2 = ToolFormat("lfm2", (START,), _marked, inside=(END,), grammars=(_grammar(START, "[", ", ", f"]{END}"),))
OLMO3 = ToolFormat(
    "olmo3",
    ("<function_calls>",),
    _lines,
    inside=("</function_calls>",),
    grammars=(_grammar("<function_calls>", "", "\n", "</function_calls>"),),
)
