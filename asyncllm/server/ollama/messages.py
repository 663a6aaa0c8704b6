"""Ollama's messages as messages of a chat: images beside the text, calls without ids, results by the tool's name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncllm.server.http.errors import ApiError
from asyncllm.server.http.responses import encode
from asyncllm.text.image_marks import is_data_url
from asyncllm.types import Message

__all__ = ["messages_of", "said"]

KEYS = frozenset({"role", "content", "thinking", "images", "tool_calls", "tool_name", "tool_call_id"})


def messages_of(messages: Sequence[dict[str, Any]]) -> list[Message]:
    """Return the messages as the chat template takes them. Raises ApiError for what none of them can hold."""
    calls = _Calls()
    return [_message(message, f"messages[{index}]", calls) for index, message in enumerate(messages)]


def said(role: str, text: str, images: Sequence[str] = ()) -> Message:
    """Return a message with images, each in base64, in front of its text."""
    if not images:
        return {"role": role, "content": text}
    # The kind that an image is of is read off its bytes.
    urls = [image if is_data_url(image) else f"data:image/png;base64,{image}" for image in images]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": role, "content": [*parts, {"type": "text", "text": text}] if text else parts}


class _Calls:
    """The calls of a conversation, which Ollama's messages do not number."""

    def __init__(self) -> None:
        self._count = 0
        self._open: list[tuple[str, str]] = []
        """Id and name of each call that no result has come for, in order."""

    def add(self, call_id: Any, name: str) -> str:
        """Return the id of a call of a tool."""
        self._count += 1
        # Nine letters and digits, which Mistral's templates ask for.
        found = call_id if isinstance(call_id, str) and call_id else f"call{self._count:05}"
        self._open.append((found, name))
        return found

    def answered(self, call_id: Any, name: Any) -> tuple[str | None, str | None]:
        """Return id and name of the call that a result is of: the first open one of that id, or of that name, or the
        first one if neither is said."""
        for place, (open_id, open_name) in enumerate(self._open):
            if call_id == open_id or (not call_id and name in (None, "", open_name)):
                del self._open[place]
                return open_id, open_name
        return call_id or None, name or None


def _message(message: dict[str, Any], where: str, calls: _Calls) -> Message:
    unknown = sorted(message.keys() - KEYS)
    if unknown:
        raise _refused(f"{where} has the unknown key {unknown[0][:64]!r}. Leave it out.")
    role, content, images = message.get("role"), message.get("content") or "", message.get("images") or []
    if not isinstance(role, str) or not isinstance(content, str):
        raise _refused(f"{where} has no role, or a content that is no text. Send both as texts.")
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise _refused(f"{where}.images is a list of texts in base64. Correct it.")
    result = said(role, content, images)
    if role == "tool":
        call_id, name = calls.answered(message.get("tool_call_id"), message.get("tool_name"))
        return {**result, "tool_call_id": call_id, "name": name}
    if message.get("thinking"):
        result["reasoning_content"] = message["thinking"]
    if message.get("tool_calls"):
        result["tool_calls"] = _written(message["tool_calls"], where, calls)
    return result


def _written(made: Any, where: str, calls: _Calls) -> list[dict[str, Any]]:
    written = []
    for call in made if isinstance(made, list) else [made]:
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str):
            raise _refused(f"{where} has a call without a function's name. Send it as it came.")
        arguments = function.get("arguments") or {}
        text = arguments if isinstance(arguments, str) else encode(arguments).decode()
        named = {"name": name, "arguments": text}
        written.append({"id": calls.add(call.get("id"), name), "type": "function", "function": named})
    return written


def _refused(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param="messages")
