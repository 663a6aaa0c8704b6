"""DeepSeek's call formats: V3 and R1 with the arguments in a fenced block, V3.1 without it, V3.2 and V4 with marked
parameters; and Kimi K2's, which is similar."""

from __future__ import annotations

import re
from functools import partial

from asyncllm.text.replies.call_rules import ARGUMENTS, CALLED, KEY, NUMBER, VALUE, shaped, tagged
from asyncllm.text.replies.reader import Reader, ToolFormat
from asyncllm.text.replies.source import Reading
from asyncllm.text.replies.values import ArgumentsWriter, properties_of, read_value, types_of

__all__ = ["DEEPSEEK_V3", "DEEPSEEK_V4", "DEEPSEEK_V31", "DEEPSEEK_V32", "KIMI_K2"]

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
DSML = "｜DSML｜"
KIMI_CALLS, KIMI_CALL = "<|tool_calls_section_begin|>", "<|tool_call_begin|>"
KIMI_ARGUMENTS, KIMI_CALL_END = "<|tool_call_argument_begin|>", "<|tool_call_end|>"
KIMI_CALLS_END = "<|tool_calls_section_end|>"
KIMI_ID = re.compile(r"functions\.[\w.-]+:\d+", re.ASCII)
NAME = re.compile(r"[\w.-]")
LINE = re.compile(r"[^\n<\udc00-\udfff]")
QUOTED = re.compile(r'[^"\n>]')
STRING = frozenset({"string"})


def _read_v3(reader: Reader, opener: str) -> Reading:
    return (yield from reader.calls(_call_v3, CALLS_END))


def _call_v3(reader: Reader) -> Reading:
    source, output = reader.source, reader.output
    yield from source.space()
    if not (yield from source.literal(CALL)):
        return False
    name = (yield from source.matching(LINE)).strip()
    if not (yield from source.literal(SEPARATOR)):
        return False
    if name == "function":
        name = (yield from source.matching(LINE)).strip()
    yield from source.space()
    fenced = yield from source.literal("```json")
    if fenced:
        yield from source.space()
    if not name or (yield from source.peek()) != "{":
        return False
    output.start(name)
    complete = yield from source.json_value(output.arguments)
    output.finish(complete=complete)
    if complete:
        yield from source.space()
        if fenced:
            yield from source.literal("```")
            yield from source.space()
        yield from source.literal(CALL_END)
    return True


def _read_dsml(reader: Reader, opener: str) -> Reading:
    return (yield from reader.calls(_invocation, opener.replace("<", "</")))


def _invocation(reader: Reader) -> Reading:
    source, output = reader.source, reader.output
    yield from source.space()
    if not (yield from source.literal(f'<{DSML}invoke name="')):
        return False
    name = yield from source.matching(QUOTED)
    if not name or not (yield from source.literal('">')):
        return False
    output.start(name)
    writer = ArgumentsWriter(output.arguments)
    writer.begin()
    until_end = partial(source.until, reader.markers(f"</{DSML}parameter>"))
    while True:
        yield from source.space()
        if not (yield from source.literal(f'<{DSML}parameter name="')):
            break
        key = yield from source.matching(QUOTED)
        types = types_of(properties_of(reader.tools.get(name)).get(key))
        is_json = yield from source.literal('" string="false">')
        if not is_json and (yield from source.literal('" string="true">')):
            # Text stays text unless the tool takes none.
            types = types if types and "string" not in types else STRING
        elif not is_json and not (yield from source.literal('">')):
            output.finish(complete=False)
            return True
        writer.key(key)
        begins = ('"',) if types == STRING else ("{", "[", '"')
        if is_json and (yield from source.peek()) in begins:
            closed = yield from until_end(writer.raw)
        else:
            closed = yield from read_value(writer, types, until_end)
        if closed is None:
            output.finish(complete=False)
            return True
    complete = yield from source.literal(f"</{DSML}invoke>")
    if complete:
        writer.end()
    output.finish(complete=complete)
    return True


def _dsml(name: str, tag: str) -> ToolFormat:
    marker = f"<{DSML}{tag}>"
    inside = (f"</{DSML}{tag}>", f'<{DSML}invoke name="', f"</{DSML}invoke>", f"</{DSML}parameter>")
    grammar = tagged(
        marker,
        f'<{DSML}invoke name="{CALLED}">\n',
        f'<{DSML}parameter name="{KEY}" string="true">{VALUE}</{DSML}parameter>\n',
        f"</{DSML}invoke>\n",
        closer=f"</{DSML}parameter>",
        json_parameter=f'<{DSML}parameter name="{KEY}" string="false">{VALUE}</{DSML}parameter>\n',
        before="\n",
        after=f"</{DSML}{tag}>",
        unreadable=r'["\n>]',
    )
    return ToolFormat(name, (marker,), _read_dsml, inside=(*inside, f'<{DSML}parameter name="'), grammars=(grammar,))


def _read_kimi(reader: Reader, opener: str) -> Reading:
    return (yield from reader.calls(_call_kimi, KIMI_CALLS_END))


def _call_kimi(reader: Reader) -> Reading:
    source, output = reader.source, reader.output
    yield from source.space()
    if not (yield from source.literal(KIMI_CALL)):
        return False
    # functions.NAME:INDEX, which is the call's id. Some replies leave the index out, or the name if there is one tool.
    spelled = (yield from source.matching(LINE)).strip()
    own_id = spelled if KIMI_ID.fullmatch(spelled) else None
    name = spelled.removeprefix("functions.")
    name = name.rpartition(":")[0] or name
    if name.isdecimal() and name not in reader.tools:
        name = next(iter(reader.tools)) if len(reader.tools) == 1 else ""
    if not name or not (yield from source.literal(KIMI_ARGUMENTS)):
        return False
    yield from source.space()
    output.start(name, own_id)
    complete = yield from source.json_value(output.arguments)
    output.finish(complete=complete)
    yield from source.space()
    yield from source.literal(KIMI_CALL_END)
    return True


DEEPSEEK_V3 = ToolFormat(
    "deepseek_v3",
    (CALLS,),
    _read_v3,
    inside=(CALL, SEPARATOR, CALL_END, CALLS_END),
    grammars=(
        shaped(
            CALLS,
            f"{CALL}function{SEPARATOR}{CALLED}\n```json\n{ARGUMENTS}\n```{CALL_END}",
            between="\n",
            after=CALLS_END,
        ),
    ),
)
"""DeepSeek V3, V3-0324 and R1."""
DEEPSEEK_V31 = ToolFormat(
    "deepseek_v31",
    (CALLS,),
    _read_v3,
    inside=(CALL, SEPARATOR, CALL_END, CALLS_END),
    grammars=(shaped(CALLS, f"{CALL}{CALLED}{SEPARATOR}{ARGUMENTS}{CALL_END}", after=CALLS_END),),
)
DEEPSEEK_V32 = _dsml("deepseek_v32", "function_calls")
DEEPSEEK_V4 = _dsml("deepseek_v4", "tool_calls")
KIMI_K2 = ToolFormat(
    "kimi_k2",
    (KIMI_CALLS,),
    _read_kimi,
    inside=(KIMI_CALL, KIMI_ARGUMENTS, KIMI_CALL_END, KIMI_CALLS_END),
    grammars=(
        shaped(
            KIMI_CALLS,
            f"{KIMI_CALL}functions.{CALLED}:{NUMBER}{KIMI_ARGUMENTS}{ARGUMENTS}{KIMI_CALL_END}",
            after=KIMI_CALLS_END,
        ),
    ),
)
