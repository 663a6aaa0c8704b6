"""Check OpenAI's `tools` and `tool_choice`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from asyncllm.errors import InvalidParameter, UnsupportedFeature, short

__all__ = ["MAX_TOOLS", "ToolChoice", "check_tools", "choice_of", "is_constrained", "schemas_of"]

MAX_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise InvalidParameter unless each tool is a function with a unique name, UnsupportedFeature for other types."""
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
                f'{where} is not a tool. One looks like {{"type": "function", "function": {{"name": "weather", '
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
            raise InvalidParameter(f"The parameters of {where} are not a JSON schema, which is an object.", "tools")
        for key in ("description", "strict"):
            value = function.get(key)
            if value is not None and not isinstance(value, str if key == "description" else bool):
                raise InvalidParameter(
                    f"{where}.function.{key} is of type {type(value).__name__}. Correct it.", "tools"
                )


class ToolChoice(NamedTuple):
    """The meaning of a `tool_choice`."""

    required: bool = False
    """Whether the answer must be a call."""
    names: frozenset[str] | None = None
    """Names of the tools that may be called; None: all."""

    def allows(self, name: str) -> bool:
        """Return whether a tool may be called."""
        return self.names is None or name in self.names


def choice_of(choice: str | Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]] | None) -> ToolChoice | None:
    """Return the meaning of a choice among checked tools; None: no tool is called. Raises InvalidParameter.

    Besides "none", "auto" and "required", a choice may name one function, as {"type": "function", "function": {"name":
    ...}} or without the inner object, or several, as {"type": "allowed_tools", "mode": ..., "tools": [...]}, also
    nested under "allowed_tools".
    """
    if choice == "none":
        return None
    if choice in (None, "auto"):
        return ToolChoice() if tools else None
    if not tools:
        raise InvalidParameter("tool_choice asks for a call, and there are no tools. Send tools too.", "tool_choice")
    if choice == "required":
        return ToolChoice(required=True)
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return ToolChoice(required=True, names=frozenset({_chosen(choice, tools)}))
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        inner = choice.get("allowed_tools", choice)
        mode = inner.get("mode", "auto") if isinstance(inner, Mapping) else None
        allowed = inner.get("tools") if isinstance(inner, Mapping) else None
        if mode in ("auto", "required") and isinstance(allowed, list) and allowed:
            return ToolChoice(mode == "required", frozenset(_chosen(each, tools) for each in allowed))
    raise InvalidParameter(
        f"tool_choice is {short(choice)}. It is 'auto', 'none', 'required', names a function as "
        f'{{"type": "function", "function": {{"name": "weather"}}}}, or lists allowed_tools.',
        "tool_choice",
    )


def _chosen(choice: Any, tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of the tool that a choice names."""
    inner = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if isinstance(name, str) and any(tool["function"]["name"] == name for tool in tools):
        return name
    raise InvalidParameter(f"tool_choice names {short(name)}, and there is no tool of that name.", "tool_choice")


def is_constrained(choice: ToolChoice, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a grammar constrains calls, because of the choice or a tool's `strict`."""
    return choice != ToolChoice() or any(tool["function"].get("strict") for tool in tools)


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return tool name -> schema of its parameters, for checked tools."""
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
