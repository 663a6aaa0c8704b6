"""Llama's call formats: a JSON object in place of an answer, or after <|python_tag|>."""

from __future__ import annotations

from asyncllm.text.replies.call_rules import ARGUMENTS, CALLED, shaped
from asyncllm.text.replies.json_calls import CALL_KEYS, read_object
from asyncllm.text.replies.reader import Reader, ToolFormat
from asyncllm.text.replies.source import Reading

__all__ = ["LLAMA3_JSON"]

KEYS = CALL_KEYS._replace(both=True)


def _read(reader: Reader, opener: str) -> Reading:
    return (yield from _calls(reader))


def _calls(reader: Reader) -> Reading:
    if not (yield from read_object(reader, KEYS)):
        return False
    while (yield from reader.attempt(_further(reader))):
        pass
    return True


def _further(reader: Reader) -> Reading:
    yield from reader.source.space()
    if not (yield from reader.source.literal(";")):
        yield from reader.source.literal(",")
    yield from reader.source.space()
    yield from reader.source.literal("<|python_tag|>")
    return (yield from read_object(reader, KEYS))


LLAMA3_JSON = ToolFormat(
    "llama3_json",
    ("<|python_tag|>",),
    _read,
    at_start=_calls,
    grammars=(
        shaped(
            "",
            f'{{"name": "{CALLED}", "parameters": {ARGUMENTS}}}',
            between="; ",
            looks=lambda names: r"\s*\{(.|\n)*",
        ),
    ),
)
"""Llama 3.1, 3.2, 3.3 and 4."""
