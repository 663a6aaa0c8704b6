"""Convert Ollama's messages to chat messages: images beside the text, calls without ids, results by tool name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncllm.server.http.errors import ApiError
from asyncllm.server.http.responses import encode
from asyncllm.text.image_marks import is_data_url
from asyncllm.types import Message

__all__ = ["chat_message", "messages_of"]

KEYS = frozenset({"role", "content", "thinking", "images", "tool_calls", "tool_name", "tool_call_id"})


def messages_of(messages: Sequence[dict[str, Any]]) -> list[Message]:
    """Return the messages in the chat template's format. Raises ApiError for content that it cannot express."""
    calls = _Calls()
    return [_message(message, f"messages[{index}]", calls) for index, message in enumerate(messages)]


def chat_message(role: str, text: str, images: Sequence[str] = ()) -> Message:
    """Return a message with images, each in base64, before its text."""
    if not images:
        return {"role": role, "content": text}
    # The image's format is detected from its bytes.
    urls = [image if is_data_url(image) else f"data:image/png;base64,{image}" for image in images]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": role, "content": [*parts, {"type": "text", "text": text}] if text else parts}


class _Calls:
    """Numbers the calls of a conversation, since Ollama's messages do not."""

    def __init__(self) -> None:
        self._count = 0
        self._open: list[tuple[str, str]] = []
        """Id and name of each call that has no result yet, in order."""

    def add(self, call_id: Any, name: str) -> str:
        """Return the id of a tool call."""
        self._count += 1
        # Nine letters and digits, as Mistral's templates require.
        found = call_id if isinstance(call_id, str) and call_id else f"call{self._count:05}"
        self._open.append((found, name))
        return found

    def answered(self, call_id: Any, name: Any) -> tuple[str | None, str | None]:
        """Return id and name of the call that a result belongs to: the first open call with that id or name, or the
        first open call if neither is given."""
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
        raise _refused(f"{where} has no role, or its content is not a text. Send both as texts.")
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise _refused(f"{where}.images is a list of texts in base64. Correct it.")
    result = chat_message(role, content, images)
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
