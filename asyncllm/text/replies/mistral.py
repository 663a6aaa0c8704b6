"""Mistral's call formats: a JSON list up to tokenizer v7, a name and its arguments from v11 on."""

from __future__ import annotations

import re

from asyncllm.text.replies.call_rules import ARGUMENTS, CALLED, shaped
from asyncllm.text.replies.json_calls import read_calls
from asyncllm.text.replies.reader import Reader, ToolFormat
from asyncllm.text.replies.source import Reading

__all__ = ["MISTRAL", "SHORT_ID"]

NAME = re.compile(r"[\w.-]")
SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
"""The only ids that Mistral's templates take."""


def _read(reader: Reader, opener: str) -> Reading:
    source = reader.source
    yield from source.space()
    if (yield from source.peek()) in ("[", "{"):
        return (yield from read_calls(reader))
    name = yield from source.matching(NAME)
    if not name:
        return False
    own_id: str | None = None
    if (yield from source.literal("[CALL_ID]")):
        spelled = yield from source.matching(NAME)
        own_id = spelled if SHORT_ID.fullmatch(spelled) else None
    yield from source.literal("[ARGS]")
    return (yield from reader.call_of(name, own_id))


MISTRAL = ToolFormat(
    "mistral",
    ("[TOOL_CALLS]",),
    _read,
    inside=("[ARGS]", "[CALL_ID]"),
    grammars=(
        shaped("[TOOL_CALLS]", f"{CALLED}[ARGS]{ARGUMENTS}", between="[TOOL_CALLS]", needs="[ARGS]"),
        shaped(
            "[TOOL_CALLS]", f'{{"name": "{CALLED}", "arguments": {ARGUMENTS}}}', before="[", between=", ", after="]"
        ),
    ),
)
