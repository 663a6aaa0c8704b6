"""Messages that clients hand back as they got them."""

from __future__ import annotations

from typing import Any

import pytest

from asyncllm.testing import FakeEngine
from tests.server.serving import Served, serving

pytestmark = pytest.mark.anyio

BEGINNING: list[Any] = [{"role": "user", "content": "ping"}]
END: list[Any] = [{"role": "user", "content": "again"}]


async def ids(served: Served, *messages: dict[str, Any]) -> Any:
    status, answer = await served.post("/tokenize", {"messages": [*BEGINNING, *messages, *END]})
    assert status == 200, answer
    return answer["tokens"]


@pytest.mark.parametrize(
    ("handed_back", "plain"),
    [
        (
            {
                "role": "assistant",
                "content": "pong",
                "id": "msg_1",
                "refusal": None,
                "annotations": [{"type": "url_citation", "url_citation": {"url": "http://x"}}],
                "audio": None,
                "provider_specific_fields": {"refusal": None},
                "function_call": None,
                "tool_calls": None,
                "reasoning": None,
                "reasoning_content": None,
            },
            {"role": "assistant", "content": "pong"},
        ),
        ({"role": "assistant", "content": "pong", "tool_calls": [], "annotations": []}, {"content": "pong"}),
        ({"role": "assistant", "content": None}, {"content": ""}),
        ({"role": "assistant"}, {"content": ""}),
        ({"role": "assistant", "content": None, "refusal": "I will not."}, {"content": "I will not."}),
        (
            {"role": "assistant", "content": [{"type": "output_text", "text": "pong", "id": 5}]},
            {"content": "pong"},
        ),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, {"content": "No."}),
        ({"role": "assistant", "content": "pong", "reasoning": "hm"}, {"content": "pong", "reasoning_content": "hm"}),
        (
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "pong"}],
            },
            {"content": "pong", "reasoning_content": "hm"},
        ),
        (
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}],
                "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}],
            },
            {
                "content": "",
                "reasoning_content": "hm",
                "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}],
            },
        ),
        ({"role": "tool", "tool_call_id": "a", "content": None}, {"role": "tool", "tool_call_id": "a", "content": ""}),
        ({"role": "developer", "content": "be brief"}, {"role": "system", "content": "be brief"}),
        ({"role": "function", "name": "add", "content": "42"}, {"role": "tool", "name": "add", "content": "42"}),
        (
            {"role": "user", "content": ["one", {"type": "input_text", "text": "two"}]},
            {"role": "user", "content": "one\ntwo"},
        ),
        (
            {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": "{}"}},
            {"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": "{}"}}]},
        ),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_what_says_nothing_is_left_out(handed_back: dict[str, Any], plain: dict[str, Any]) -> None:
    async with serving(FakeEngine()) as served:
        assert await ids(served, handed_back) == await ids(served, {"role": "assistant", **plain})
        for path, field in (("/v1/chat/completions", "messages"), ("/v1/chat/interactive", "prompt")):
            assert (await served.post(path, {field: [*BEGINNING, handed_back, *END]}))[0] == 200


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
async def test_every_role_may_have_its_text_in_parts(role: str) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two", "cache_control": {"type": "ephemeral"}}]
    async with serving(FakeEngine()) as served:
        assert await ids(served, {"role": role, "content": parts}) == await ids(
            served, {"role": role, "content": "one\ntwo"}
        )


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "x", "audio": {"id": "audio_1"}},
        {"role": "assistant", "content": "x", "mood": "good"},
        {"role": "user", "content": None},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]},
        {"role": "king", "content": "x"},
        {"role": ["user"], "content": "x"},
        {"role": "assistant", "content": "x", "function_call": "add"},
        {"role": "assistant", "content": "x", "refusal": 5},
    ],
    ids=str,
)
async def test_what_says_something_that_is_not_understood_is_refused(message: dict[str, Any]) -> None:
    async with serving(FakeEngine()) as served:
        status, answer = await served.post("/v1/chat/completions", {"messages": [*BEGINNING, message, *END]})
        assert (status, answer["error"]["param"]) == (400, "messages")
