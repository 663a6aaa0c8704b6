"""Answers with very many log-probabilities are written down in a thread, and are the same as small ones."""

from __future__ import annotations

import json
import threading
from functools import partial
from typing import Any

import pytest

from asyncllm.server.openai import chat, completions
from asyncllm.testing import FakeEngine
from tests.server.serving import serving

pytestmark = pytest.mark.anyio

COMPLETIONS = {"prompt": ["ab" * 400, "c" * 1500], "echo": True, "logprobs": 3, "n": 2, "max_tokens": 4}
CHAT = {"messages": "a" * 900, "logprobs": True, "top_logprobs": 5, "n": 2, "max_tokens": 900}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Of the threads in which log-probabilities are spelled."""
    seen: set[str] = set()
    for module, name in ((chat, "chat_logprobs"), (completions, "completion_logprobs")):

        def spelled(original: Any, *args: Any, **options: Any) -> Any:
            seen.add(threading.current_thread().name)
            return original(*args, **options)

        monkeypatch.setattr(module, name, partial(spelled, getattr(module, name)))
    return seen


@pytest.mark.parametrize("path_and_body", [("/v1/completions", COMPLETIONS), ("/v1/chat/completions", CHAT)])
async def test_whole(path_and_body: tuple[str, dict[str, Any]], threads: set[str]) -> None:
    path, body = path_and_body
    async with serving(FakeEngine()) as served:
        status, answer = await served.post(path, body)
        assert status == 200, answer
        assert threading.current_thread().name not in threads
        found = answer["choices"][-1]["logprobs"]
        assert len(found["tokens"] if "tokens" in found else found["content"]) > 600
        threads.clear()
        small = {**body, **({"prompt": "ab"} if "prompt" in body else {"messages": "ab"})}
        assert (await served.post(path, small))[0] == 200
        assert threads == {threading.current_thread().name}


async def test_streamed(threads: set[str]) -> None:
    async with serving(FakeEngine()) as served:
        _, whole = await served.post("/v1/completions", COMPLETIONS)
        threads.clear()
        async with served.http.post(f"{served.url}/v1/completions", json={**COMPLETIONS, "stream": True}) as response:
            lines = [line async for line in response.content]
        events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        assert any(name.startswith("asyncllm-encode") for name in threads)
        for index, choice in enumerate(whole["choices"]):
            mine = [each["choices"][0] for each in events if each["choices"][0]["index"] == index]
            assert "".join(each["text"] for each in mine) == choice["text"]
            told = [each["logprobs"] for each in mine if each["logprobs"] is not None]
            for name in ("tokens", "token_logprobs", "text_offset"):
                assert [value for each in told for value in each[name]] == choice["logprobs"][name]


async def test_a_prompt_without_special_tokens_that_cannot_fit_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(FakeEngine()) as served:
        monkeypatch.setattr(served.engine.tokenizer, "encode_batch", lambda *_, **__: pytest.fail("encoded"))
        body = {"prompt": "a" * 100_000, "add_special_tokens": False}
        status, answer = await served.post("/v1/completions", body)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
