"""Formats that write each parameter between tags of its own: Qwen3-Coder, GLM-4.5, MiniMax-M2.

A string streams as it arrives. Any other value is read to its end and written as JSON of the type in the tool's schema.
"""

from __future__ import annotations

import re

from asyncllm.text.grammars.lark import escaped
from asyncllm.text.replies.call_rules import ARGUMENTS, CALLED, KEY, LINE_END, VALUE, shaped, tagged
from asyncllm.text.replies.reader import Reader, ToolFormat
from asyncllm.text.replies.source import Markers, Reading
from asyncllm.text.replies.values import ArgumentsWriter, properties_of, types_of

__all__ = ["GLM4", "GLM45", "MINIMAX_M2", "QWEN3_CODER"]

NAME = re.compile(r"[^\s<>\"\udc00-\udfff]")


def _read_value(reader: Reader, tool: str, key: str, writer: ArgumentsWriter, closing: Markers) -> Reading:
    """Read a value up to its closing tag. Return whether the tag arrived."""
    types = types_of(properties_of(reader.tools.get(tool)).get(key))
    writer.key(key)
    if types == {"string"}:
        writer.open_string()
        closed = yield from reader.source.until(closing, writer.string_piece)
        if closed is not None:
            writer.open_string()
        return closed is not None
    parts: list[str] = []
    closed = yield from reader.source.until(closing, parts.append)
    if closed is None:
        writer.open_string()
        writer.string_piece("".join(parts))
        return False
    writer.value("".join(parts), types)
    return True


def _read_qwen(reader: Reader, opener: str) -> Reading:
    source = reader.source
    if opener == "<tool_call>":
        yield from source.space()
        if not (yield from source.literal("<function=")):
            return False
    if not (yield from _function(reader)):
        return False
    yield from source.space()
    yield from source.literal("</tool_call>")
    return True


def _function(reader: Reader) -> Reading:
    source, output = reader.source, reader.output
    name = yield from source.matching(NAME)
    if not name or not (yield from source.literal(">")):
        return False
    output.start(name)
    writer = ArgumentsWriter(output.arguments)
    writer.begin()
    closing = reader.markers("\n</parameter>", "</parameter>")
    while True:
        yield from source.space()
        if not (yield from source.literal("<parameter=")):
            break
        key = yield from source.matching(NAME)
        if not (yield from source.literal(">")):
            output.finish(complete=False)
            return True
        yield from source.literal("\n")
        if not (yield from _read_value(reader, name, key, writer, closing)):
            output.finish(complete=False)
            return True
    complete = yield from source.literal("</function>")
    if complete:
        writer.end()
    output.finish(complete=complete)
    return True


def _read_glm(reader: Reader, opener: str) -> Reading:
    source, output = reader.source, reader.output
    yield from source.space()
    name = yield from source.matching(NAME)
    yield from source.space()
    empty = False
    if not (yield from source.literal("<arg_key>")):
        empty = yield from source.literal("</tool_call>")
        if not empty:
            return False
    if not name:
        return False
    output.start(name)
    writer = ArgumentsWriter(output.arguments)
    writer.begin()
    key_end, closing = reader.markers("</arg_key>"), reader.markers("</arg_value>")
    while not empty:
        parts: list[str] = []
        if (yield from source.until(key_end, parts.append)) is None:
            output.finish(complete=False)
            return True
        yield from source.space()
        if not (yield from source.literal("<arg_value>")):
            output.finish(complete=False)
            return True
        if not (yield from _read_value(reader, name, "".join(parts).strip(), writer, closing)):
            output.finish(complete=False)
            return True
        yield from source.space()
        if not (yield from source.literal("<arg_key>")):
            break
    complete = empty or (yield from source.literal("</tool_call>"))
    if complete:
        writer.end()
    output.finish(complete=complete)
    return True


def _no_opener(reader: Reader, opener: str) -> Reading:
    yield from ()
    return False


def _glm4_at_start(reader: Reader) -> Reading:
    """Read a tool's name on a line of its own, and its arguments."""
    source, output = reader.source, reader.output
    yield from source.space()
    name = yield from source.matching(NAME)
    if name not in reader.tools or not (yield from source.literal("\n")):
        return False
    yield from source.space()
    if (yield from source.peek()) != "{":
        return False
    output.start(name)
    output.finish(complete=(yield from source.json_value(output.arguments)))
    return True


def _read_minimax(reader: Reader, opener: str) -> Reading:
    return (yield from reader.calls(_invocation, "</minimax:tool_call>"))


def _invocation(reader: Reader) -> Reading:
    source, output = reader.source, reader.output
    yield from source.space()
    if not (yield from source.literal('<invoke name="')):
        return False
    name = yield from source.matching(NAME)
    if not name or not (yield from source.literal('">')):
        return False
    output.start(name)
    writer = ArgumentsWriter(output.arguments)
    writer.begin()
    closing = reader.markers("</parameter>")
    while True:
        yield from source.space()
        if not (yield from source.literal('<parameter name="')):
            break
        key = yield from source.matching(NAME)
        if not (yield from source.literal('">')) or not (yield from _read_value(reader, name, key, writer, closing)):
            output.finish(complete=False)
            return True
    complete = yield from source.literal("</invoke>")
    if complete:
        writer.end()
    output.finish(complete=complete)
    return True


QWEN3_CODER = ToolFormat(
    "qwen3_coder",
    ("<tool_call>", "<function="),
    _read_qwen,
    inside=("</tool_call>", "</function>", "<parameter=", "</parameter>"),
    grammars=(
        tagged(
            "<tool_call>",
            f"\n<function={CALLED}>\n",
            f"<parameter={KEY}>\n{VALUE}\n</parameter>\n",
            "</function>\n</tool_call>",
            closer="</parameter>",
            between="\n<tool_call>",
        ),
    ),
)
"""Qwen3-Coder, Qwen3.5, MiMo, Step-3.5. The outer tag may be missing."""
GLM45 = ToolFormat(
    "glm45",
    ("<tool_call>",),
    _read_glm,
    inside=("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    grammars=(
        tagged(
            "<tool_call>",
            f"{CALLED}{LINE_END}",
            f"<arg_key>{KEY}</arg_key>{LINE_END}<arg_value>{VALUE}</arg_value>{LINE_END}",
            "</tool_call>",
            closer="</arg_value>",
            between="\n<tool_call>",
        ),
    ),
)
"""GLM-4.5, and GLM-4.7, which leaves the line breaks out."""
GLM4 = ToolFormat(
    "glm4",
    (),
    _no_opener,
    at_start=_glm4_at_start,
    grammars=(
        shaped(
            "",
            f"{CALLED}\n{ARGUMENTS}",
            single=True,
            looks=lambda names: rf"\s*({'|'.join(map(escaped, names))})\n(.|\n)*",
        ),
    ),
)
"""GLM-4-9B."""
MINIMAX_M2 = ToolFormat(
    "minimax_m2",
    ("<minimax:tool_call>",),
    _read_minimax,
    inside=("</minimax:tool_call>",),
    grammars=(
        tagged(
            "<minimax:tool_call>",
            f'<invoke name="{CALLED}">\n',
            f'<parameter name="{KEY}">{VALUE}</parameter>\n',
            "</invoke>\n",
            closer="</parameter>",
            before="\n",
            after="</minimax:tool_call>",
        ),
    ),
)
