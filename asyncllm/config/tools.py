"""What clients say about tools, checked: OpenAI's `tools` and `tool_choice`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from asyncllm.errors import InvalidParameter, UnsupportedFeature, short

__all__ = ["MAX_TOOLS", "check_choice", "check_tools", "schemas_of"]

MAX_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise InvalidParameter unless each is a function with a name of its own, UnsupportedFeature for other types."""
    names = set()
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        kind = tool.get("type")
        if isinstance(kind, str) and kind != "function":
            raise UnsupportedFeature(
                f"{where} is of type {short(kind)}, and only functions can be called. Leave it out.", "tools"
            )
        function = tool.get("function")
        if kind is None or not isinstance(function, Mapping):
            raise InvalidParameter(
                f'{where} is no tool. One looks like {{"type": "function", "function": {{"name": "weather", '
                f'"parameters": {{"type": "object", "properties": {{}}}}}}}}.',
                "tools",
            )
        name = function.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise InvalidParameter(
                f"{where} has no proper name. A name is 1 to 64 letters, digits, underscores, dots and hyphens.",
                "tools",
            )
        if name in names:
            raise InvalidParameter(f"Two tools are called {name!r}. Give each a name of its own.", "tools")
        names.add(name)
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise InvalidParameter(f"The parameters of {where} are no JSON schema, which is an object.", "tools")
        for key in ("description", "strict"):
            value = function.get(key)
            if value is not None and not isinstance(value, str if key == "description" else bool):
                raise InvalidParameter(
                    f"{where}.function.{key} is of type {type(value).__name__}. Correct it.", "tools"
                )
        if function.get("strict"):
            raise UnsupportedFeature(
                f"{where} is strict, and arguments of calls are not held to their schema yet. Leave strict out, and "
                f"check the arguments.",
                "tools",
            )


def check_choice(choice: str | Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]] | None) -> None:
    """Raise InvalidParameter for a choice without tools, UnsupportedFeature for one that forces a call."""
    if choice in (None, "none", "auto"):
        return
    if isinstance(choice, str) and choice != "required":
        raise InvalidParameter(
            f"tool_choice is {short(choice)}. It is 'auto', 'none', 'required' or names a function.", "tool_choice"
        )
    if not tools:
        raise InvalidParameter("tool_choice asks for a call, and there are no tools. Send tools too.", "tool_choice")
    raise UnsupportedFeature(
        "tool_choice can be 'auto' or 'none': a call cannot be forced yet. Ask for the call in a message.",
        "tool_choice",
    )


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the schemas of the parameters of checked tools, by the tools' names."""
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
