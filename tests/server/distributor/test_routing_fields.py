"""Which fields of a request decide where it goes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncllm.server.distributor.routing_fields import PROMPT_BYTES, RoutingFields, read_fields, with_own_session

CHAT = "/v1/chat/completions"
INTERACTIVE = "/v1/chat/interactive"


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (CHAT, {"model": "m", "stream": True}, {"model": "m"}),
        (CHAT, {"model": "m", "session_id": 3}, {"model": "m", "label": 3}),
        (CHAT, {"model": ["m"], "session_id": "3", "messages": "Hi"}, {"prompt": b'"Hi"', "label": 3}),
        (CHAT, {"session_id": "three"}, {"unclear_session": True}),
        (INTERACTIVE, {"session_id": 3, "prompt": "Hi"}, {"session": 3, "prompt": b'"Hi"', "repeatable": False}),
        (f"{INTERACTIVE}_qos", {"session_id": -1}, {}),
        ("/v1/responses", {"input": "Hi"}, {"prompt": b'"Hi"', "repeatable": False}),
        ("/v1/responses", {"store": False}, {}),
        ("/v1/responses", {"previous_response_id": "resp_1"}, {"response": "resp_1", "repeatable": False}),
        ("/v1/responses/input_tokens", {"previous_response_id": "resp_1"}, {"response": "resp_1"}),
        ("/v1/responses/resp_1/cancel", None, {"response": "resp_1"}),
        ("/v1/responses/resp%201", None, {"response": "resp 1"}),
        (CHAT, {"previous_response_id": "resp_1"}, {}),
        ("/v1/models/org/name", None, {"model": "org/name"}),
        ("/v1/messages", {"system": "S", "messages": [1]}, {"prompt": b'"S"[1]'}),
        (CHAT, [1], {}),
    ],
)
def test_fields(path: str, body: Any, expected: dict[str, Any]) -> None:
    data = b"" if body is None else json.dumps(body).encode()
    assert read_fields("POST", path, data, -1) == RoutingFields(**expected)


@pytest.mark.parametrize("body", [b"{", b"\xff", b'{"model": "\xff"}', b"[" * 100_000])
def test_a_body_that_is_no_json_has_none(body: bytes) -> None:
    assert read_fields("POST", CHAT, body, 2) == RoutingFields(tenant=2)


def test_of_a_long_prompt_the_beginning_counts() -> None:
    body = json.dumps({"messages": "x" * 2**20, "tools": ["t"]}).encode()
    assert read_fields("POST", CHAT, body, -1).prompt == b'["t"]"' + b"x" * (PROMPT_BYTES - 6)


@pytest.mark.parametrize(("given", "own"), [(3, 7), ("3", 7), ("three", "1/three"), (None, None), (-1, -1)])
def test_tenants_have_sessions_of_their_own(given: Any, own: Any) -> None:
    body = json.dumps({"session_id": given, "messages": "Hi"}).encode()
    sent = with_own_session(body, read_fields("POST", CHAT, body, 1), 2)
    assert json.loads(sent) == {"session_id": own, "messages": "Hi"}
    assert with_own_session(body, read_fields("POST", CHAT, body, 0), 1) == body
