"""Formats that write each parameter between tags of its own: Qwen3-Coder, Seed-OSS, GLM-4.5, Hunyuan 3, MiniMax-M2.

A string streams as it arrives. Any other value is read to its end and written as JSON of the type in the tool's schema.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from asyncllm.text.grammars.lark import escaped
from asyncllm.text.replies.call_rules import ARGUMENTS, CALLED, KEY, LINE_END, VALUE, shaped, tagged
from asyncllm.text.replies.reader import Reader, ToolFormat
from asyncllm.text.replies.source import Reading, Source
from asyncllm.text.replies.values import ArgumentsWriter, properties_of, read_value, types_of

__all__ = ["GLM4", "GLM45", "HY_V3", "MINIMAX_M2", "QWEN3_CODER", "SEED_OSS"]

NAME = re.compile(r"[^\s<>\"'\udc00-\udfff]")
BLANK = re.compile(r"\s")
END = "</function>"


def _types(reader: Reader, tool: str, key: str) -> frozenset[str]:
    return types_of(properties_of(reader.tools.get(tool)).get(key))


def _functions(tag: str, value: str) -> ToolFormat:
    """Return a format of functions between the tags. `value`: how the grammar writes a value."""
    closer = tag.replace("<", "</")

    def read(reader: Reader, opener: str) -> Reading:
        source = reader.source
        if opener == tag:
            yield from source.space()
            if not (yield from source.literal("<function=")):
                return False
        if not (yield from _function(reader, closer)):
            return False
        yield from source.space()
        yield from source.literal(closer)
        return True

    return ToolFormat(
        "qwen3_coder" if tag == "<tool_call>" else "seed_oss",
        (tag, "<function="),
        read,
        inside=(closer, END, "<parameter=", "</parameter>"),
        grammars=(
            tagged(
                tag,
                f"\n<function={CALLED}>\n",
                f"<parameter={KEY}>{value}</parameter>\n",
                f"{END}\n{closer}",
                closer="</parameter>",
                between=f"\n{tag}",
            ),
        ),
    )


def _function(reader: Reader, closer: str) -> Reading:
    source, output = reader.source, reader.output
    name = yield from source.matching(NAME)
    if not name or not (yield from source.literal(">")):
        return False
    output.start(name)
    writer = ArgumentsWriter(output.arguments)
    writer.begin()
    key: str | None = ""
    while key is not None:
        if not key:
            yield from source.space()
            if not (yield from source.literal("<parameter=")):
                break
            key = yield from source.matching(NAME)
            if not (yield from source.literal(">")):
                output.finish(complete=False)
                return True
        yield from source.literal("\n")
        writer.key(key)
        key = yield from read_value(writer, _types(reader, name, key), partial(_function_text, reader, name, closer))
        if key == END:
            writer.end()
            output.finish(complete=True)
            return True
    complete = key is not None and (yield from source.literal(END))
    if complete:
        writer.end()
    output.finish(complete=complete)
    return True


def _function_text(reader: Reader, tool: str, closer: str, sink: Callable[[str], None]) -> Reading:
    """Pass a value's text to `sink`. Some replies leave its closing tag out. Return the key of the next value if that
    has begun, END if the call has ended, otherwise an empty text; None if the text is cut."""
    source = reader.source
    closing = reader.markers("\n</parameter>", "</parameter>", "\n<parameter=", f"\n{END}")
    while (marker := (yield from source.until(closing, sink))) is not None:
        if marker == "\n<parameter=":
            behind = yield from source.matching(NAME)
            if behind in properties_of(reader.tools.get(tool)) and (yield from source.literal(">")):
                return behind
        elif marker == f"\n{END}":
            behind = yield from source.matching(BLANK)
            if not (yield from source.peek()) or (yield from source.literal(closer)):
                return END
        else:
            return ""
        sink(marker + behind)
    return None


def _read_hunyuan(reader: Reader, opener: str) -> Reading:
    return (yield from reader.calls(_hunyuan_call, "</tool_calls>"))


def _hunyuan_call(reader: Reader) -> Reading:
    yield from reader.source.space()
    return (yield from reader.source.literal("<tool_call>")) and (yield from _read_glm(reader, "<tool_call>"))


def _read_glm(reader: Reader, opener: str) -> Reading:
    source, output = reader.source, reader.output
    yield from source.space()
    name = yield from source.matching(NAME)
    yield from source.space()
    yield from source.literal("<tool_sep>")
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
    key_end = reader.markers("</arg_key>")
    until_end = partial(source.until, reader.markers("</arg_value>"))
    while not empty:
        parts: list[str] = []
        if (yield from source.until(key_end, parts.append)) is None:
            output.finish(complete=False)
            return True
        yield from source.space()
        if not (yield from source.literal("<arg_value>")):
            output.finish(complete=False)
            return True
        key = "".join(parts).strip()
        writer.key(key)
        if (yield from read_value(writer, _types(reader, name, key), until_end)) is None:
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
    source = reader.source
    yield from source.space()
    name = yield from source.matching(NAME)
    if name not in reader.tools or not (yield from source.literal("\n")):
        return False
    return (yield from reader.call_of(name))


def _read_minimax(reader: Reader, opener: str) -> Reading:
    return (yield from reader.calls(_invocation, "</minimax:tool_call>"))


def _invocation(reader: Reader) -> Reading:
    source, output = reader.source, reader.output
    yield from source.space()
    if not (yield from source.literal("<invoke name=")):
        return False
    name = yield from _attribute(source)
    if not name:
        return False
    output.start(name)
    writer = ArgumentsWriter(output.arguments)
    writer.begin()
    until_end = partial(source.until, reader.markers("</parameter>"))
    while True:
        yield from source.space()
        if not (yield from source.literal("<parameter name=")):
            break
        key = yield from _attribute(source)
        if not key:
            output.finish(complete=False)
            return True
        writer.key(key)
        if (yield from read_value(writer, _types(reader, name, key), until_end)) is None:
            output.finish(complete=False)
            return True
    complete = yield from source.literal("</invoke>")
    if complete:
        writer.end()
    output.finish(complete=complete)
    return True


def _attribute(source: Source) -> Reading:
    """Read an attribute's value, with or without quotes, and the end of its tag. Return an empty text if it is none."""
    quote = (yield from source.peek()) in ("'", '"') and (yield from source.character())
    name = yield from source.matching(NAME)
    return name if (yield from source.literal(f"{quote or ''}>")) else ""


QWEN3_CODER = _functions("<tool_call>", f"\n{VALUE}\n")
"""Qwen3-Coder, Qwen3.5, MiMo, Step-3.5. The outer tag may be missing."""
SEED_OSS = _functions("<seed:tool_call>", VALUE)
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
HY_V3 = ToolFormat(
    "hy_v3",
    ("<tool_calls>",),
    _read_hunyuan,
    inside=("</tool_calls>", "<tool_call>", "<tool_sep>", *GLM45.inside),
    grammars=(
        tagged(
            "<tool_calls>",
            f"<tool_call>{CALLED}<tool_sep>\n",
            f"<arg_key>{KEY}</arg_key>\n<arg_value>{VALUE}</arg_value>\n",
            "</tool_call>\n",
            closer="</arg_value>",
            before="\n",
            after="</tool_calls>",
        ),
    ),
)
"""Hunyuan 3."""
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
            lookalike=lambda names: rf"\s*({'|'.join(map(escaped, names))})\n(.|\n)*",
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
