"""RoutingFields: the few fields of a request that decide which node answers it. All others are the node's business."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import msgspec

__all__ = ["RESPONSES", "RoutingFields", "read_fields"]

PROMPT_BYTES = 2**16
"""Maximum size of the beginning of a prompt that is looked at."""

RESPONSE = re.compile(r"/v1/responses/([^/]+)")
MODEL = re.compile(r"/v1/models/(.+)")
SESSIONS = ("/v1/chat/interactive", "/v1/chat/interactive_qos")
"""Routes whose conversations are kept on the node."""
RESPONSES = "/v1/responses"
NO_RESPONSES = ("input_tokens", "compact")
"""Names below /v1/responses/ that are routes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingFields:
    """What a request wants of a node."""

    tenant: int = -1
    """Index of the client's key; clients of different keys share neither sessions nor prefixes."""
    model: str | None = None
    prompt: bytes = b""
    """The beginning of the prompt, as its JSON is written."""
    session: int | None = None
    """The conversation that it begins or continues."""
    label: int | None = None
    """The session_id by which a later request may stop this one."""
    response: str | None = None
    """The stored response that it names or continues."""
    repeatable: bool = True
    """Whether a second node may get it although a first one may have begun to answer."""


class _Body(msgspec.Struct):
    """The fields that are looked at, as they may be of any type: the node refuses wrong ones."""

    model: Any = None
    session_id: Any = None
    previous_response_id: Any = None
    store: Any = None
    system: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")


_decode = msgspec.json.Decoder(_Body).decode


def read_fields(method: str, path: str, body: bytes, tenant: int) -> RoutingFields:
    """Return the fields of a request. A body that is no JSON object has none, and a node says what is wrong with it."""
    try:
        found = _decode(body) if body else _Body()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = _Body()
    session = found.session_id if type(found.session_id) is int and found.session_id >= 0 else None
    holds = path in SESSIONS
    named = RESPONSE.match(path)
    response = found.previous_response_id if path.startswith(RESPONSES) else None
    if named is not None and named[1] not in NO_RESPONSES:
        response = unquote(named[1])
    model = MODEL.fullmatch(path)
    parts = (found.system, found.instructions, found.tools, found.messages, found.prompt, found.input)
    stores = path == RESPONSES and method == "POST" and found.store is not False
    return RoutingFields(
        tenant=tenant,
        model=unquote(model[1]) if model is not None else found.model if isinstance(found.model, str) else None,
        prompt=b"".join(bytes(part)[:PROMPT_BYTES] for part in parts)[:PROMPT_BYTES],
        session=session if holds else None,
        label=None if holds else session,
        response=response if isinstance(response, str) else None,
        repeatable=not stores and not (holds and session is not None),
    )
