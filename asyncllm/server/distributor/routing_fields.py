"""RoutingFields: the few fields of a request that decide which node answers it. All others are the node's business."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import msgspec

from asyncllm.config import MAX_COUNT
from asyncllm.server.http.errors import ApiError

__all__ = ["RESPONSES", "RoutingFields", "read_fields", "with_own_session"]

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
    unclear_session: bool = False
    """Whether its session_id is not a number."""
    response: str | None = None
    """The stored response that it names or continues."""
    repeatable: bool = True
    """Whether a second node may get it although a first one may have begun to answer."""


class _Body(msgspec.Struct):
    """The fields that are looked at, as they may be of any type: the node refuses wrong ones."""

    model: Any = None
    session_id: Any = None
    kwargs: Any = None
    """Further fields, as LMDeploy's APIClient sends them."""
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
    """Return the fields of a request. A body that is not a JSON object has none, and a node says what is wrong with
    it."""
    try:
        found = _decode(body) if body else _Body()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = _Body()
    given = found.session_id
    if given is None and isinstance(found.kwargs, dict):
        given = found.kwargs.get("session_id")
    session, unclear = _number(given)
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
        unclear_session=unclear,
        response=response if isinstance(response, str) else None,
        repeatable=not stores and not (holds and session is not None),
    )


def _number(session_id: Any) -> tuple[int | None, bool]:
    """Return a session_id, which servers take as 7, 7.0 and "7", and whether it is not a number. None: there is
    none."""
    if session_id is None:
        return None, False
    try:
        number = msgspec.convert(session_id, int, strict=False)
    except msgspec.ValidationError:
        return None, True
    return (number if number >= 0 else None), False


def with_own_session(body: bytes, fields: RoutingFields, tenants: int) -> bytes:
    """Return the body with a session_id that no other of the tenants has: behind the distributor all of them may have
    the same key, by which a node tells its clients' sessions apart. Raises ApiError 400 if the number is too large."""
    session = fields.session if fields.session is not None else fields.label
    if tenants < 2 or (session is None and not fields.unclear_session):
        return body
    given = msgspec.json.decode(body)
    if isinstance(name := given.get("session_id"), str) and session is None:
        return msgspec.json.encode({**given, "session_id": f"{fields.tenant}/{name}"})
    own = session * tenants + fields.tenant if session is not None else MAX_COUNT + 1
    if own > MAX_COUNT:
        raise ApiError(
            400,
            f"session_id has to be a number of at most {MAX_COUNT // tenants - 1} here. Choose another one.",
            code="invalid_value",
            param="session_id",
        )
    return msgspec.json.encode({**given, "session_id": own})
