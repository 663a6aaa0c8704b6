"""Replies as models of each family write them, and what they say."""

from __future__ import annotations

from typing import Any, NamedTuple

from asyncllm.text.replies.events import CallEnd, CallPiece, CallStart, Event, Text, Thought
from asyncllm.text.replies.formats import REASONING_PARSERS, TOOL_PARSERS
from asyncllm.text.replies.reply import Reply, ReplyFormat

TOOLS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}},
    },
    "now": {"type": "object", "properties": {}},
}


class Said(NamedTuple):
    """What a reply comes to."""

    text: str = ""
    thought: str = ""
    calls: tuple[tuple[str, str], ...] = ()


class Sample(NamedTuple):
    tools: str | None
    thinking: str | None
    raw: str
    said: Said
    inside: bool = False


ZURICH = '{"city": "Zürich", "days": 2}'
ODD = '{"city": "a \\"b\\" </tool_call> {[", "tags": [1, {"x": "}"}]}'
BOTH = (("weather", ZURICH), ("now", "{}"))


def merged(events: list[Event]) -> list[Event]:
    """Adjacent pieces of the same kind as one."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        match last, event:
            case Text(), Text():
                result[-1] = Text(last.text + event.text)
            case Thought(), Thought():
                result[-1] = Thought(last.text + event.text)
            case CallPiece(), CallPiece() if last.index == event.index:
                result[-1] = CallPiece(last.index, last.arguments + event.arguments)
            case _:
                result.append(event)
    return result


def said(events: list[Event]) -> Said:
    """The sum of the events, which come in the order that clients rely on."""
    text = thought = ""
    calls: list[tuple[str, str]] = []
    is_open = False
    for event in events:
        match event:
            case Text():
                assert not is_open
                text += event.text
            case Thought():
                assert not is_open
                thought += event.text
            case CallStart():
                assert not is_open
                assert event.index == len(calls)
                calls.append((event.name, ""))
                is_open = True
            case CallPiece():
                assert is_open
                assert event.index == len(calls) - 1
                assert event.arguments
                calls[-1] = (calls[-1][0], calls[-1][1] + event.arguments)
            case CallEnd():
                assert is_open
                assert event.index == len(calls) - 1
                is_open = False
    return Said(text, thought, tuple(calls))


def form(tools: str | None, thinking: str | None) -> ReplyFormat:
    return ReplyFormat(
        None if tools is None else TOOL_PARSERS[tools], None if thinking is None else REASONING_PARSERS[thinking]
    )


def events_of(sample: Sample, pieces: list[str]) -> list[Event]:
    """The events of a reply that comes in these pieces."""
    reply = Reply(form(sample.tools, sample.thinking), TOOLS, inside=sample.inside)
    events: list[Event] = []
    for piece in pieces:
        events += reply.push(piece)
    return merged(events + reply.end())


def _deepseek(*calls: str) -> str:
    return f"<｜tool▁calls▁begin｜>{chr(10).join(calls)}<｜tool▁calls▁end｜>"


QWEN_CODER = """<tool_call>
<function=weather>
<parameter=city>
a "b"
 c
</parameter>
<parameter=days>
2
</parameter>
<parameter=tags>
["x", 1]
</parameter>
</function>
</tool_call>"""
CODER_ARGUMENTS = '{"city": "a \\"b\\"\\n c", "days": 2, "tags": ["x", 1]}'
GLM = """<tool_call>weather
<arg_key>city</arg_key>
<arg_value>Zürich</arg_value>
<arg_key>days</arg_key>
<arg_value>2</arg_value>
</tool_call>"""
DSML = """<｜DSML｜function_calls>
<｜DSML｜invoke name="weather">
<｜DSML｜parameter name="city" string="true">Zürich</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="now">
</｜DSML｜invoke>
</｜DSML｜function_calls>"""
MINIMAX = """<minimax:tool_call>
<invoke name="weather">
<parameter name="city">Zürich</parameter>
<parameter name="days">2</parameter>
</invoke>
</minimax:tool_call>"""
KIMI = (
    f"<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{ZURICH}"
    "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)
HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>"
    f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ZURICH}<|call|>"
)

SAMPLES: dict[str, Sample] = {
    "plain": Sample("hermes", "qwen3", " Hi <b>there</b> {1} \n", Said(" Hi <b>there</b> {1} \n")),
    "hermes": Sample(
        "hermes",
        "qwen3",
        f'<think>\nHm </th\n</think>\n\nSure.\n<tool_call>\n{{"name": "weather", "arguments": {ZURICH}}}\n'
        "</tool_call>\n"
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        Said("Sure.", "Hm </th", BOTH),
    ),
    "minimax m1": Sample(
        "minimax",
        "minimax",
        f'<think>Hm.</think>\nSure.\n<tool_calls>\n{{"name": "weather", "arguments": {ZURICH}}}\n'
        '{"name": "now", "arguments": {}}\n</tool_calls>',
        Said("Sure.", "Hm.", BOTH),
    ),
    "longcat": Sample(
        "longcat",
        "longcat",
        "<longcat_think>\nHm.\n</longcat_think>\nSure.\n<longcat_tool_call>\n"
        f'{{"name": "weather", "arguments": {ZURICH}}}\n'
        '</longcat_tool_call>\n<longcat_tool_call>{"name": "now", "arguments": {}}</longcat_tool_call>',
        Said("Sure.", "Hm.", BOTH),
    ),
    "hermes, arguments first": Sample(
        "qwen",
        None,
        f'<tool_call>{{"arguments": {ODD}, "name": "weather"}}</tool_call>',
        Said(calls=(("weather", ODD),)),
    ),
    "hermes, no arguments": Sample(
        "hermes", None, '<tool_call>{"name": "now"}</tool_call>', Said(calls=(("now", "{}"),))
    ),
    "hermes, arguments as text": Sample(
        "hermes",
        None,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        Said(calls=(("f", '{"a": 1}'),)),
    ),
    "hermes, arguments as text that is no object": Sample(
        "hermes",
        None,
        '<tool_call>{"name": "f", "arguments": "hi \\"you\\""}</tool_call>'
        '<tool_call>{"name": "f", "arguments": "12"}</tool_call>',
        Said(calls=(("f", '"hi \\"you\\""'), ("f", '"12"'))),
    ),
    "hermes, half a character": Sample(
        "hermes", None, '<tool_call>{"name": "f\\udc00", "arguments": {}}</tool_call>', Said(calls=(("f\ufffd", "{}"),))
    ),
    "hermes, no call": Sample(
        "hermes", None, "a <tool_call>\nnot json</tool_call> b", Said("a <tool_call>\nnot json</tool_call> b")
    ),
    "hermes, no name": Sample(
        "hermes", None, '<tool_call>{"arguments": {}}</tool_call>!', Said('<tool_call>{"arguments": {}}</tool_call>!')
    ),
    "hermes, cut": Sample(
        "hermes",
        None,
        '<tool_call>{"name": "weather", "arguments": {"city": "Z',
        Said(calls=(("weather", '{"city": "Z'),)),
    ),
    "hermes, a bracket too few": Sample(
        "hermes",
        None,
        '<tool_call>{"name": "f", "arguments": {"a": {"b": 1}</tool_call>\nDone.',
        Said("Done.", calls=(("f", '{"a": {"b": 1}'),)),
    ),
    "prompt opens thinking": Sample("hermes", "deepseek_r1", "\nHm.\n</think>\n\nHi", Said("Hi", "Hm."), inside=True),
    "prompt and reply open thinking": Sample(
        "hermes", "deepseek_r1", "\n<think>\nHm.\n</think>\n\nHi", Said("Hi", "Hm."), inside=True
    ),
    "call ends thinking": Sample(
        "hermes", "qwen3", 'Hm.\n<tool_call>{"name": "now"}</tool_call>', Said("", "Hm.", (("now", "{}"),)), inside=True
    ),
    "no call in thinking": Sample(
        "hermes", "qwen3", "Use <tool_call> here.</think>Ok", Said("Ok", "Use <tool_call> here."), inside=True
    ),
    "second end of thinking": Sample("hermes", "qwen3", "a</think>b</think>c", Said("bc", "a"), inside=True),
    "end without thinking": Sample("hermes", "qwen3", "a</think>b", Said("a</think>b")),
    "granite": Sample(
        "granite",
        "granite",
        f'Here is my thought process: Hm. Here is my response:<|tool_call|>[{{"name": "weather", '
        f'"arguments": {ZURICH}}}, '
        '{"name": "now", "arguments": {}}]',
        Said("", "Hm.", BOTH),
    ),
    "qwen3_coder": Sample(
        "qwen3_coder", "qwen3", f"Ok.\n\n{QWEN_CODER}\n", Said("Ok.", "", (("weather", CODER_ARGUMENTS),))
    ),
    "qwen3_coder, inner tag alone": Sample(
        "qwen3_coder", None, "<function=now>\n</function>\n</tool_call>", Said(calls=(("now", "{}"),))
    ),
    "qwen3_coder, cut": Sample(
        "qwen3_coder",
        None,
        "<tool_call>\n<function=weather>\n<parameter=city>\nZü",
        Said(calls=(("weather", '{"city": "Zü'),)),
    ),
    "qwen3_coder, without closing tags": Sample(
        "qwen3_coder",
        None,
        "<tool_call>\n<function=weather>\n<parameter=days>\n2\n<parameter=city>\nBern\n</function>\n</tool_call>",
        Said(calls=(("weather", '{"days": 2, "city": "Bern"}'),)),
    ),
    "qwen3_coder, tags in a value": Sample(
        "qwen3_coder",
        None,
        "<tool_call>\n<function=weather>\n<parameter=city>\na\n<parameter=x>\n</function>\nb\n</parameter>\n</function>",
        Said(calls=(("weather", '{"city": "a\\n<parameter=x>\\n</function>\\nb"}'),)),
    ),
    "qwen3_coder, a list of Python": Sample(
        "qwen3_coder",
        None,
        "<function=weather><parameter=tags>['x', True, 07, {1, 2}]</parameter>"
        "<parameter=days>+5</parameter></function>",
        Said(calls=(("weather", '{"tags": ["x", true, 7, [1, 2]], "days": 5}'),)),
    ),
    "llama3_json": Sample(
        "llama3",
        None,
        f'{{"name": "weather", "parameters": {ZURICH}}}; {{"name": "now", "parameters": {{}}}}',
        Said(calls=BOTH),
    ),
    "llama3_json, marked": Sample(
        "llama3_json", None, f'<|python_tag|>{{"name": "weather", "parameters": {ZURICH}}}', Said(calls=BOTH[:1])
    ),
    "llama3_json, another object": Sample(
        "llama3_json", None, '{"name": "Ada", "age": 36} is', Said('{"name": "Ada", "age": 36} is')
    ),
    "llama3_json, within text": Sample(
        "llama3_json",
        None,
        f'So: {{"name": "weather", "parameters": {ZURICH}}}; {{"name": "now", "parameters": {{}}}} Ok.',
        Said("So:Ok.", calls=BOTH),
    ),
    "llama3_json, another object within text": Sample(
        "llama3_json",
        None,
        'It is {"name": "Ada", "parameters": {}}.',
        Said('It is {"name": "Ada", "parameters": {}}.'),
    ),
    "llama3_json, a quoted call": Sample(
        "llama3_json",
        "qwen3",
        '<think>Is it {"name": "now", "parameters": {}}?</think>No.',
        Said("No.", 'Is it {"name": "now", "parameters": {}}?'),
    ),
    "llama3_json, a list": Sample(
        "llama3_json",
        None,
        f'[{{"name": "weather", "parameters": {ZURICH}}}, {{"name": "now", "parameters": {{}}}}]',
        Said(calls=BOTH),
    ),
    "pythonic": Sample(
        "pythonic",
        None,
        "[weather(city='Zürich', days=2), now(), f(x=[True, None, {'a': (1.5, \"\\u00e9\\n\")}])]",
        Said(calls=(*BOTH, ("f", '{"x": [true, null, {"a": [1.5, "é\\n"]}]}'))),
    ),
    "pythonic, a link": Sample("pythonic", None, "[see](there) [f(x)]", Said("[see](there) [f(x)]")),
    "pythonic, marked": Sample("pythonic", None, "<|python_start|>[now()]<|python_end|>", Said(calls=(("now", "{}"),))),
    "lfm2": Sample(
        "lfm2", None, "<|tool_call_start|>[now()]<|tool_call_end|>Wait.", Said("Wait.", calls=(("now", "{}"),))
    ),
    "lfm2, JSON": Sample(
        "lfm2",
        None,
        f'<|tool_call_start|>[{{"name": "weather", "arguments": {ZURICH}}}, now()]<|tool_call_end|>',
        Said(calls=BOTH),
    ),
    "olmo3": Sample(
        "olmo3",
        None,
        "Ok<function_calls>now()\nf(a=null)</function_calls>",
        Said("Ok", calls=(("now", "{}"), ("f", '{"a": null}'))),
    ),
    "mistral, a list": Sample(
        "mistral",
        None,
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {ZURICH}, "id": "abcdefghi"}}, '
        '{"name": "now", "arguments": {}}]',
        Said(calls=BOTH),
    ),
    "mistral, names": Sample(
        "mistral",
        "magistral",
        f"[THINK]Hm.[/THINK]Ok.[TOOL_CALLS]weather[ARGS]{ZURICH}[TOOL_CALLS]now{{}}",
        Said("Ok.", "Hm.", BOTH),
    ),
    "internlm": Sample(
        "internlm",
        None,
        f'Ok<|action_start|><|plugin|>\n{{"name": "weather", "parameters": {ZURICH}}}<|action_end|>\n',
        Said("Ok", calls=BOTH[:1]),
    ),
    "deepseek_v3": Sample(
        "deepseek_v3",
        "deepseek_r1",
        "Hm.</think>Ok."
        + _deepseek(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{ZURICH}\n```<｜tool▁call▁end｜>",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>",
        ),
        Said("Ok.", "Hm.", BOTH),
        inside=True,
    ),
    "deepseek_v31": Sample(
        "deepseek_v31",
        None,
        _deepseek(
            f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ZURICH}<｜tool▁call▁end｜>",
            "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        ),
        Said(calls=BOTH),
    ),
    "deepseek_v32": Sample("deepseek_v32", None, f"Ok.\n\n{DSML}", Said("Ok.", calls=BOTH)),
    "deepseek_v32, types of the schema": Sample(
        "deepseek_v32",
        None,
        '<｜DSML｜function_calls><｜DSML｜invoke name="weather"><｜DSML｜parameter name="days" string="true">2'
        '</｜DSML｜parameter><｜DSML｜parameter name="city" string="false">"Bern"</｜DSML｜parameter>'
        '<｜DSML｜parameter name="tags">["x"]</｜DSML｜parameter><｜DSML｜parameter name="x" string="false">a b'
        "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>",
        Said(calls=(("weather", '{"days": 2, "city": "Bern", "tags": ["x"], "x": "a b"}'),)),
    ),
    "deepseek_v4": Sample("deepseek_v4", None, DSML.replace("function_calls", "tool_calls"), Said(calls=BOTH)),
    "kimi_k2": Sample("kimi_k2", "kimi", f"◁think▷Hm◁/think▷Ok{KIMI}", Said("Ok", "Hm", BOTH)),
    "kimi_k2, no index": Sample("kimi_k2", None, KIMI.replace(":0", "").replace(":1", ""), Said(calls=BOTH)),
    "kimi_k2, no name": Sample(
        "kimi_k2", None, KIMI.replace("functions.weather:", ""), Said(KIMI.replace("functions.weather:", ""))
    ),
    "glm45": Sample(
        "glm45", "glm45", f"<think>Hm.</think>\nOk.\n{GLM}\n<tool_call>now\n</tool_call>", Said("Ok.", "Hm.", BOTH)
    ),
    "glm47": Sample("glm47", None, GLM.replace("\n", ""), Said(calls=BOTH[:1])),
    "glm4": Sample("glm4", None, f"weather\n{ZURICH}", Said(calls=BOTH[:1])),
    "glm4, text": Sample("glm4", None, "weather\nis fine", Said("weather\nis fine")),
    "harmony": Sample("openai", None, HARMONY, Said("One moment.", "Hm.", BOTH[:1])),
    "harmony, an answer": Sample(
        "gpt-oss",
        None,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi {a}<|return|>",
        Said("Hi {a}", "Hm."),
    ),
    "harmony, cut": Sample("openai", None, "<|channel|>ana", Said()),
    "harmony, recipient first": Sample(
        "openai",
        None,
        f" to=functions.weather<|channel|>commentary json<|message|>{ZURICH}<|call|>",
        Said(calls=BOTH[:1]),
    ),
    "harmony, arguments that are not JSON": Sample(
        "openai",
        None,
        "<|channel|>commentary to=functions.f<|message|>a b<|call|><|start|>assistant<|channel|>final<|message|>Hi",
        Said("Hi", calls=(("f", "a b"),)),
    ),
    "harmony, no header": Sample("openai", None, "Hi there", Said("Hi there")),
    "phi4": Sample(
        "phi4_mini_json", None, f'functools[{{"name": "weather", "arguments": {ZURICH}}}]', Said(calls=BOTH[:1])
    ),
    "phi4, marked": Sample(
        "phi4_mini_json", None, '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>', Said(calls=BOTH[1:])
    ),
    "command, an answer": Sample("cohere", "cohere", "<|START_RESPONSE|>Ok.<|END_RESPONSE|>", Said("Ok.")),
    "command": Sample(
        "cohere_command3",
        "cohere",
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n"
        f'{{"tool_call_id": "0", "tool_name": "weather", "parameters": {ZURICH}}},\n'
        '{"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        Said("", "Hm.", BOTH),
    ),
    "gemma4": Sample(
        "gemma4",
        "gemma4",
        '<|channel>thought\nHm.<channel|><|tool_call>call:weather{city:<|"|>Zürich<|"|>,days:2}<tool_call|>',
        Said("", "Hm.", BOTH[:1]),
    ),
    "gemma4, bare values": Sample(
        "gemma4",
        None,
        "<|tool_call>call:f{a:New York,b:108.,c:,d:[x y,2],e:null}<tool_call|>",
        Said(calls=(("f", '{"a": "New York", "b": 108.0, "c": "", "d": ["x y", 2], "e": null}'),)),
    ),
    "functiongemma": Sample(
        "functiongemma",
        None,
        "<start_function_call>call:f{a:[1,<escape>b<escape>],c:{d:true}}<end_function_call>",
        Said(calls=(("f", '{"a": [1, "b"], "c": {"d": true}}'),)),
    ),
    "minimax": Sample(
        "minimax_m2", "minimax_m2", f"Hm.\n</think>\n\n{MINIMAX}", Said("", "Hm.", BOTH[:1]), inside=True
    ),
    "minimax, no quotes": Sample(
        "minimax_m2",
        None,
        "<minimax:tool_call><invoke name=weather><parameter name='days'>2</parameter></invoke></minimax:tool_call>",
        Said(calls=(("weather", '{"days": 2}'),)),
    ),
    "seed_oss": Sample(
        "seed_oss",
        "seed_oss",
        "<seed:think>Hm.</seed:think>\n<seed:tool_call>\n<function=weather>\n<parameter=city>Zürich</parameter>\n"
        "<parameter=days>2</parameter>\n</function>\n</seed:tool_call>",
        Said("", "Hm.", BOTH[:1]),
    ),
    "hy_v3": Sample(
        "hy_v3",
        None,
        "Ok.<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now<tool_sep></tool_call>\n"
        "</tool_calls>",
        Said("Ok.", calls=BOTH),
    ),
    "jamba": Sample(
        "jamba",
        None,
        f' Ok.<tool_calls>[\n    {{"name": "weather", "arguments": {ZURICH}}},\n    '
        '{"name": "now", "arguments": {}}\n]</tool_calls>',
        Said(" Ok.", calls=BOTH),
    ),
    "hunyuan_a13b": Sample(
        "hunyuan_a13b",
        "hunyuan_a13b",
        "<think>\nHm.\n</think>\n<answer>\nOk.\n</answer>",
        Said("Ok.", "Hm."),
    ),
    "ernie45": Sample(
        "ernie45", "ernie45", "Hm.\n</think>\n\n<response>\nOk.\n</response>\n", Said("Ok.", "Hm."), inside=True
    ),
    "nemotron_json": Sample(
        "nemotron_json",
        None,
        f'Ok.<TOOLCALL>[{{"name": "weather", "arguments": {ZURICH}}}, {{"name": "now", "arguments": {{}}}}]</TOOLCALL>',
        Said("Ok.", calls=BOTH),
    ),
    "apertus": Sample(
        "apertus",
        "apertus",
        f'<|inner_prefix|>Hm.<|inner_suffix|>Ok.<|tools_prefix|>[{{"weather": {ZURICH}}}, '
        '{"now": {}}]<|tools_suffix|>',
        Said("Ok.", "Hm.", BOTH),
    ),
    "apertus, no mark behind": Sample(
        "apertus", None, f'<|tools_prefix|>[{{"weather": {ZURICH}}}', Said(calls=BOTH[:1])
    ),
    "granite-20b-fc": Sample(
        "granite-20b-fc",
        None,
        f'Ok.\n<function_call> {{"name": "weather", "arguments": {ZURICH}}}\n<function_call> '
        '{"name": "now", "arguments": {}}',
        Said("Ok.", calls=BOTH),
    ),
    "xlam": Sample(
        "xlam",
        None,
        f'[{{"name": "weather", "arguments": {ZURICH}}}, {{"name": "now", "arguments": {{}}}}]',
        Said(calls=BOTH),
    ),
    "xlam, behind text": Sample(
        "xlam",
        "qwen3",
        '<think>Is it [{"name": "now"}]?</think>Ok. [{"name": "now"}] Done.',
        Said("Ok.Done.", 'Is it [{"name": "now"}]?', BOTH[1:]),
    ),
    "xlam, in a block": Sample(
        "xlam", None, 'Ok.\n```json\n[{"name": "now", "arguments": {}}]\n```', Said("Ok.", calls=BOTH[1:])
    ),
    "xlam, marked": Sample(
        "xlam", None, 'Ok.[TOOL_CALLS][{"name": "now", "arguments": {}}]', Said("Ok.", calls=BOTH[1:])
    ),
    "xlam, tagged": Sample(
        "xlam", None, 'Ok.<tool_call>[{"name": "now", "arguments": {}}]</tool_call>', Said("Ok.", calls=BOTH[1:])
    ),
    "xlam, another list": Sample(
        "xlam", None, '```json\n[{"a": 1}]\n``` [{"name": "Ada"}]', Said('```json\n[{"a": 1}]\n``` [{"name": "Ada"}]')
    ),
}
