"""gpt-oss's reply format: several messages, each with a channel and perhaps a recipient in its header."""

from __future__ import annotations

import re

from asyncllm.text.replies.call_rules import CallRules
from asyncllm.text.replies.reader import Reader, ToolFormat
from asyncllm.text.replies.source import Markers, Reading

__all__ = ["HARMONY"]

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
NAMED_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"to=([\w.-]+)")


def _read_none(reader: Reader, opener: str) -> Reading:
    yield from ()
    return False


def _answer(reader: Reader) -> Reading:
    source, output = reader.source, reader.output
    ends, header_end = reader.markers(END, CALL, RETURN, START), reader.markers(MESSAGE, END, CALL, RETURN)
    yield  # the first text
    while True:
        parts: list[str] = []
        marker = yield from source.until(header_end, parts.append)
        header = reader.codes.spelled("".join(parts))
        if marker != MESSAGE:
            text = header.removeprefix(START).removeprefix("assistant")
            if marker is not None or CHANNEL not in text:
                # Neither a message nor a header that is cut off, so it is content.
                output.text(text)
            if marker is None:
                return
            continue
        channel = found[1] if (found := NAMED_CHANNEL.search(header)) else "final"
        recipient = found[1] if (found := RECIPIENT.search(header)) else ""
        output.markup()
        if recipient and reader.tools:
            output.inside = False
            marker = yield from _call(reader, recipient.removeprefix("functions."), ends)
        elif channel == "analysis":
            output.inside = True
            marker = yield from source.until(ends, output.thought)
            output.inside = False
        else:
            output.inside = False
            marker = yield from source.until(ends, output.text)
        if marker is None:
            return
        output.markup()


def _call(reader: Reader, name: str, ends: Markers) -> Reading:
    """Read the arguments of a call, JSON or not, and return the marker after them."""
    source, output = reader.source, reader.output
    yield from source.space()
    output.start(name)
    if (yield from source.peek()) == "{":
        output.finish(complete=(yield from source.json_value(output.arguments)))
        return (yield from source.until(ends, output.text))
    parts: list[str] = []
    marker = yield from source.until(ends, parts.append)
    output.arguments("".join(parts).strip() or "{}")
    output.finish(complete=marker is not None)
    return marker


def _whole(grammar: CallRules, content: str | None) -> str:
    """Return the rules of messages: analysis and preambles, then a call or the content."""
    channel, message, constrain = map(grammar.literal, (CHANNEL, MESSAGE, CONSTRAIN))
    note = (
        f'{channel} ("analysis" | "commentary") {message} {grammar.until(END)} {grammar.literal(f"{START}assistant")}'
    )
    ends = [] if content is None else [f'{channel} "final" {message} {content}']
    for tool in grammar.tools:
        header = grammar.literal(f"commentary to=functions.{tool.name} ")
        ends.append(f'{channel} {header} {constrain} "json" {message} {grammar.arguments(tool)}')
    return f"{grammar.rule(note)}* ({' | '.join(ends)})"


HARMONY = ToolFormat(
    "openai",
    (),
    _read_none,
    inside=(START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN),
    answer=_answer,
    whole=_whole,
)
