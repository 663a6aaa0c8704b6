"""Convert Anthropic's messages, which consist of blocks, to chat messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncllm.server.http.errors import ApiError
from asyncllm.server.http.responses import encode
from asyncllm.types import Message

__all__ = ["messages_of"]


def messages_of(system: str | list[dict[str, Any]] | None, messages: Sequence[dict[str, Any]]) -> list[Message]:
    """Return `system` and `messages` as chat messages. Raises ApiError for blocks other than text, images, tools and
    reasoning."""
    result: list[Message] = []
    if isinstance(system, list):
        system = [block for block in system if not _is_billing(block)]
    if system:
        result.append({"role": "system", "content": _text(system, "system")})
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role, content = message.get("role"), message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
            raise _refused(f"{where} has no content. It is a text or a list of blocks.")
        match role:
            case "assistant":
                result.append(_answer(blocks, where))
            case "user" | "system":
                result += _messages_of_blocks(role, blocks, where)
            case _:
                raise _refused(f"{where} has the role {str(role)[:64]!r}. It is user, assistant or system.")
    return result


def _is_billing(block: Any) -> bool:
    """Return whether a block is Claude Code's line for the provider's records, which differs in each request. In a
    prompt it would keep a prefix cache from being used."""
    text = block.get("text") if isinstance(block, dict) else None
    return isinstance(text, str) and text.startswith("x-anthropic-billing-header:")


def _messages_of_blocks(role: str, blocks: list[dict[str, Any]], where: str) -> list[Message]:
    """Return the tool results, each a message of its own, followed by text and images."""
    messages: list[Message] = []
    parts: list[dict[str, Any]] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            call_id = block.get("tool_use_id")
            if not isinstance(call_id, str):
                raise _refused(f"{where} has a tool_result without tool_use_id. Send the id of the tool_use.")
            content = block.get("content") or ""
            given = [{"type": "text", "text": content}] if isinstance(content, str) else content
            if not isinstance(given, list):
                raise _refused(f"{where} has a tool_result without text. Send a text or a list of blocks.")
            if block.get("is_error"):
                given = [{"type": "text", "text": "Error: "}, *given]
            result = _joined([_part(each, where) for each in given])
            messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
        else:
            parts.append(_part(block, where, images=role == "user"))
    if parts or not messages:
        messages.append({"role": role, "content": _joined(parts)})
    return messages


def _part(block: Any, where: str, *, images: bool = True) -> dict[str, Any]:
    if images and isinstance(block, dict) and block.get("type") == "image":
        return {"type": "image_url", "image_url": {"url": _url(block.get("source"), where)}}
    return {"type": "text", "text": _text([block], where)}


def _joined(parts: list[dict[str, Any]]) -> list[dict[str, Any]] | str:
    """Return the parts if they include images, otherwise their text."""
    if any(part["type"] == "image_url" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _url(source: Any, where: str) -> str:
    """Return an image's URL: its address, or the image itself as a data: URL."""
    match source:
        case {"type": "base64", "media_type": str(kind), "data": str(data)}:
            return f"data:{kind};base64,{data}"
        case {"type": "url", "url": str(url)}:
            return url
    raise _refused(f"{where} has an image whose source is neither base64 nor a url. No files are kept here.")


def _answer(blocks: list[dict[str, Any]], where: str) -> Message:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        match block.get("type"):
            case "thinking":
                thoughts.append(str(block.get("thinking") or ""))
            case "redacted_thinking":
                continue  # redacted reasoning has no readable text
            case "tool_use":
                if not isinstance(block.get("name"), str) or not isinstance(block.get("id"), str):
                    raise _refused(f"{where} has a tool_use without id or name. Send it as it came.")
                function = {"name": block["name"], "arguments": encode(block.get("input") or {}).decode()}
                calls.append({"id": block["id"], "type": "function", "function": function})
            case _:
                texts.append(_text([block], where))
    message: Message = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _text(content: Any, where: str) -> str:
    """Return a text that may be given as blocks. Raises ApiError for other blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _refused(f"{where} has no text. Send a text or a list of blocks.")
    texts = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "document":
            texts.append(_document(block, where))
            continue
        text = block.get("text") if kind == "text" else None
        if not isinstance(text, str):
            raise _refused(f"{where} has a block of type {str(kind)[:64]!r}, which is not read. Leave it out.")
        texts.append(text)
    return "".join(texts)


def _document(block: dict[str, Any], where: str) -> str:
    """Return the title, context and text of a document, each on lines of its own. Raises ApiError for files, and for
    citations."""
    citations = block.get("citations") or {}
    if not isinstance(citations, dict) or citations.get("enabled"):
        raise _refused(f"{where} has a document with citations, which are not implemented. Leave citations out.")
    match block.get("source"):
        case {"type": "text", "data": str(text)}:
            pass
        case {"type": "content", "content": str() | list() as inner}:
            text = _text(inner, where)
        case _:
            raise _refused(f"{where} has a document that is no text. Files are not read: send their text.")
    return "".join(f"{part}\n" for part in (block.get("title"), block.get("context"), text) if isinstance(part, str))


def _refused(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param="messages")
