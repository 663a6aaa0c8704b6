"""Llama's call formats: JSON objects in place of an answer, after text, or after <|python_tag|>."""

from __future__ import annotations

from asyncllm.text.replies.call_rules import ARGUMENTS, CALLED, shaped
from asyncllm.text.replies.json_calls import CALL_KEYS, Keys, read_object
from asyncllm.text.replies.reader import Reader, ToolFormat
from asyncllm.text.replies.source import Reading

__all__ = ["LLAMA3_JSON"]

KEYS = CALL_KEYS._replace(both=True)
TAG, OBJECT = "<|python_tag|>", '{"name"'


def _read(reader: Reader, opener: str) -> Reading:
    if opener == OBJECT:
        # An object within text is a call only if it names a tool. Reasoning may quote one.
        return not reader.output.inside and (yield from _calls(reader, KEYS._replace(known=True), "name"))
    return (yield from _calls(reader))


def _calls(reader: Reader, keys: Keys = KEYS, first: str | None = None) -> Reading:
    source = reader.source
    yield from source.space()
    listed = first is None and (yield from source.literal("["))
    if not (yield from read_object(reader, keys, first)):
        return False
    while (yield from reader.attempt(_further(reader))):
        pass
    if listed:
        yield from source.space()
        yield from source.literal("]")
    return True


def _further(reader: Reader) -> Reading:
    yield from reader.source.space()
    if not (yield from reader.source.literal(";")):
        yield from reader.source.literal(",")
    yield from reader.source.space()
    yield from reader.source.literal(TAG)
    return (yield from read_object(reader, KEYS))


LLAMA3_JSON = ToolFormat(
    "llama3_json",
    (TAG, OBJECT),
    _read,
    at_start=_calls,
    grammars=(
        shaped(
            "",
            f'{{"name": "{CALLED}", "parameters": {ARGUMENTS}}}',
            between="; ",
            lookalike=lambda names: r"\s*\{(.|\n)*",
        ),
    ),
)
"""Llama 3.1, 3.2, 3.3 and 4."""
