"""Formats whose calls are JSON objects between markers."""

from __future__ import annotations

from collections.abc import Callable

from asyncllm.text.replies.json_calls import CALL_KEYS, Keys, read_calls
from asyncllm.text.replies.reader import Reader, ToolFormat
from asyncllm.text.replies.source import Reading

__all__ = ["COHERE", "FUNCTOOLS", "GRANITE", "HERMES", "INTERNLM"]


def _between(closers: tuple[str, ...], keys: Keys = CALL_KEYS) -> Callable[[Reader, str], Reading]:
    """Reads calls up to one of the `closers`, which may be missing."""

    def read(reader: Reader, opener: str) -> Reading:
        if not (yield from read_calls(reader, keys)):
            return False
        yield from reader.source.space()
        for closer in closers:
            if (yield from reader.source.literal(closer)):
                break
        return True

    return read


HERMES = ToolFormat("hermes", ("<tool_call>",), _between(("</tool_call>",)), inside=("</tool_call>",))
"""Hermes 2 and 3, Qwen2.5, Qwen3, QwQ, EXAONE 4, Granite 4."""

GRANITE = ToolFormat("granite", ("<|tool_call|>", "<tool_call>"), _between(("</tool_call>",)))
"""Granite 3.0, and from 3.1 on."""

FUNCTOOLS = ToolFormat(
    "phi4_mini_json", ("functools", "<|tool_call|>"), _between(("<|/tool_call|>",)), inside=("<|/tool_call|>",)
)
"""Phi-4-mini, as its card and as its template have it."""

INTERNLM = ToolFormat(
    "internlm",
    ("<|action_start|><|plugin|>",),
    _between(("<|action_end|>",)),
    inside=("<|action_end|>",),
)
"""InternLM2, 2.5 and 3."""

COHERE = ToolFormat(
    "cohere_command3",
    ("<|START_ACTION|>",),
    _between(("<|END_ACTION|>",), Keys(frozenset({"tool_name", "name"}), frozenset({"parameters", "arguments"}))),
    inside=("<|END_ACTION|>",),
)
"""Command R7B and Command A."""
