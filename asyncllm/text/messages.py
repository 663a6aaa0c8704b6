"""Checks of chat messages. Messages that pass can be rendered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncllm.errors import InvalidMessage, UnsupportedFeature, short
from asyncllm.types import Message

__all__ = ["ROLES", "as_messages", "checked_messages", "checked_prompt"]

ROLES = ("system", "user", "assistant", "tool")
MEDIA_PARTS = frozenset({"image_url", "image", "image_data", "video_url", "video"})
AUDIO_PARTS = frozenset({"audio_url", "audio", "input_audio"})
EXTRA_KEYS = {"name": str, "tool_calls": list, "tool_call_id": str, "reasoning_content": str}
"""Keys besides role and content that a checkpoint's own template may read, with their types."""


def checked_prompt(prompt: object) -> str:
    """Return the prompt. Raises InvalidMessage unless it is a text and not empty."""
    if not isinstance(prompt, str):
        raise InvalidMessage(
            f"The prompt is of type {type(prompt).__name__}, but it is a str or a list of messages. "
            f'Give a text, or [{{"role": "user", "content": "..."}}].'
        )
    if not prompt:
        raise InvalidMessage("The prompt is empty, so there is nothing to answer. Give at least one character.")
    return prompt


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """Return the messages with each content as one text, or None next to tool calls.

    Text parts are joined by a newline; other keys whose value is None are dropped. Raises InvalidMessage for malformed
    messages, UnsupportedFeature for images and other media.
    """
    if isinstance(messages, str | bytes | dict) or not isinstance(messages, Sequence):
        raise InvalidMessage(
            f"A chat is a list of messages, but {type(messages).__name__} was given. "
            f'Give [{{"role": "user", "content": "..."}}].'
        )
    if not messages:
        raise InvalidMessage("The list of messages is empty, so there is nothing to answer. Add a user message.")
    return [_checked_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _checked_message(message: Message | object, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidMessage(
            f"{where} is of type {type(message).__name__}, but a message is a dict with 'role' and 'content'."
        )
    fields = {key: value for key, value in message.items() if value is not None}
    role = fields.get("role")
    if role is None:
        raise InvalidMessage(f"{where} has no 'role'. Add one of: {', '.join(ROLES)}.")
    if role not in ROLES:
        raise InvalidMessage(f"{where} has the unknown role {short(role)}. The roles are: {', '.join(ROLES)}.")
    for key, value in fields.items():
        if key not in ("role", "content", *EXTRA_KEYS):
            raise InvalidMessage(f"{where} has the unknown key {short(key)}. Remove it.")
        if not isinstance(value, EXTRA_KEYS.get(key, object)):
            raise InvalidMessage(f"{where} has a {key!r} that is no {EXTRA_KEYS[key].__name__}. Correct or remove it.")
    if "content" not in fields:
        if role == "assistant" and "tool_calls" in fields:
            return {**fields, "content": None}
        raise InvalidMessage(f"{where} has no 'content'. Add the text of the message.")
    fields["content"] = _text(fields["content"], where)
    if role == "user" and not fields["content"]:
        raise InvalidMessage(f"{where} is an empty user message. Give its content at least one character.")
    return fields


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidMessage(
            f"The content of {where} is of type {type(content).__name__}, but it is a str or a list of parts "
            f'such as {{"type": "text", "text": "..."}}.'
        )
    texts, media = [], None
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in AUDIO_PARTS:
            raise UnsupportedFeature(
                f"{where}.content[{index}] is of type {kind!r}, and no model is given audio here. Send what is said as "
                f"text.",
                "messages",
            )
        if isinstance(kind, str) and kind in MEDIA_PARTS:
            media = media or UnsupportedFeature(
                f"{where}.content[{index}] is of type {kind!r}, but this model takes only text, or images "
                f"if it is a vision-language model. Remove the part.",
                "messages",
            )
            continue
        text = part.get("text") if kind == "text" else None
        if not isinstance(text, str):
            raise InvalidMessage(
                f'{where}.content[{index}] is not a part that is understood. Give {{"type": "text", "text": "..."}}, '
                f'or {{"type": "image_url", "image_url": {{"url": "..."}}}}.'
            )
        texts.append(text)
    if media is not None:
        raise media
    return "\n".join(texts)


def as_messages(prompt: str | Sequence[Message]) -> list[Message]:
    """Return a prompt without images as chat messages."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
