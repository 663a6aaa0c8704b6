"""Convert input items to chat messages. Consecutive reasoning, text and calls form one assistant message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncllm.server.http.errors import ApiError
from asyncllm.server.request.custom_tools import arguments_of
from asyncllm.types import Message

__all__ = ["messages_of"]

TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal", "reasoning_text": "text",
         "summary_text": "text"}  # fmt: skip
"""Type of a text part -> the key that holds the text."""
ROLES = {"developer": "system"}


def messages_of(items: str | Sequence[dict[str, Any]]) -> list[Message]:
    """Return the items as messages. Raises ApiError for items other than text, images, calls and reasoning."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Message] = []
    for index, item in enumerate(items):
        where = f"input[{index}]"
        match item.get("type", "message"):
            case "message":
                _add_message(messages, item, where)
            case "reasoning":
                text = _text(item.get("content") or item.get("summary") or [], where)
                if text:
                    _assistant(messages)["reasoning_content"] = text
            case "function_call" | "custom_tool_call" as kind:
                arguments = item.get("arguments", "")
                if kind == "custom_tool_call":
                    arguments = arguments_of(_text(item.get("input"), where))
                function = {"name": item.get("name"), "arguments": arguments}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                if not all(isinstance(item.get(key), str) for key in ("call_id", "name")):
                    raise _refused(f"{where} is a {kind} without call_id or name. Send it as it came.")
                _assistant(messages).setdefault("tool_calls", []).append(call)
            case "function_call_output" | "custom_tool_call_output":
                if not isinstance(call_id := item.get("call_id"), str):
                    raise _refused(f"{where} is an output without call_id. Send that of the call.")
                output = _text_and_images(item.get("output"), where)
                messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
            case kind:
                raise _refused(
                    f"{where} is of type {str(kind)[:64]!r}. Supported types: message, reasoning, function_call, "
                    f"custom_tool_call, function_call_output, custom_tool_call_output."
                )
    for message in messages:
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""  # reasoning alone, of a response that was cut off
    return messages


def _add_message(messages: list[Message], item: dict[str, Any], where: str) -> None:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise _refused(f"{where} has the role {str(role)[:64]!r}. It is user, assistant, system or developer.")
    content = item.get("content")
    if role == "assistant":
        message = _assistant(messages)
        message["content"] = (message["content"] or "") + _text(content, where)
    elif role == "user":
        messages.append({"role": role, "content": _text_and_images(content, where)})
    else:
        messages.append({"role": ROLES.get(role, role), "content": _text(content, where)})


def _text_and_images(content: Any, where: str) -> list[dict[str, Any]] | str:
    """Return the parts if they include images, otherwise their text. Raises ApiError."""
    if isinstance(content, list) and any(map(_is_image, content)):
        return [_part(part, where) for part in content]
    return _text(content, where)


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_image"


def _part(part: Any, where: str) -> dict[str, Any]:
    """Return a part of a message with images. Raises ApiError for images stored as files at the provider."""
    if not _is_image(part):
        return {"type": "text", "text": _text([part], where)}
    if not isinstance(url := part.get("image_url"), str):
        raise _refused(f"{where} has an image without image_url. No files are kept here: send a data: URL.")
    detail = {"detail": part["detail"]} if part.get("detail") is not None else {}
    return {"type": "image_url", "image_url": {"url": url, **detail}}


def _assistant(messages: list[Message]) -> Message:
    """Return the assistant message to extend: the last one, or a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _text(content: Any, where: str) -> str:
    """Return a text that may be given in parts. Raises ApiError for other parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _refused(f"{where} has no text. Send a text or a list of its parts.")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(TEXTS[kind]) if isinstance(kind, str) and kind in TEXTS else None
        if not isinstance(text, str):
            raise _refused(f"{where} has a part of type {str(kind)[:64]!r}, and only texts are read. Leave it out.")
        texts.append(text)
    return "".join(texts)


def _refused(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param="input")
