"""Grammar rules for tool calls, in the formats that the parsers read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from asyncllm.errors import UnsupportedFeature
from asyncllm.text.grammars.lark import Lark
from asyncllm.text.replies.values import properties_of, types_of
from asyncllm.text.tokenizer import Tokenizer

__all__ = [
    "ARGUMENTS",
    "CALLED",
    "KEY",
    "LINE_END",
    "NUMBER",
    "VALUE",
    "CallGrammar",
    "CallRules",
    "CalledTool",
    "checked_names",
    "names_of",
    "shaped",
    "tagged",
]

CALLED, ARGUMENTS, NUMBER, KEY, VALUE = "\0name\0", "\0arguments\0", "\0number\0", "\0key\0", "\0value\0"
"""Placeholders in the shape of a call, filled in for each call."""
LINE_END = "\0end\0"
"""A line break that may be missing."""
PLACEHOLDERS = re.compile("(\0[a-z]+\0)")

ANNOTATIONS = {"type", "title", "description", "default", "examples", "example", "deprecated"}
"""Keywords that do not constrain a string."""


OBJECT_KEYWORDS = {
    "$ref", "allOf", "anyOf", "oneOf", "not", "if", "const", "enum", "patternProperties", "minProperties",
    "maxProperties", "propertyNames", "dependentRequired", "dependentSchemas", "unevaluatedProperties",
}  # fmt: skip
"""Keywords that constrain an object as a whole rather than single properties."""


class CalledTool(NamedTuple):
    """A tool that may be called."""

    name: str
    schema: Mapping[str, Any]
    """The schema of its parameters, as sent by the client."""
    prepared: Mapping[str, Any]
    """The same schema, prepared for a grammar."""
    strict: bool


class CallRules(Lark):
    """Rules for the calls that one request allows."""

    def __init__(self, tokenizer: Tokenizer | None, tools: Sequence[CalledTool], *, many: bool) -> None:
        """`many`: several calls are allowed."""
        super().__init__(tokenizer)
        self.tools = tools
        self.many = many

    def arguments(self, tool: CalledTool) -> str:
        """Return the rule for a tool's arguments as a JSON object."""
        return self.json({"type": "object", **tool.prepared}, lenient=not tool.strict)

    def part(self, tool: CalledTool, name: str) -> str:
        """Return the rule for one parameter's value as JSON."""
        named = {key: tool.prepared[key] for key in ("$defs", "definitions") if key in tool.prepared}
        schema = properties_of(tool.prepared).get(name, {})
        schema = {"enum": []} if schema is False else schema if isinstance(schema, Mapping) else {}
        return self.json({**schema, **named}, lenient=not tool.strict)

    def filled(self, shape: str, contents: Mapping[str, str]) -> str:
        """Return the rule for a shape whose placeholders are filled in."""
        known = {LINE_END: '"\\n"?', NUMBER: "/[0-9]{1,3}/", **contents}
        parts = [known[part] if part in known else self.literal(part) for part in PLACEHOLDERS.split(shape) if part]
        return " ".join(parts) or '""'

    def alternatives(self, shape: str, contents: Callable[[CalledTool], Mapping[str, str]]) -> str:
        """Return the rule for a call of any tool."""
        each = [self.rule(self.filled(shape, contents(tool))) for tool in self.tools]
        return self.rule(" | ".join(each))

    def listed(self, entries: Sequence[tuple[str, bool]], separator: str) -> str:
        """Return the rule for entries in order. Each is (rule, whether it is required)."""
        listed = following = '""'
        for entry, needed in reversed(entries):
            first = f"{entry} {following}" if following != '""' else entry
            later = f"{self.literal(separator)} {first}"
            listed, following = (
                self.rule(first if needed else f"{first} | {listed}"),
                self.rule(later if needed else f"{later} | {following}"),
            )
        return listed

    def several(self, each: str, between: str, after: str) -> str:
        """Return the rule for one call, or for several if they are allowed."""
        more = f" ({self.literal(between)} {each})*" if self.many else ""
        if between == "" and self.many:
            more = f" ({each})*"
        return self.rule(f"{each}{more} {self.literal(after)}")


class CallGrammar(NamedTuple):
    """The grammar of a call format."""

    opener: str
    """The marker before a call. Empty: calls begin at the start of the reply."""
    rules: Callable[[CallRules], str]
    """Returns the name of the rule for the text after the opener. Raises UnsupportedFeature."""
    needs: str = ""
    """A special token of the models that write this format. A tokenizer without it belongs to another model."""
    lookalike: Callable[[Sequence[str]], str] | None = None
    """Given the tools' names, returns a regular expression that matches replies which begin like a call. For formats
    whose calls begin at the start of the reply."""


def shaped(
    opener: str,
    call: str,
    *,
    before: str = "",
    between: str = "",
    after: str = "",
    single: bool = False,
    needs: str = "",
    lookalike: Callable[[Sequence[str]], str] | None = None,
) -> CallGrammar:
    """Return the grammar of calls whose arguments are a JSON object. `single`: a reply has one call."""

    def rules(grammar: CallRules) -> str:
        grammar.many = grammar.many and not single
        each = grammar.alternatives(
            call,
            lambda tool: {CALLED: grammar.literal(tool.name), ARGUMENTS: grammar.arguments(tool)},
        )
        return grammar.rule(f"{grammar.literal(before)} {grammar.several(each, between, after)}")

    return CallGrammar(opener, rules, needs, lookalike)


def tagged(
    opener: str,
    begin: str,
    parameter: str,
    end: str,
    *,
    closer: str,
    json_parameter: str = "",
    before: str = "",
    between: str = "",
    after: str = "",
    unreadable: str = r"[\s<>\"]",
) -> CallGrammar:
    """Return the grammar of calls that write each parameter separately.

    `closer` ends a value. `json_parameter`: the shape of a JSON value, if it differs from a text's; otherwise the
    parser distinguishes them by the tool's schema. `unreadable`: characters that a parameter's name must not contain.
    """

    def rules(grammar: CallRules) -> str:
        def contents(tool: CalledTool) -> dict[str, str]:
            return {CALLED: grammar.literal(tool.name), ARGUMENTS: " ".join(parameters(tool)) or '""'}

        def parameters(tool: CalledTool) -> list[str]:
            return [written(tool, name) + "?" * (not needed) for name, needed in checked_names(tool, unreadable)]

        def written(tool: CalledTool, name: str) -> str:
            key = {KEY: grammar.literal(name)}
            front, _, tail = parameter.partition(VALUE)
            lead, _, rest = tail.partition(closer)
            text = _as_text(grammar, tool, name, lead, closer, is_marked=bool(json_parameter))
            if text is None:
                value = {VALUE: grammar.part(tool, name)}
                return grammar.rule(grammar.filled(json_parameter or parameter, key | value))
            return grammar.rule(f"{grammar.filled(front, key)} {text} {grammar.filled(rest, {})}")

        each = grammar.alternatives(begin + ARGUMENTS + end, contents)
        return grammar.rule(f"{grammar.literal(before)} {grammar.several(each, between, after)}")

    return CallGrammar(opener, rules)


def names_of(schema: Any) -> list[tuple[str, bool]]:
    """Return the names in an object's schema, each with whether it is required."""
    required = schema.get("required") if isinstance(schema, Mapping) else None
    needed = dict.fromkeys(each for each in required if isinstance(each, str)) if isinstance(required, list) else {}
    return [(name, name in needed) for name in {**dict.fromkeys(properties_of(schema)), **needed}]


def checked_names(tool: CalledTool, unreadable: str) -> list[tuple[str, bool]]:
    """Return `names_of` a tool's parameters. Raises UnsupportedFeature for names that match `unreadable`, which the
    format cannot write, and for schemas that constrain more than single parameters."""
    names = names_of(tool.prepared)
    for name, _ in names:
        if not name or re.search(unreadable, name):
            raise UnsupportedFeature(
                f"The tool {tool.name!r} has a parameter {name!r}, whose name the model's format of calls cannot "
                f"hold. Rename it, or do not force calls.",
                "tools",
            )
    beyond = sorted(OBJECT_KEYWORDS & set(tool.prepared))
    if tool.strict and beyond:
        raise UnsupportedFeature(
            f"The tool {tool.name!r} is strict, and its schema has {beyond[0]!r}: the model's format of calls writes "
            f"each parameter by itself. Leave one of them out.",
            "tools",
        )
    return names


def _as_text(grammar: CallRules, tool: CalledTool, name: str, lead: str, closer: str, *, is_marked: bool) -> str | None:
    """Return the rule for a parameter written as text, followed by `closer`, or None if it is written as JSON. `lead`
    precedes the closer. `is_marked`: the format marks values as text or JSON."""
    schema = properties_of(tool.schema).get(name)
    types = types_of(schema)
    if not isinstance(schema, Mapping) or types != {"string"}:
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values:
        texts = [value for value in values if isinstance(value, str) and closer not in value and value == value.strip()]
        if len(texts) == len(values):
            choice = " | ".join(grammar.literal(text) for text in texts)
            return grammar.rule(f"({choice}) {grammar.literal(lead + closer)}")
    elif not tool.strict or set(schema) <= ANNOTATIONS:
        return grammar.until(closer)
    if is_marked:
        return None
    raise UnsupportedFeature(
        f"The parameter {name!r} of the tool {tool.name!r} cannot be constrained by its schema: the model's call "
        f"format writes it as free text. Leave strict out, or describe the form in words.",
        "tools",
    )
