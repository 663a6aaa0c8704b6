"""POST /generate in SGLang's form, as its benchmarks and trainers send it."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from asyncllm import AsyncEngine, EngineConfig
from asyncllm.testing import FakeEngine
from tests.server.serving import Served, serving

pytestmark = pytest.mark.anyio


async def events(served: Served, body: dict[str, Any]) -> list[Any]:
    async with served.http.post(f"{served.url}/generate", json={**body, "stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in (await response.text()).split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_a_prompt_and_a_list_of_them() -> None:
    async with serving(FakeEngine({"ping": "pong", "tick": "tock"})) as served:
        params = {"max_new_tokens": 10, "temperature": 0}
        for prompt in ({"text": "ping"}, {"input_ids": list(b"ping")}):
            status, answer = await served.post("/generate", {**prompt, "sampling_params": params, "rid": "mine"})
            assert status == 200
            assert (answer["text"], answer["output_ids"]) == ("pong", [*b"pong", 257])
            assert answer["meta_info"].pop("e2e_latency") > 0
            assert answer["meta_info"] == {
                "id": "mine",
                "finish_reason": {"type": "stop", "matched": 257},
                "prompt_tokens": 4,
                "completion_tokens": 5,
                "cached_tokens": 0,
            }
        for prompts in ({"text": ["ping", "tick"]}, {"input_ids": [list(b"ping"), list(b"tick")]}):
            each = [{"max_new_tokens": 3}, {"max_new_tokens": 10, "stop": "ck"}]
            _, answers = await served.post("/generate", {**prompts, "sampling_params": each, "rid": "mine"})
            assert [answer["text"] for answer in answers] == ["pon", "to"]
            assert [answer["meta_info"]["finish_reason"] for answer in answers] == [
                {"type": "length", "length": 3},
                {"type": "stop", "matched": "ck"},
            ]
            assert [answer["meta_info"]["id"] for answer in answers] == ["mine_0", "mine_1"]
        _, answers = await served.post("/generate", {"text": "ping", "sampling_params": {"n": 3}})
        assert [answer["text"] for answer in answers] == ["pong"] * 3
        _, answers = await served.post("/generate", {"text": ["ping"]})
        assert [answer["text"] for answer in answers] == ["pong"]


async def test_a_stream_has_the_whole_text_in_each_event() -> None:
    async with serving(FakeEngine({"ping": "pong", "tick": "tock"})) as served:
        body = {"text": "ping", "sampling_params": {"max_new_tokens": 20}, "return_logprob": True}
        _, whole = await served.post("/generate", body)
        pieces = await events(served, body)
        assert [piece["text"] for piece in pieces][-2:] == ["pong", "pong"]
        assert all(later["text"].startswith(piece["text"]) for piece, later in pairwise(pieces))
        assert [piece["meta_info"]["completion_tokens"] for piece in pieces] == [1, 2, 3, 4, 5]
        for piece in (whole, pieces[-1]):
            for name in ("id", "e2e_latency", "cached_tokens"):
                del piece["meta_info"][name]
        assert pieces[-1] == whole
        assert "index" not in pieces[0]
        several = await events(served, {"text": ["ping", "tick"], "sampling_params": {"n": 2}})
        last = {piece["index"]: piece["text"] for piece in several}
        assert last == {0: "pong", 1: "pong", 2: "tock", 3: "tock"}


async def test_log_probabilities() -> None:
    async with serving(FakeEngine({"ping": "pong"})) as served:
        body: dict[str, Any] = {"text": "ping", "sampling_params": {"max_new_tokens": 3}, "return_logprob": True}
        _, answer = await served.post("/generate", {**body, "top_logprobs_num": 2, "return_text_in_logprobs": True})
        meta = answer["meta_info"]
        assert meta["input_token_logprobs"] == meta["input_top_logprobs"] == []
        assert [(token, text) for _, token, text in meta["output_token_logprobs"]] == [
            (ord(each), each) for each in "pon"
        ]
        for entry, top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
            assert len(top) == 2
            assert max(top)[0] >= entry[0]
        _, answer = await served.post("/generate", {**body, "logprob_start_len": 0})
        found = answer["meta_info"]["input_token_logprobs"]
        assert [token for _, token, _ in found] == list(b"ping")
        assert [value is None for value, _, _ in found] == [True, False, False, False]
        assert "input_top_logprobs" not in answer["meta_info"]
        _, later = await served.post("/generate", {**body, "logprob_start_len": 2})
        assert later["meta_info"]["input_token_logprobs"] == found[2:]
        for stream in (False, True):
            scored = {**body, "sampling_params": {"max_new_tokens": 0}, "logprob_start_len": 0}
            answer = (await events(served, scored))[-1] if stream else (await served.post("/generate", scored))[1]
            assert (answer["text"], answer["output_ids"]) == ("", [])
            assert answer["meta_info"]["input_token_logprobs"] == found
            assert answer["meta_info"]["completion_tokens"] == 0


async def test_sampling_params_reach_the_engine() -> None:
    async with serving(FakeEngine("one two three")) as served:
        for params, text in (
            ({"stop": [" two"]}, "one"),
            ({"stop": [" two"], "no_stop_trim": True}, "one two"),
            ({"stop_token_ids": [ord("w")]}, "one t"),
            ({"ignore_eos": True, "max_new_tokens": 14, "skip_special_tokens": False}, "one two three<eos>"),
            ({"max_new_tokens": 2, "spaces_between_special_tokens": True, "custom_params": None}, "on"),
        ):
            _, answer = await served.post("/generate", {"text": "ping", "sampling_params": params})
            assert answer["text"] == text, params


@pytest.mark.parametrize(
    ("fields", "param", "status"),
    [
        ({"sampling_params": {}}, "text", 400),
        ({"text": "a", "input_ids": [1]}, "text", 400),
        ({"text": "a", "prompt": "b"}, "prompt", 400),
        ({"text": "a", "max_tokens": 5}, "max_tokens", 400),
        ({"text": "a", "temperature": 0.5}, "temperature", 400),
        ({"text": ""}, "text", 400),
        ({"text": []}, "text", 400),
        ({"input_ids": [[1], 2]}, "input_ids", 400),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params", 400),
        ({"text": "a", "sampling_params": {"beam_width": 2}}, "sampling_params", 400),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params", 400),
        ({"text": "a", "sampling_params": {"n": 1000}}, "sampling_params", 400),
        ({"text": "a", "sampling_params": {"regex": "a", "ebnf": 'root ::= "a"'}}, "ebnf", 400),
        ({"text": "a", "sampling_params": {"json_schema": "{"}}, "sampling_params", 400),
        ({"text": "a", "top_logprobs_num": 2}, "return_logprob", 400),
        ({"text": ["a", "b"], "image_data": ["data:image/png;base64,eA=="]}, "image_data", 400),
        ({"text": "a", "lora_path": "other"}, "model", 404),
        ({"text": "a", "return_hidden_states": True}, "return_hidden_states", 400),
    ],
    ids=str,
)
async def test_bad_bodies(fields: dict[str, Any], param: str, status: int) -> None:
    async with serving(FakeEngine()) as served:
        found, answer = await served.post("/generate", fields)
        assert (found, answer["error"]["param"]) == (status, param)
        served.engine.check_idle()


@pytest.mark.one_loop
async def test_an_image_may_be_base64_alone() -> None:
    image = base64.b64encode((Path(__file__).parents[3] / "examples" / "shapes.png").read_bytes()).decode()
    engine = AsyncEngine("tiny-vlm", EngineConfig(device_type="cpu", num_gpu_blocks=50))
    async with serving(engine) as served:
        body = {"text": "How many blue shapes are there?", "sampling_params": {"max_new_tokens": 3}}
        answers = [
            (await served.post("/generate", {**body, "image_data": given}))[1]
            for given in (image, [image], f"data:image/png;base64,{image}")
        ]
        assert answers[0]["output_ids"] == answers[1]["output_ids"] == answers[2]["output_ids"]
        assert {answer["meta_info"]["prompt_tokens"] for answer in answers} == {
            answers[0]["meta_info"]["prompt_tokens"]
        }
        _, plain = await served.post("/generate", body)
        assert answers[0]["meta_info"]["prompt_tokens"] > plain["meta_info"]["prompt_tokens"]
        assert (await served.post("/generate", {**body, "image_data": "/etc/passwd"}))[0] == 400
