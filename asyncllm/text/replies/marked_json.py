"""Formats whose calls are JSON objects between markers."""

from __future__ import annotations

from collections.abc import Callable

from asyncllm.text.replies.call_rules import ARGUMENTS, CALLED, NUMBER, shaped
from asyncllm.text.replies.json_calls import CALL_KEYS, Keys, read_calls, read_list, read_object
from asyncllm.text.replies.reader import Reader, ToolFormat
from asyncllm.text.replies.source import Reading

__all__ = [
    "APERTUS",
    "COHERE",
    "FUNCTOOLS",
    "GRANITE",
    "GRANITE_20B_FC",
    "HERMES",
    "INTERNLM",
    "JAMBA",
    "LONGCAT",
    "MINIMAX_M1",
    "NEMOTRON_JSON",
    "XLAM",
]


def _between(closers: tuple[str, ...], keys: Keys = CALL_KEYS) -> Callable[[Reader, str], Reading]:
    """Return a function that reads calls up to one of the `closers`, which may be missing."""

    def read(reader: Reader, opener: str) -> Reading:
        if not (yield from read_calls(reader, keys)):
            return False
        yield from reader.source.space()
        for closer in closers:
            if (yield from reader.source.literal(closer)):
                break
        return True

    return read


CALL = f'{{"name": "{CALLED}", "arguments": {ARGUMENTS}}}'


def _tagged_objects(name: str, opener: str) -> ToolFormat:
    """Return a format of calls that are each an object between tags."""
    closer = opener.replace("<", "</")
    return ToolFormat(
        name,
        (opener,),
        _between((closer,)),
        inside=(closer,),
        grammars=(shaped(opener, f"\n{CALL}\n{closer}", between=f"\n{opener}"),),
    )


LONGCAT = _tagged_objects("longcat", "<longcat_tool_call>")
"""LongCat-Flash."""
HERMES = _tagged_objects("hermes", "<tool_call>")
"""Hermes 2 and 3, Qwen2.5, Qwen3, QwQ, EXAONE 4, Granite 4, ERNIE 4.5."""

GRANITE = ToolFormat(
    "granite",
    ("<|tool_call|>", "<tool_call>"),
    _between(("</tool_call>",)),
    grammars=(
        shaped("<|tool_call|>", CALL, before="[", between=", ", after="]", needs="<|tool_call|>"),
        shaped("<tool_call>", CALL, before="[", between=", ", after="]"),
    ),
)
"""Granite 3.0, and from 3.1 on."""

FUNCTOOLS = ToolFormat(
    "phi4_mini_json",
    ("functools", "<|tool_call|>"),
    _between(("<|/tool_call|>",)),
    inside=("<|/tool_call|>",),
    grammars=(
        shaped("<|tool_call|>", CALL, before="[", between=", ", after="]<|/tool_call|>", needs="<|tool_call|>"),
        shaped("functools", CALL, before="[", between=", ", after="]"),
    ),
)
"""Phi-4-mini, as its card and as its template have it."""


def _list(name: str, opener: str, closer: str, lead: str = "") -> ToolFormat:
    """Return a format of calls in a JSON list. `lead`: what models write before each call."""
    grammar = shaped(opener, CALL, before=f"[{lead}", between=f",{lead or ' '}", after=f"{lead[:1]}]{closer}")
    return ToolFormat(name, (opener,), _between((closer,)), inside=(closer,), grammars=(grammar,))


JAMBA = _list("jamba", "<tool_calls>", "</tool_calls>", "\n    ")
"""Jamba 1.5 and later, and Hunyuan-A13B, on one line."""
NEMOTRON_JSON = _list("nemotron_json", "<TOOLCALL>", "</TOOLCALL>")
"""Llama Nemotron, Nemotron Nano 2."""

MINIMAX_M1 = ToolFormat(
    "minimax",
    ("<tool_calls>",),
    lambda reader, opener: reader.calls(read_object, "</tool_calls>"),
    inside=("</tool_calls>",),
    grammars=(shaped("<tool_calls>", CALL, before="\n", between="\n", after="\n</tool_calls>"),),
)
"""MiniMax-M1: a call in each line."""

GRANITE_20B_FC = ToolFormat(
    "granite-20b-fc",
    ("<function_call>",),
    _between(()),
    grammars=(shaped("<function_call>", f" {CALL}", between="\n<function_call>"),),
)
"""Granite 20B Functioncalling."""

XLAM_LIST = "[{"


def _read_xlam(reader: Reader, opener: str) -> Reading:
    """Read a list of calls, bare or between marks. A bare one within text is a call only if it names a tool."""
    if opener != XLAM_LIST:
        return (yield from _between(("</tool_call>", "```"))(reader, opener))
    return not reader.output.inside and (yield from _bare_list(reader))


def _bare_list(reader: Reader) -> Reading:
    yield from reader.source.space()
    key = yield from reader.source.json_string()
    return key == "name" and (yield from read_list(reader, CALL_KEYS._replace(known=True), key))


XLAM = ToolFormat(
    "xlam",
    ("[TOOL_CALLS]", "<tool_call>", "```json", XLAM_LIST),
    _read_xlam,
    at_start=lambda reader: read_calls(reader, CALL_KEYS._replace(both=True)),
    inside=("</tool_call>",),
    grammars=(
        shaped("", CALL, before="[", between=", ", after="]", lookalike=lambda names: r"(.|\n)*(\[\{|```json)(.|\n)*"),
    ),
)
"""xLAM 2, with and without marks."""

INTERNLM = ToolFormat(
    "internlm",
    ("<|action_start|><|plugin|>",),
    _between(("<|action_end|>",)),
    inside=("<|action_end|>",),
    grammars=(
        shaped(
            "<|action_start|><|plugin|>",
            f'\n{{"name": "{CALLED}", "parameters": {ARGUMENTS}}}',
            after="<|action_end|>",
            single=True,
        ),
    ),
)
"""InternLM2, 2.5 and 3."""

COHERE = ToolFormat(
    "cohere_command3",
    ("<|START_ACTION|>",),
    _between(("<|END_ACTION|>",), Keys(frozenset({"tool_name", "name"}), frozenset({"parameters", "arguments"}))),
    inside=("<|END_ACTION|>",),
    grammars=(
        shaped(
            "<|START_ACTION|>",
            f'{{"tool_call_id": "{NUMBER}", "tool_name": "{CALLED}", "parameters": {ARGUMENTS}}}',
            before="[\n",
            between=",\n",
            after="\n]<|END_ACTION|>",
        ),
    ),
)
"""Command R7B and Command A."""


def _read_apertus(reader: Reader, opener: str) -> Reading:
    source = reader.source
    yield from source.space()
    yield from source.literal("[")
    return (yield from reader.calls(_named_object, "]")) and (yield from _close(reader))


def _close(reader: Reader) -> Reading:
    yield from reader.source.space()
    yield from reader.source.literal("<|tools_suffix|>")
    return True


def _named_object(reader: Reader) -> Reading:
    """Read an object whose only key is the tool's name."""
    source = reader.source
    yield from source.space()
    yield from source.literal(",")
    yield from source.space()
    if not (yield from source.literal("{")):
        return False
    yield from source.space()
    name = yield from source.json_string()
    yield from source.space()
    if not name or not (yield from source.literal(":")):
        return False
    if not (yield from reader.call_of(name)):
        return False
    yield from source.space()
    yield from source.literal("}")
    return True


APERTUS = ToolFormat(
    "apertus",
    ("<|tools_prefix|>",),
    _read_apertus,
    inside=("<|tools_suffix|>",),
    grammars=(
        shaped("<|tools_prefix|>", f'{{"{CALLED}": {ARGUMENTS}}}', before="[", between=", ", after="]<|tools_suffix|>"),
    ),
)
