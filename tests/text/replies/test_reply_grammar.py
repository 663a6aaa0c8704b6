"""Replies that are held to calls: the format's own parser reads what its grammar allows, with valid arguments."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

import asyncllm
from asyncllm.config.structured_output.response_format import GrammarSpec, grammar_of
from asyncllm.config.tools import ToolChoice, choice_of
from asyncllm.errors import InvalidParameter, UnsupportedFeature
from asyncllm.text.grammars.bridge import AnswerGrammar, GrammarCompiler, GrammarStart
from asyncllm.text.replies.formats import TOOL_FORMATS, TOOL_PARSERS
from asyncllm.text.replies.reader import ToolFormat
from asyncllm.text.replies.reply import Reply, ReplyFormat
from asyncllm.text.replies.reply_grammar import reply_grammar
from asyncllm.text.tokenizer import Tokenizer
from tests.text.replies.samples import SAMPLES, Said, said

FOLDER = Path(asyncllm.__file__).parent / "assets" / "tiny-chat"
NAMES = [form.name for form in TOOL_FORMATS]

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "near": {"type": ["string", "null"]},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOW: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def tool(name: str, parameters: Any = None, *, strict: bool = False) -> dict[str, Any]:
    function = {"name": name, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}


TOOLS = [tool("weather", WEATHER), tool("now")]
SCHEMAS = {"weather": WEATHER, "now": NOW}


class Model:
    """A tokenizer in which a format's markers may be special tokens, and what one needs to try its grammars."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_folder(folder)
        self.vocab = self.tokenizer.vocab_size
        self.eos = list(self.tokenizer.eos_token_ids)
        self.compiler = GrammarCompiler(self.tokenizer, self.vocab, self.eos)
        self.words = np.zeros(-(-self.vocab // 32), np.int32)

    def allowed(self, progress: Any) -> list[int]:
        progress.fill(self.words)
        return list(map(int, np.flatnonzero(np.unpackbits(self.words.view(np.uint8), bitorder="little")[: self.vocab])))

    def takes(self, spec: GrammarSpec, text: str) -> bool:
        """Whether the text may be a whole reply."""
        progress = AnswerGrammar(self.compiler.compile(spec, spaced=False), GrammarStart()).start(())
        for token in [*self.tokenizer.encode(text, add_bos=False), self.eos[0]]:
            if token not in self.allowed(progress):
                return False
            progress.consume(token)
        return True

    def drawn(self, spec: GrammarSpec, form: ToolFormat, rng: random.Random) -> list[int]:
        """A reply drawn among the tokens that are allowed, which looks for its end."""
        progress = AnswerGrammar(self.compiler.compile(spec, spaced=True), GrammarStart()).start(())
        tokens: list[int] = []
        wanted: list[int] = []
        closers = [self.tokenizer.encode(text, add_bos=False) for text in (*CLOSERS, *form.inside)]
        while len(tokens) < 1500:
            allowed = self.allowed(progress)
            assert progress.error is None
            ends = [token for token in self.eos if token in allowed]
            if ends and (len(ends) == len(allowed) or rng.random() < 0.2):
                return tokens
            while wanted and wanted[0] not in allowed:
                wanted = []
            if not wanted and rng.random() < 0.7:
                wanted = list(next((each for each in rng.sample(closers, len(closers)) if each[0] in allowed), []))
            token = wanted.pop(0) if wanted else rng.choice([each for each in allowed if each not in ends])
            progress.consume(token)
            tokens.append(token)
        raise AssertionError("the reply does not end: " + self.tokenizer.decode(tokens))


CLOSERS = ['"', "}", "]", ")", "1", "\n</parameter>", "commentary to=functions.now "]


@cache
def plain() -> Model:
    return Model(FOLDER)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Name of a format -> a model whose tokenizer has the format's markers as special tokens."""

    def build(name: str) -> Model:
        form = TOOL_PARSERS[name]
        folder = tmp_path_factory.mktemp(name)
        text = (FOLDER / "tokenizer.json").read_text(encoding="utf-8")
        plain_marks = ("functools", "<function=", '{"name"')
        marks = dict.fromkeys(mark for mark in (*form.openers, *form.inside) if mark not in plain_marks)
        if "<|action_start|><|plugin|>" in marks:
            marks = dict.fromkeys(["<|action_start|>", "<|plugin|>", "<|action_end|>"])
        if any("｜DSML｜" in mark for mark in marks):
            marks = dict.fromkeys(["｜DSML｜"])
        for number, mark in enumerate(marks):
            text = text.replace(json.dumps(f"<|reserved_{number}|>"), json.dumps(mark))
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")
        for other in ("config.json", "tokenizer_config.json", "generation_config.json"):
            (folder / other).write_bytes((FOLDER / other).read_bytes())
        return Model(folder)

    return cache(build)


def read(model: Model, form: ToolFormat, tokens: list[int]) -> tuple[Said, int]:
    """What the parser makes of a reply, and how many of its calls came to their end."""
    reply_form = ReplyFormat(form, None, model.tokenizer)
    reply = Reply(reply_form, SCHEMAS)
    events = []
    for token in tokens:
        piece = model.tokenizer.decode([token], skip_special_tokens=False)
        events += reply.push(reply_form.tokens.get(token, piece))
    return said(events + reply.end()), reply.num_complete


def check(found: Said, complete: int) -> None:
    assert found.calls
    assert complete == len(found.calls)
    for name, arguments in found.calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("name", NAMES)
def test_a_reply_that_has_to_call_calls_with_valid_arguments(name: str, model_of: Any) -> None:
    form, rng = TOOL_PARSERS[name], random.Random(name)
    for model in (plain(), model_of(name)):
        spec = reply_grammar(form, model.tokenizer, TOOLS, ToolChoice(required=True), None, many=True)
        for _ in range(2):
            tokens = model.drawn(spec, form, rng)
            if any(model.tokenizer.decode([token]).endswith("\ufffd") for token in tokens):
                continue  # a character of several tokens, which only the detokenizer joins
            found, complete = read(model, form, tokens)
            check(found, complete)
            assert form.whole is not None or (found.text, found.thought) == ("", "")


TYPICAL = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>",
    "llama3_json": '{"name": "weather", "parameters": {"city": "Bern", "days": 2}}',
    "pythonic": '[weather(city="Bern", days=2, exact=True), now()]',
    "olmo3": '<function_calls>weather(city="Bern", days=2)\nnow()</function_calls>',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Bern", "days": 2}}]',
    "internlm": '<|action_start|><|plugin|>\n{"name": "weather", "parameters": {"city": "Bern", "days": 2}}'
    "<|action_end|>",
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>",
    "glm4": 'weather\n{"city": "Bern", "days": 2}',
    "gemma4": '<|tool_call>call:weather{city:<|"|>Bern<|"|>,days:2}<tool_call|>',
    "openai": '<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather '
    '<|constrain|>json<|message|>{"city": "Bern", "days": 2}',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Bern</parameter>\n'
    '<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Bern", "days": 2}<|tool_call_end|><|tool_calls_section_end|>',
    "deepseek_v3": SAMPLES["deepseek_v3"].raw.partition("Ok.")[2],
    "deepseek_v31": SAMPLES["deepseek_v31"].raw.replace("\n", ""),
    "deepseek_v32": SAMPLES["deepseek_v32"].raw.partition("Ok.\n\n")[2],
    "cohere_command3": '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "now", "parameters": {}}\n]'
    "<|END_ACTION|>",
}  # fmt: skip


@pytest.mark.parametrize("name", TYPICAL)
def test_what_models_write_is_allowed_and_what_they_may_not_call_is_not(name: str, model_of: Any) -> None:
    form, text = TOOL_PARSERS[name], TYPICAL[name]
    for model in (plain(), model_of(name)):
        forced, free = (
            reply_grammar(form, model.tokenizer, TOOLS, ToolChoice(required), None, many=True)
            for required in (True, False)
        )
        if name != "mistral" or model is plain():
            assert model.takes(forced, text)
            assert model.takes(free, text)
        assert not model.takes(forced, "Hello")
        if form.whole is None:
            assert model.takes(free, "Hello {there}")


def test_only_chosen_tools_are_called_and_one_where_one_may_be() -> None:
    form, model = TOOL_PARSERS["hermes"], plain()
    one = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'

    def takes(choice: Any, text: str, *, many: bool = True) -> bool:
        chosen = choice_of(choice, TOOLS)
        assert chosen is not None
        return model.takes(reply_grammar(form, model.tokenizer, TOOLS, chosen, None, many=many), text)

    weather = {"type": "function", "function": {"name": "weather"}}
    assert not takes(weather, one)
    assert takes({"type": "function", "name": "now"}, one)
    assert takes({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}, one)
    assert not takes({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [weather]}}, one)
    assert takes({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [weather]}}, "No.")
    assert takes("required", f"{one}\n{one}")
    assert not takes("required", f"{one}\n{one}", many=False)
    assert takes("auto", f"Wait.\n{one}")
    assert not takes("auto", one.replace("now", "then"))


def test_a_reply_is_a_call_or_content_of_the_form() -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for response_format, good, bad in (
        ({"type": "json_schema", "schema": NOW}, "{}", '{"a": 1}'),
        ({"type": "regex", "regex": r"a/b\/c|\d"}, "a/b/c", "ab"),
        ({"type": "choice", "choice": ["yes/no", 'n"o']}, 'n"o', "yes"),
    ):
        content = grammar_of(response_format)
        spec = reply_grammar(TOOL_PARSERS["hermes"], plain().tokenizer, TOOLS, ToolChoice(), content, many=True)
        assert [plain().takes(spec, text) for text in (call, good, bad)] == [True, True, False]
    lark = grammar_of({"type": "grammar", "grammar": 'start: "a"'})
    with pytest.raises(UnsupportedFeature, match="combined with tools"):
        reply_grammar(TOOL_PARSERS["hermes"], plain().tokenizer, TOOLS, ToolChoice(), lark, many=True)


def test_harmony_holds_its_last_message(model_of: Any) -> None:
    model, form = model_of("openai"), TOOL_PARSERS["openai"]
    content = grammar_of({"type": "choice", "choice": ["yes"]})
    spec = reply_grammar(form, model.tokenizer, (), ToolChoice(), content, many=True)
    front = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
    assert model.takes(spec, front + "yes")
    assert not model.takes(spec, front + "no")


STRICT = {"type": "object", "properties": {"x": {"type": "string", "pattern": "^a+$"}}, "required": ["x"],
          "additionalProperties": False}  # fmt: skip


def test_strict_arguments_are_held_to_all_of_their_schema_or_refused() -> None:
    model = plain()

    def held(name: str, schema: Any, *, strict: bool = True) -> GrammarSpec:
        tools = [tool("f", schema, strict=strict)]
        return reply_grammar(TOOL_PARSERS[name], model.tokenizer, tools, ToolChoice(), None, many=True)

    call = '<tool_call>\n{"name": "f", "arguments": {"x": "%s"}}\n</tool_call>'
    assert [model.takes(held("hermes", STRICT), call % text) for text in ("aa", "b")] == [True, False]
    for name in ("qwen3_coder", "glm45", "minimax_m2", "gemma4"):
        with pytest.raises(UnsupportedFeature, match="strict"):
            held(name, STRICT)
        held(name, STRICT, strict=False)
    mark = "｜DSML｜"
    dsml = (
        f'<{mark}function_calls>\n<{mark}invoke name="f">\n<{mark}parameter name="x" string="false">"aa"'
        f"</{mark}parameter>\n</{mark}invoke>\n</{mark}function_calls>"
    )
    assert model.takes(held("deepseek_v32", STRICT), dsml)
    assert not model.takes(held("deepseek_v32", STRICT), dsml.replace("aa", "b"))
    with pytest.raises(UnsupportedFeature, match="'a b'"):
        held("qwen3_coder", {"type": "object", "properties": {"a b": {}}}, strict=False)
    with pytest.raises(UnsupportedFeature, match="'anyOf'"):
        held("pythonic", {"type": "object", "anyOf": [{"required": ["a"]}]})
    with pytest.raises(InvalidParameter, match="uniqueItems") as caught:
        model.compiler.compile(held("hermes", {"type": "array", "uniqueItems": True}), spaced=False)
    assert caught.value.param == "tools"
