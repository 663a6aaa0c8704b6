"""POST /abort_request, as LMDeploy's and SGLang's clients send it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from asyncllm.testing import FakeEngine
from tests.server.raw import until
from tests.server.serving import serving

pytestmark = pytest.mark.anyio

CHAT: dict[str, Any] = {"messages": "one", "max_tokens": 3000}
PROMPT: dict[str, Any] = {"prompt": "one", "max_tokens": 3000}
SGLANG: dict[str, Any] = {"text": "one", "sampling_params": {"max_new_tokens": 3000}}
KEYS: dict[str, Any] = {"api_keys": ["first-key", "second-key"]}


def by(key: str) -> dict[str, Any]:
    return {"headers": {"Authorization": f"Bearer {key}"}}


@pytest.mark.parametrize(
    ("path", "body", "asked"),
    [
        ("/v1/chat/completions", {**CHAT, "session_id": 7}, {"session_id": 7}),
        ("/v1/chat/completions", {**CHAT, "request_id": "mine"}, {"rid": "mine"}),
        ("/v1/completions", {**PROMPT, "request_id": "mine"}, {"rid": "mine"}),
        ("/v1/chat/completions", {**CHAT, "session_id": "agent 7/ü"}, {"session_id": "agent 7/ü"}),
        ("/v1/completions", {**PROMPT, "session_id": "7"}, {"session_id": 7}),
        ("/v1/completions", {**PROMPT, "rid": "mine"}, {"rid": "cmpl-mine"}),
        ("/generate", {**SGLANG, "rid": "mine"}, {"rid": "mine"}),
        ("/generate", {**PROMPT, "session_id": 7}, {"session_id": 7, "abort_all": False}),
        ("/v1/chat/interactive", {"prompt": "one", "session_id": 7, "interactive_mode": True}, {"session_id": 7}),
    ],
)
async def test_answers_end_by_what_they_are_called(path: str, body: dict[str, Any], asked: dict[str, Any]) -> None:
    engine = FakeEngine("x" * 3000, delay_per_token=0.002)
    async with serving(engine, **KEYS) as served:
        running = asyncio.create_task(served.post(path, body, **by("first-key")))
        await until(lambda: engine.stats().decode_tokens > 5)
        for key, fields in (("second-key", asked), ("first-key", {"rid": "other"}), ("first-key", {"session_id": 8})):
            async with served.http.post(f"{served.url}/abort_request", json=fields, **by(key)) as response:
                assert (response.status, await response.text()) == (200, "")
        assert engine.stats().running == 1
        async with served.http.post(f"{served.url}/abort_request", json=asked, **by("first-key")) as response:
            assert response.status == 200
        status, answer = await running
        assert status == 200
        assert "abort" in json.dumps(answer)
        status, answer = await served.post("/abort_request", {"abort_all": True}, **by("first-key"))
        assert (status, answer["error"]["param"]) == (403, "abort_all")
        status, answer = await served.post("/abort_request", {}, **by("first-key"))
        assert (status, answer["error"]["param"]) == (400, "session_id")
        status, answer = await served.post("/abort_request", {"rid": "a", "abort_message": "x"}, **by("first-key"))
        assert (status, answer["error"]["code"]) == (400, "unsupported_parameter")


async def test_all_answers_end_and_the_server_goes_on() -> None:
    engine = FakeEngine("x" * 300, delay_per_token=0.002)
    async with serving(engine) as served:
        running = [asyncio.create_task(served.post("/v1/chat/completions", CHAT)) for _ in range(3)]
        await until(lambda: engine.stats().decode_tokens > 15)
        # as LMDeploy's and SGLang's clients send it
        given = {"rid": "", "session_id": -1, "abort_all": True, "finished_reason": None, "abort_message": None}
        async with served.http.post(f"{served.url}/abort_request", json=given) as response:
            assert response.status == 200
        assert {answer["choices"][0]["finish_reason"] for _, answer in await asyncio.gather(*running)} == {"abort"}
        _, answer = await served.post("/v1/chat/completions", {**CHAT, "max_tokens": 3})
        assert answer["choices"][0]["message"]["content"] == "xxx"
        await engine.pause()
        async with served.http.post(f"{served.url}/abort_request", json={"abort_all": True}) as response:
            assert response.status == 200
        assert engine.paused


async def test_streams_of_sglang_end_by_the_id_that_they_say() -> None:
    engine = FakeEngine("x" * 3000, delay_per_token=0.002)
    async with (
        serving(engine) as served,
        served.http.post(f"{served.url}/generate", json={**SGLANG, "stream": True}) as response,
    ):
        first = json.loads((await response.content.readline()).removeprefix(b"data: "))
        answer = first["meta_info"]["id"]
        async with served.http.post(f"{served.url}/abort_request", json={"rid": answer}) as aborted:
            assert aborted.status == 200
        assert "abort" in await response.text()
