"""The grammar of a whole reply that must or may call a tool, or whose content has a required form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from asyncllm.config.structured_output.json_schema import checked_schema
from asyncllm.config.structured_output.response_format import GrammarSpec
from asyncllm.config.tools import ToolChoice
from asyncllm.errors import InvalidParameter, UnsupportedFeature
from asyncllm.text.grammars.lark import ANY_TEXT, WHITE_SPACE, Lark, escaped
from asyncllm.text.replies.call_rules import CalledTool, CallGrammar, CallRules
from asyncllm.text.replies.reader import ToolFormat
from asyncllm.text.tokenizer import Tokenizer

__all__ = ["call_grammar", "reply_grammar"]

MAX_TOOLS_TEXT = 512 * 1024
"""Maximum total length of all tools' schemas in characters."""
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def call_grammar(form: ToolFormat, tokenizer: Tokenizer) -> CallGrammar | None:
    """Return the grammar of calls in the format for the model of this tokenizer, or None if it has none."""
    fitting = (each for each in form.grammars if not each.needs or tokenizer.token_id(each.needs) is not None)
    return next(fitting, None)


def reply_grammar(
    form: ToolFormat,
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    content: GrammarSpec | None,
    *,
    many: bool,
) -> GrammarSpec:
    """Return the grammar of a reply in this format: calls of the `tools` that the `choice` allows, or `content`.

    `many`: several calls are allowed. Raises InvalidParameter, UnsupportedFeature.
    """
    called = [_called(tool) for tool in tools if choice.allows(tool["function"]["name"])]
    if sum(len(json.dumps(tool.prepared)) for tool in called) > MAX_TOOLS_TEXT:
        raise InvalidParameter(
            f"The schemas of the tools have more than {MAX_TOOLS_TEXT} characters together, more than calls can be "
            f"held to. Send fewer tools, or do not force calls.",
            "tools",
        )
    rules = CallRules(tokenizer, called, many=many)
    body = _body(form, tokenizer, rules, choice, content)
    rules.rule(body, "answer")
    return GrammarSpec("calls", rules.text)


def _body(
    form: ToolFormat, tokenizer: Tokenizer, rules: CallRules, choice: ToolChoice, content: GrammarSpec | None
) -> str:
    """Return the Lark of the reply after the reasoning."""
    if form.whole is not None:
        return form.whole(rules, None if choice.required else _content(rules, content))
    grammar = call_grammar(form, tokenizer)
    if grammar is None:
        raise UnsupportedFeature(
            f"Calls in the format {form.name!r} cannot be constrained. Send tool_choice='auto', tools that are "
            f"not strict, and no response_format.",
            "tools",
        )
    if not rules.tools:
        return _content(rules, content)
    calls = grammar.rules(rules)
    whole = f"{rules.literal(grammar.opener)} {calls}" if grammar.opener else calls
    if choice.required:
        return whole
    if content is not None:
        return f"{whole} | {_content(rules, content)}"
    unmarked = [opener for opener in form.openers if opener != grammar.opener and rules.special(opener) is None]
    never = [rf"(.|\n)*{escaped(opener)}(.|\n)*" for opener in unmarked]
    if grammar.lookalike is not None:
        return f"{calls} | {rules.text_without([*never, grammar.lookalike([tool.name for tool in rules.tools])])}"
    text = rules.text_without(never)
    return f"{rules.until(grammar.opener, text)} {calls} | {text}"


def _called(tool: Mapping[str, Any]) -> CalledTool:
    function = tool["function"]
    schema = function.get("parameters") or NO_PARAMETERS
    return CalledTool(function["name"], schema, checked_schema(schema, "tools"), bool(function.get("strict")))


def _content(rules: Lark, content: GrammarSpec | None) -> str:
    """Return the rule for the content of a reply that may also be a call."""
    if content is None:
        return rules.terminal(ANY_TEXT)
    match content.kind:
        case "json_schema":
            white_space = WHITE_SPACE if content.white_space is None else content.white_space
            return rules.json(json.loads(content.source), white_space=white_space)
        case "regex":
            return rules.pattern(content.source)
        case "choice":
            return rules.terminal(f"/{'|'.join(escaped(word) for word in json.loads(content.source))}/")
    raise UnsupportedFeature(
        "A grammar or a structural tag cannot be combined with tools. Send a schema, a regular expression or a choice, "
        "or tool_choice='none'.",
        "response_format",
    )
