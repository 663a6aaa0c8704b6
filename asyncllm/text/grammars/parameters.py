"""The grammar of a call's parameters where each is written by itself, for structural tags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from asyncllm.config.structured_output.structural_tag import JsonText
from asyncllm.errors import InvalidParameter
from asyncllm.text.grammars.lark import Lark

__all__ = ["parameters_rule"]

ANNOTATIONS = {"type", "title", "description", "default", "examples", "deprecated"}
"""Keywords that do not constrain a text."""
WHOLE = {"$ref", "allOf", "anyOf", "oneOf", "not", "if", "const", "enum", "patternProperties"}
"""Keywords that constrain an object as a whole."""
LINE_END = '"\\n"?'
KEY = "\0"
"""Where the parameter's name is."""


class _Form(NamedTuple):
    """How a model writes a parameter."""

    before: tuple[str, ...]
    """What is before a value, with line ends that may be missing between its entries."""
    closer: str
    before_json: tuple[str, ...] = ()
    """The same for a value in JSON, if that differs."""


DSML = f'<｜DSML｜parameter name="{KEY}" string='
FORMS = {
    "qwen_xml": _Form((f"<parameter={KEY}>",), "</parameter>"),
    "minimax_xml": _Form((f'<parameter name="{KEY}">',), "</parameter>"),
    "glm_xml": _Form((f"<arg_key>{KEY}</arg_key>", "<arg_value>"), "</arg_value>"),
    "deepseek_xml": _Form((f'{DSML}"true">',), "</｜DSML｜parameter>", (f'{DSML}"false">',)),
}


def parameters_rule(rules: Lark, part: JsonText, field: str) -> str:
    """Return the rule for the parameters that a schema names, in its order. A text is written as it is, everything else
    as JSON. Raises InvalidParameter for a schema that such parameters cannot be held to."""
    schema, form = part.json_schema, FORMS[part.style]
    beyond = sorted(WHOLE & schema.keys())
    properties = schema.get("properties", {})
    if beyond or not isinstance(properties, Mapping) or schema.get("type", "object") != "object":
        _refuse(f"describes no object of properties ({beyond[0]})" if beyond else "describes no object", field)
    required = schema.get("required", [])
    named = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    rest = [LINE_END]
    for name in [*properties, *(name for name in required if name not in properties)]:
        if not name or re.search(r"[\s<>\"]", name):
            _refuse(f"has a property {name[:50]!r}, whose name they cannot hold", field)
        rule = rules.rule(_parameter(rules, form, name, properties.get(name, {}), named, field))
        rest.append(f"({rule} {LINE_END}){'' if name in required else '?'}")
    return rules.rule(" ".join(rest))


def _parameter(rules: Lark, form: _Form, name: str, schema: Any, named: dict[str, Any], field: str) -> str:
    schema = schema if isinstance(schema, Mapping) else {} if schema else {"enum": []}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    texts = isinstance(values, list) and values and all(isinstance(value, str) for value in values)
    is_text = texts or schema.get("type") == "string"
    head = [
        rules.literal(each.replace(KEY, name)) for each in (form.before if is_text else form.before_json or form.before)
    ]
    if is_text and texts and not set(schema) - ANNOTATIONS - {"const", "enum"}:
        value = f"{LINE_END} ({' | '.join(map(rules.literal, values))}) {LINE_END} {rules.literal(form.closer)}"
    elif is_text and not set(schema) - ANNOTATIONS:
        value = rules.until(form.closer)
    elif is_text:
        _refuse(f"constrains the text {name!r} by {min(set(schema) - ANNOTATIONS)!r}", field)
    else:
        value = f"{LINE_END} {rules.json({**schema, **named})} {LINE_END} {rules.literal(form.closer)}"
    return f"{f' {LINE_END} '.join(head)} {value}"


def _refuse(why: str, field: str) -> NoReturn:
    raise InvalidParameter(
        f"The structural tag of {field} has a schema for parameters that are written one by one, which {why}. Leave "
        f"that out, or send the style json.",
        field,
    )
