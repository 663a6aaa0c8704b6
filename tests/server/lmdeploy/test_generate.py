"""POST /generate."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncllm.testing import FakeEngine
from tests.server.serving import Served, serving

pytestmark = pytest.mark.anyio


async def events(served: Served, body: dict[str, Any]) -> list[Any]:
    async with served.http.post(f"{served.url}/generate", json={**body, "stream": True}) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in (await response.text()).split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_an_answer_has_text_ids_and_counts() -> None:
    async with serving(FakeEngine({"ping": "pong"})) as served:
        for prompt in ({"prompt": "ping"}, {"input_ids": list(b"ping")}):
            status, answer = await served.post("/generate", prompt)
            assert status == 200
            assert answer["text"] == "pong"
            assert answer["output_ids"] == [*b"pong", 257]
            assert answer["meta_info"] == {
                "prompt_tokens": 4,
                "completion_tokens": 5,
                "cached_tokens": 0,
                "finish_reason": {"type": "stop"},
            }


async def test_log_probabilities_are_pairs() -> None:
    async with serving(FakeEngine({"ping": "pong"})) as served:
        body = {"prompt": "ping", "return_logprob": True, "temperature": 0}
        _, answer = await served.post("/generate", body)
        pairs = answer["meta_info"]["output_token_logprobs"]
        assert [token for _, token in pairs] == answer["output_ids"]
        assert all(value <= 0 for value, _ in pairs)
        pieces = await events(served, body)
        assert [pair for piece in pieces for pair in piece["meta_info"]["output_token_logprobs"]] == pairs


async def test_a_stream_adds_up_to_the_answer() -> None:
    async with serving(FakeEngine("x" * 300)) as served:
        _, answer = await served.post("/generate", {"prompt": "ping"})
        pieces = await events(served, {"prompt": "ping"})
    assert len(pieces) > 1
    assert "".join(piece["text"] for piece in pieces) == answer["text"] == "x" * 128
    assert [token for piece in pieces for token in piece["output_ids"]] == answer["output_ids"]
    reasons = [piece["meta_info"]["finish_reason"] for piece in pieces]
    assert reasons == [None] * (len(pieces) - 1) + [{"type": "length"}]
    assert pieces[-1]["meta_info"]["completion_tokens"] == 128


async def test_sampling_fields_reach_the_engine() -> None:
    async with serving(FakeEngine("one two three")) as served:
        for fields, text, reason in (
            ({"max_tokens": 3}, "one", "length"),
            ({"stop": " two"}, "one", "stop"),
            ({"stop": ["three"], "include_stop_str_in_output": True}, "one two three", "stop"),
            ({"stop_token_ids": [ord("w")]}, "one t", "stop"),
            ({"ignore_eos": True, "max_tokens": 20, "skip_special_tokens": False}, "one two three<eos>", "length"),
        ):
            _, answer = await served.post("/generate", {"prompt": "ping", **fields})
            assert answer["text"][: len(text)] == text, fields
            assert answer["meta_info"]["finish_reason"]["type"] == reason, fields


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({}, "prompt", "invalid_value"),
        ({"prompt": "a", "input_ids": [1]}, "prompt", "invalid_value"),
        ({"prompt": ["a"]}, "prompt", "invalid_type"),
        ({"input_ids": []}, "input_ids", "invalid_value"),
        ({"input_ids": [258]}, "input_ids", "invalid_value"),
        ({"prompt": "a", "image_data": "http://x/y.png"}, "messages", "invalid_image_url"),
        ({"prompt": "a", "image_data": ["/etc/passwd"]}, "messages", "invalid_image_url"),
        ({"input_ids": [1], "image_data": "data:image/png;base64,AAAA"}, "image_data", "invalid_value"),
        ({"prompt": "a", "return_routed_experts": True}, "return_routed_experts", "unsupported_parameter"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"prompt": "a", "top_p": 2}, "top_p", "invalid_value"),
        ({"texts": "a"}, "texts", "unknown_parameter"),
    ],
    ids=str,
)
async def test_what_cannot_be_served_is_a_400(fields: dict[str, Any], param: str, code: str) -> None:
    async with serving(FakeEngine()) as served:
        status, answer = await served.post("/generate", fields)
        assert (status, answer["error"]["param"]) == (400, param)
        assert answer["error"]["code"] == code
