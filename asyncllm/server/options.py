"""From a request's fields to the keywords of `AsyncEngine.generate` that are not about sampling, key by key.

Clients with different keys share the engine and nothing else: neither cached prefixes, whose computing one could time,
nor session ids.
"""

from __future__ import annotations

from typing import Protocol

from aiohttp import web

from asyncllm.config import RequestKeywords
from asyncllm.server.access import KEY
from asyncllm.server.errors import ApiError
from asyncllm.server.requests import Asking, Variables
from asyncllm.server.service import service_of

__all__ = ["Templated", "engine_session_id", "label_of", "request_options", "template_options"]

IDS_PER_KEY = 2**32
"""Above every session id that a body can hold."""


class Templated(Protocol):
    """A body with the chat template's fields."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: Variables | None
    enable_thinking: bool | None


def request_options(request: web.Request, body: Asking) -> RequestKeywords:
    """How the request stands among the others. With several keys, the salt of a key's prefixes is its own."""
    options: RequestKeywords = {}
    if body.priority is not None:
        options["priority"] = body.priority
    if body.timeout is not None:
        options["timeout"] = body.timeout
    if body.user_id is not None:
        options["user_id"] = body.user_id
    salt = body.cache_salt
    if service_of(request).access.num_keys > 1 and salt != "":
        salt = f"{request[KEY]}/{salt or ''}"
    if salt is not None:
        options["cache_salt"] = salt
    return options


def template_options(body: Templated) -> RequestKeywords:
    """How the messages are written down. Raises ApiError for two fields that contradict each other."""
    options: RequestKeywords = {}
    variables = dict(body.chat_template_kwargs or {})
    asked = body.enable_thinking
    if asked is not None and variables.setdefault("enable_thinking", asked) != asked:
        raise ApiError(
            400,
            "enable_thinking and chat_template_kwargs contradict each other. Send it once.",
            code="invalid_value",
            param="enable_thinking",
        )
    if variables:
        options["chat_template_kwargs"] = variables
    if body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    if body.continue_final_message is not None:
        options["continue_final_message"] = body.continue_final_message
    return options


def engine_session_id(request: web.Request, session_id: int) -> int:
    """The engine's id of a session that the caller calls `session_id`; the same one of another key is another."""
    # The engine numbers the sessions of its own program from 1, and a request without key has the number -1.
    return (request[KEY] + 2) * IDS_PER_KEY + session_id


def label_of(request: web.Request, session_id: int | None) -> int | None:
    """The engine's label for an answer that /v1/chat/interactive may stop by `session_id`; -1 is LMDeploy's None."""
    return None if session_id is None or session_id == -1 else engine_session_id(request, session_id)
