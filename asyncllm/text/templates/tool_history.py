"""ToolHistory converts tool calls in a conversation to the form that a checkpoint's template expects.

Clients send a call's arguments as JSON text, and null as the content next to calls. Templates differ: some iterate over
the arguments, some write them with `tojson`, some take them as text; some test whether there is a content, some
concatenate it with other texts. Mistral's take ids of nine letters and digits alone.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from asyncllm.errors import InvalidMessage
from asyncllm.text.replies.mistral import SHORT_ID
from asyncllm.text.templates.jinja_template import JinjaTemplate

__all__ = ["ToolHistory"]

OBJECT = {"key": "value"}
TEXT = json.dumps(OBJECT)


class ToolHistory:
    """The form of calls that one template expects, determined by trying. Immutable."""

    def __init__(self, template: JinjaTemplate) -> None:
        self._template = template
        with_object, with_text = self._written(OBJECT, ""), self._written(TEXT, "")
        takes_object = with_object is not None and repr(OBJECT) not in with_object
        takes_text = with_text is not None and json.dumps(TEXT)[1:-1] not in with_text
        self._wants_object = takes_object and (not takes_text or with_object != with_text)
        self._wants_text = takes_text and not takes_object
        self._takes_any_text = with_text is not None
        form = OBJECT if self._wants_object else TEXT
        with_null, with_empty = self._written(form, None), self._written(form, "") or ""
        self._wants_short_ids = with_empty != "" and self._written(form, "", call_id=f"call_{'a' * 24}") is None
        self._takes_null = with_null is not None and with_null.count("None") <= with_empty.count("None")

    def fitted(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with calls, contents and tool names as the template expects them."""
        names: dict[str, str] = {}
        """Ids of calls -> tool names."""
        return [self._fitted(message, names) for message in messages]

    def _fitted(self, message: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
        if message["content"] is None and not self._takes_null:
            message = {**message, "content": ""}
        if "tool_calls" in message:
            message = {**message, "tool_calls": [self._fitted_call(call) for call in message["tool_calls"]]}
            names.update(_names(message["tool_calls"]))
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names:
            message = {**message, "name": names[message["tool_call_id"]]}
        if isinstance(call_id := message.get("tool_call_id"), str):
            message = {**message, "tool_call_id": self._fitted_id(call_id)}
        return message

    def _fitted_id(self, call_id: str) -> str:
        if not self._wants_short_ids or SHORT_ID.fullmatch(call_id):
            return call_id
        return hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:9]

    def _fitted_call(self, call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        if isinstance(call.get("id"), str):
            call = {**call, "id": self._fitted_id(call["id"])}
        if isinstance(call.get("function"), dict):
            return {**call, "function": self._fitted_call(call["function"])}
        arguments = call.get("arguments")
        if arguments is None and isinstance(call.get("name"), str):
            # Some clients leave out the arguments of a call that has none.
            call, arguments = {**call, "arguments": "{}"}, "{}"
        if self._wants_text and isinstance(arguments, dict | list):
            return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
        if self._wants_object and isinstance(arguments, str):
            return {**call, "arguments": self._parsed(arguments)}
        return call

    def _parsed(self, arguments: str) -> Any:
        """Return the JSON object in `arguments`. Other arguments, such as those of a truncated call, stay text if the
        template accepts that."""
        try:
            value = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            return value
        return arguments if self._takes_any_text else {"arguments": arguments}

    def _written(self, arguments: object, content: str | None, call_id: str = "a" * 9) -> str | None:
        """Return the template's text for one call; None if it fails."""
        call = {"id": call_id, "type": "function", "function": {"name": "tool", "arguments": arguments}}
        turn: list[dict[str, Any]] = [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
        ]
        try:
            return self._template.render(turn, add_generation_prompt=False, variables={})
        except InvalidMessage:
            return None


def _names(calls: list[Any]) -> dict[str, str]:
    names = {}
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str) and isinstance(call.get("id"), str):
            names[call["id"]] = name
    return names
