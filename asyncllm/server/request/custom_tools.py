"""OpenAI's custom tools, whose calls have a text instead of arguments. To the model they are functions with a single
parameter."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from asyncllm.server.http.errors import ApiError

__all__ = [
    "InputText",
    "arguments_of",
    "as_function",
    "chat_choice",
    "chat_functions",
    "custom_names_among",
    "input_of",
    "is_callable",
]

INPUT = "input"
"""Name of the parameter."""
OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
WHOLE_CHARACTERS = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[0-9a-fA-F]{4}|(?=[^\\]|\\[^u])))*'
)
"""What a piece of a JSON string holds completely: a character beyond U+FFFF is two escapes."""


def is_callable(tool: Mapping[str, Any]) -> bool:
    """Return whether this is a function, or a custom tool with a format that calls can hold."""
    return tool.get("type") == "function" or (tool.get("type") == "custom" and _schema_of(tool) is not None)


def _schema_of(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the schema of a custom tool's text, or None if there is none for its format."""
    form = tool.get("format") or {"type": "text"}
    if not isinstance(form, Mapping):
        return None
    if form.get("type") == "text":
        return {"type": "string"}
    # Chats have the grammar in an object of its own.
    grammar = form.get("grammar", form)
    is_regex = form.get("type") == "grammar" and isinstance(grammar, Mapping) and grammar.get("syntax") == "regex"
    if is_regex and isinstance(grammar.get("definition"), str):
        return {"type": "string", "pattern": f"^(?:{grammar['definition']})$"}
    return None


def chat_functions(tools: Sequence[Any]) -> list[Any]:
    """Return the tools of a chat with custom tools as functions. Raises ApiError for formats that calls cannot hold."""
    return [
        {"type": "function", "function": as_function(tool["custom"])} if _is_custom(tool) else tool for tool in tools
    ]


def custom_names_among(tools: Sequence[Any]) -> frozenset[str]:
    """Return the names of a chat's custom tools."""
    return frozenset(tool["custom"]["name"] for tool in tools if _is_custom(tool))


def chat_choice(choice: Any) -> Any:
    """Return a chat's `tool_choice` with custom tools as functions."""
    if _is_custom(choice):
        return {"type": "function", "function": choice["custom"]}
    inner = choice.get("allowed_tools") if isinstance(choice, Mapping) else None
    if isinstance(inner, Mapping) and isinstance(inner.get("tools"), list):
        return {**choice, "allowed_tools": {**inner, "tools": [chat_choice(each) for each in inner["tools"]]}}
    return choice


def _is_custom(tool: Any) -> bool:
    return isinstance(tool, Mapping) and tool.get("type") == "custom" and isinstance(tool.get("custom"), Mapping)


def as_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a custom tool as a function, without `type`. Raises ApiError for a format that calls cannot hold."""
    schema = _schema_of(tool)
    if schema is None:
        raise ApiError(
            400,
            f"The custom tool {str(tool.get('name'))[:64]!r} has a format other than text and grammar with the syntax "
            f"regex. A Lark grammar cannot hold a text inside a call's JSON: say the form in the description instead.",
            code="unsupported_parameter",
            param="tools",
        )
    parameters = {
        "type": "object",
        "properties": {INPUT: schema},
        "required": [INPUT],
        "additionalProperties": False,
    }
    named = {key: tool[key] for key in ("name", "description") if tool.get(key) is not None}
    return {**named, "parameters": parameters, "strict": "pattern" in schema}


def arguments_of(text: str) -> str:
    """Return the arguments with which the model calls the function of a custom tool."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """Return the text in the arguments of a whole call."""
    reader = InputText()
    reader.read(arguments)
    return reader.text


class InputText:
    """Reads the text out of a call's arguments, piece by piece."""

    def __init__(self) -> None:
        self._arguments = ""
        """The arguments so far, while they are not known to be a text; then what has not been read."""
        self._found: list[str] | None = None
        """The pieces of the text; None: it has not begun."""

    def read(self, piece: str) -> str:
        """Return what the next piece of the arguments adds to the text."""
        self._arguments += piece
        if self._found is None:
            opening = OPENING.match(self._arguments)
            if opening is None:
                return ""
            self._found, self._arguments = [], self._arguments[opening.end() :]
        whole = WHOLE_CHARACTERS.match(self._arguments)
        assert whole is not None, "it matches an empty text"
        # After the text's closing quote nothing matches any more.
        self._arguments = self._arguments[whole.end() :]
        self._found.append(_unescaped(whole[0]))
        return self._found[-1]

    def rest(self) -> str:
        """Return, at the end of the arguments, what was not read: all of them if they are not those of a custom tool,
        as a model that is not held to them may write."""
        return self._arguments if self._found is None else ""

    @property
    def text(self) -> str:
        """The whole text."""
        return self._arguments if self._found is None else "".join(self._found)


def _unescaped(escaped: str) -> str:
    text: str = json.loads(f'"{escaped}"', strict=False)
    # Half of a pair of escapes is no character.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
