"""Converts the messages that clients send back to the form that chat templates take.

A client sends an answer back as it received it, from this server or another one: with ids, citations and empty fields.
Fields that are meaningless to a model are dropped; older and newer names become those of templates.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from aiohttp import web

from asyncllm.server.request.custom_tools import arguments_of
from asyncllm.server.request.decode import IGNORED
from asyncllm.server.request.media import with_images
from asyncllm.server.service import service_of
from asyncllm.text.image_marks import PART_KEYS
from asyncllm.text.messages import EXTRA_KEYS
from asyncllm.types import Message

__all__ = ["normalised"]

IGNORED_KEYS = frozenset(
    {"id", "annotations", "provider_specific_fields", "thinking_blocks", "reasoning_details", "cache_control"}
)
"""Keys that are meaningless to a model: OpenAI's and vLLM's ids and citations, litellm's and OpenRouter's own
records."""
EMPTY = ("audio", "function_call", "tool_calls", "refusal", "reasoning", "reasoning_content")
"""Keys that an answer may have with an empty value."""
ROLES = {"developer": "system", "function": "tool"}
"""OpenAI's newer and older role names -> the templates' name."""
TEXT_PARTS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Other types of text parts -> the key of the text."""
MEDIA_TYPES = {"image_url": "image_url", "video_url": "video_url", "input_image": "image_url"}
"""Types of parts (which the first two may omit) -> the key of the image or the video."""


async def normalised(request: web.Request, messages: list[dict[str, Any]] | str) -> list[Message] | str:
    """Return the messages in the chat template's form, with the bytes of images that the server fetches. With
    `unknown_fields="ignore"`, unknown keys are dropped and added to the request's ignored ones. Raises ApiError."""
    if isinstance(messages, str):
        return messages
    result = await with_images(request, [_message(message) for message in messages])
    if service_of(request).config.unknown_fields == "ignore":
        known = {"role", "content", "audio", "function_call", *EXTRA_KEYS}
        ignored = _left_out(result, known, "messages.")
        for message in result:
            if isinstance(content := message.get("content"), list):
                media = [part for part in content if isinstance(part, dict) and part.get("type") != "text"]
                ignored += _left_out(media, PART_KEYS, "messages.content.")
        if ignored:
            request[IGNORED] = [*request.get(IGNORED, ()), *dict.fromkeys(ignored)]
    return result


def _left_out(objects: list[dict[str, Any]], known: Collection[str], where: str) -> list[str]:
    """Remove unknown keys from `objects`, and return their names after `where`."""
    unknown = [(each, key) for each in objects for key in each if key not in known]
    for each, key in unknown:
        del each[key]
    return [where + key for _, key in unknown]


def _message(message: dict[str, Any]) -> Message:
    kept = {key: value for key, value in message.items() if key not in IGNORED_KEYS and (value or key not in EMPTY)}
    role = kept.get("role")
    if isinstance(role, str):
        kept["role"] = ROLES.get(role, role)
    if "reasoning" in kept:
        # vLLM's newer name.
        kept.setdefault("reasoning_content", kept.pop("reasoning"))
    refusal = kept.get("refusal")
    if isinstance(refusal, str):
        # The assistant's refusal, in place of an answer.
        del kept["refusal"]
        kept["content"] = kept.get("content") or refusal
    call = kept.get("function_call")
    if isinstance(call, dict) and "tool_calls" not in kept:
        # OpenAI's older form of one call.
        del kept["function_call"]
        kept["tool_calls"] = [{"type": "function", "function": call}]
    calls = kept.get("tool_calls")
    if isinstance(calls, list):
        kept["tool_calls"] = [_call(call) for call in calls]
    says_nothing = role in ("tool", "function") or (role == "assistant" and "tool_calls" not in kept)
    if says_nothing and kept.get("content") is None:
        kept["content"] = ""
    if isinstance(content := kept.get("content"), list):
        thoughts = [thought for part in content if role == "assistant" and (thought := _thought(part)) is not None]
        if thoughts:
            kept.setdefault("reasoning_content", "".join(thoughts))
            content = [part for part in content if _thought(part) is None]
        kept["content"] = [_part(part) for part in content]
    return kept


def _call(call: Any) -> Any:
    """Return a call of a custom tool as one of a function, and any other call unchanged."""
    custom = call.get("custom") if isinstance(call, dict) else None
    if not isinstance(custom, dict) or not isinstance(custom.get("input"), str):
        return call
    kept = {key: value for key, value in call.items() if key != "custom"}
    return {
        **kept,
        "type": "function",
        "function": {"name": custom.get("name"), "arguments": arguments_of(custom["input"])},
    }


def _thought(part: Any) -> str | None:
    """Return the text of a part that is reasoning, as in Mistral's API and in vLLM; None for any other part."""
    if not isinstance(part, dict) or part.get("type") != "thinking":
        return None
    inner = part.get("thinking")
    pieces = inner if isinstance(inner, list) else [inner]
    texts = [piece.get("text") if isinstance(piece, dict) else piece for piece in pieces]
    return "".join(text for text in texts if isinstance(text, str))


def _part(part: Any) -> Any:
    """Return a text part in the one form that templates know, an image under the name that it has in chats, and any
    other part unchanged."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, dict):
        kind = part.get("type") or next((name for name in MEDIA_TYPES if name in part), "text")
        kind = MEDIA_TYPES.get(kind, kind) if isinstance(kind, str) else kind
        if kind in MEDIA_TYPES.values():
            return {**part, "type": kind}
        if isinstance(kind, str) and isinstance(text := part.get(TEXT_PARTS.get(kind, "text")), str):
            return {"type": "text", "text": text} if kind in ("text", *TEXT_PARTS) else part
    return part
