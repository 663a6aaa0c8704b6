"""Ollama's routes as its own client sees them, and on the wire."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from asyncllm import AsyncEngine, ChatTemplateConfig, EngineConfig
from asyncllm.server.ollama.messages import messages_of
from asyncllm.server.ollama.requests import (
    EmbeddingsRequest,
    EmbedRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaOptions,
    ShowRequest,
)
from asyncllm.server.request.unsupported import UNSUPPORTED
from asyncllm.testing import FakeEngine
from tests.server.serving import Served, serving

ollama = pytest.importorskip("ollama", reason="the test extra has it")

pytestmark = pytest.mark.anyio

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
THINKS = EngineConfig(reasoning_parser="qwen3")
ANSWER = f"<think>Hm.</think>\nLet me see.\n{CALL}\n{CALL}"
HI: Any = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"days": {"enum": [1, 2]}},
    "required": ["days"],
    "additionalProperties": False,
}


def tiny(**chat: Any) -> AsyncEngine:
    """The bundled model."""
    config = EngineConfig(num_gpu_blocks=64, session_len=512, tool_call_parser="hermes")
    return AsyncEngine("tiny-chat", config, chat_template_config=ChatTemplateConfig(**chat) if chat else None)


def client_of(served: Served, **options: Any) -> Any:
    return ollama.AsyncClient(host=served.url, **options)


async def lines_of(served: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    """The lines of a stream, as they are on the wire."""
    async with served.http.post(f"{served.url}{path}", json=body) as response:
        assert (response.status, response.content_type) == (200, "application/x-ndjson")
        text = await response.text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


async def test_lines_add_up_to_the_whole_answer() -> None:
    async with serving(FakeEngine(ANSWER, THINKS)) as served:
        asked = {"model": "fake:latest", "messages": HI, "tools": [WEATHER]}
        *lines, last = await lines_of(served, "/api/chat", **asked)
        status, whole = await served.post("/api/chat", {**asked, "stream": False})
    assert status == 200
    assert all(line["done"] is False for line in lines)
    messages = [line["message"] for line in lines]
    assert "".join(message.get("thinking", "") for message in messages) == whole["message"]["thinking"] == "Hm."
    assert "".join(message["content"] for message in messages) == whole["message"]["content"] == "Let me see."
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    assert calls == whole["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [
        {"index": index, "name": "weather", "arguments": {"city": "Bern"}} for index in range(2)
    ]
    # The first call comes before the second is over.
    assert sum("tool_calls" in message for message in messages) == 2
    for end in (last, whole):
        assert (end["done"], end["done_reason"], end["load_duration"]) == (True, "stop", 0)
        assert end["eval_count"] == len(ANSWER) + 1
        assert end["prompt_eval_count"] > 0
        assert end["total_duration"] >= end["prompt_eval_duration"] > 0
        assert end["total_duration"] >= end["eval_duration"] > 0
        datetime.fromisoformat(end["created_at"])


async def test_the_client_goes_round_with_calls_and_results() -> None:
    async with (
        serving(FakeEngine({"Hi": ANSWER, "So?": "It is sunny."}, THINKS)) as served,
        client_of(served) as client,
    ):
        first = await client.chat("fake", HI, tools=[WEATHER])
        assert [call.function.arguments for call in first.message.tool_calls] == [{"city": "Bern"}] * 2
        messages = [
            *HI,
            first.message,
            {"role": "tool", "tool_name": "weather", "content": "sunny"},
            {"role": "tool", "tool_name": "weather", "content": "rain"},
            {"role": "user", "content": "So?"},
        ]
        text = ""
        async for part in await client.chat("fake", messages, tools=[WEATHER], stream=True):
            text += part.message.content
        assert text == "It is sunny."
        assert part.done
        whole = await client.generate("fake", "So?", system="Be brief.")
        assert whole.response == "It is sunny."
        joined = "".join([part.response async for part in await client.generate("fake", "So?", stream=True)])
        assert joined == whole.response


def test_calls_and_results_find_each_other() -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Bern"}}}
    other = {"id": "mine", "function": {"name": "time", "arguments": {}}}
    made, *results = messages_of(
        [
            {"role": "assistant", "thinking": "Hm.", "tool_calls": [call, other, call]},
            {"role": "tool", "content": "a", "tool_name": "time"},
            {"role": "tool", "content": "b"},
            {"role": "tool", "content": "c", "tool_call_id": "call00003"},
            {"role": "tool", "content": "d", "tool_name": "unasked"},
        ]
    )
    assert made["reasoning_content"] == "Hm."
    assert [each["id"] for each in made["tool_calls"]] == ["call00001", "mine", "call00003"]
    assert made["tool_calls"][0]["function"]["arguments"] == '{"city":"Bern"}'
    found = [(each["content"], each["tool_call_id"], each["name"]) for each in results]
    assert found == [
        ("a", "mine", "time"),
        ("b", "call00001", "weather"),
        ("c", "call00003", "weather"),
        ("d", None, "unasked"),
    ]


def test_images_stand_in_front_of_the_text() -> None:
    (message,) = messages_of([{"role": "user", "content": "See", "images": ["AAAA"]}])
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert message == {"role": "user", "content": [image, {"type": "text", "text": "See"}]}


async def test_the_bundled_model_holds_to_a_format_and_to_its_options() -> None:
    async with serving(tiny()) as served, client_of(served) as client:
        held = await client.chat("tiny-chat", HI, format=SCHEMA, options={"temperature": 1, "seed": 3})
        assert json.loads(held.message.content) in ({"days": 1}, {"days": 2})
        free = await client.generate("tiny-chat", "Hi", format="json", options={"num_predict": 9})
        assert free.response.startswith("{")
        greedy: Any = {"temperature": 0, "num_ctx": 4096, "num_gpu": -1, "use_mmap": True}
        asked = {"model": "tiny-chat", "messages": [{"role": "user", "content": "What is 17 + 25?"}]}
        whole = await client.chat(**asked, options=greedy)
        assert "42" in whole.message.content
        cut = await client.chat(**asked, options={**greedy, "num_predict": 3})
        assert (cut.done_reason, cut.eval_count) == ("length", 3)
        stopped = await client.chat(**asked, options={**greedy, "stop": ["42"]})
        assert "42" not in stopped.message.content
        drawn = [await client.chat(**asked, options={"temperature": 1.5, "seed": 7}) for _ in range(2)]
        assert drawn[0].message.content == drawn[1].message.content
        scored = await client.chat(**asked, options=greedy, logprobs=True, top_logprobs=2)
        assert len(scored.logprobs) == scored.eval_count
        assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in scored.logprobs)
        parts = [part async for part in await client.chat(**asked, options=greedy, logprobs=True, stream=True)]
        assert sum(len(part.logprobs or ()) for part in parts) == scored.eval_count
        raw = await client.generate("tiny-chat", "One, two,", raw=True, options={"num_predict": 4})
        assert raw.prompt_eval_count < whole.prompt_eval_count


async def test_vectors_are_those_of_the_other_route() -> None:
    async with serving(tiny()) as served, client_of(served) as client:
        found = await client.embed("tiny-chat", ["a", "b c"], options={"num_ctx": 99}, keep_alive="5m")
        one = await client.embeddings("tiny-chat", "a")
        _, other = await served.post("/v1/embeddings", {"input": ["a", "b c"]})
        small = await client.embed("tiny-chat", "a", dimensions=4)
    assert [list(each) for each in found.embeddings] == [each["embedding"] for each in other["data"]]
    assert list(one.embedding) == list(found.embeddings[0])
    assert found.prompt_eval_count == other["usage"]["prompt_tokens"]
    assert [len(each) for each in small.embeddings] == [4]


async def test_what_is_served_is_told(tmp_path: Path) -> None:
    async with serving(tiny()) as served, client_of(served) as client:
        (listed,) = (await client.list()).models
        (running,) = (await client.ps()).models
        shown = await client.show("tiny-chat:latest")
        _, version = await served.get("/api/version")
    assert listed.model == running.model == "tiny-chat"
    assert listed.size == running.size > 2**16
    assert listed.digest == running.digest
    assert (running.size_vram, running.context_length) == (0, 512)
    assert listed.details.quantization_level == "F32"
    assert listed.details.parameter_size.endswith("M")
    assert shown.details == listed.details
    assert shown.modelinfo[f"{listed.details.family}.context_length"] == 512
    assert shown.capabilities == ["completion", "tools"]
    assert version["version"]
    async with serving(FakeEngine(ANSWER, THINKS)) as served, client_of(served) as client:
        shown = await client.show("fake")
        assert shown.capabilities == ["completion", "tools", "thinking"]


async def test_a_request_without_a_prompt_loads_what_is_loaded() -> None:
    async with serving(FakeEngine()) as served, client_of(served) as client:
        for answer in (await client.chat("fake", keep_alive="1h"), await client.generate("fake", keep_alive=-1)):
            assert (answer.done, answer.done_reason) == (True, "load")
        (line,) = await lines_of(served, "/api/chat", model="fake")
        assert line["done_reason"] == "load"
        status, found = await served.post("/api/generate", {"model": "fake", "keep_alive": 0})
        assert status == 400
        assert "stays loaded" in found["error"]


REFUSED: list[tuple[str, Any, int, str]] = [
    ("/api/chat", {"model": "other"}, 404, "other"),
    ("/api/chat", {"format": "yaml"}, 400, "yaml"),
    ("/api/chat", {"format": {"not": {}}}, 400, "not"),
    ("/api/chat", {"think": True}, 400, "think"),
    ("/api/chat", {"think": "high"}, 400, "degrees of reasoning"),
    ("/api/chat", {"options": {"mirostat": 2}}, 400, "mirostat"),
    ("/api/chat", {"options": {"colour": 2}}, 400, "colour"),
    ("/api/chat", {"options": {"temperature": -1}}, 400, "options.temperature"),
    ("/api/chat", {"options": {"stop": True}}, 400, "stop"),
    ("/api/chat", {"top_logprobs": 2}, 400, "logprobs"),
    ("/api/chat", {"messages": [{"role": "user", "content": "Hi", "images": ["AAAA"]}]}, 400, "image"),
    ("/api/chat", {"messages": [{"role": "user", "content": "Hi", "colour": 1}]}, 400, "colour"),
    ("/api/chat", {"messages": [{"role": "user", "content": ["Hi"]}]}, 400, "content"),
    ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, 400, "name"),
    ("/api/generate", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
    ("/api/generate", {"prompt": "a", "suffix": "b", "system": "c"}, 400, "system"),
    ("/api/generate", {"prompt": "a", "context": [1]}, 400, "context"),
    ("/api/generate", {"prompt": "a", "template": "{{ .Prompt }}"}, 400, "template"),
    ("/api/generate", {"prompt": "a", "raw": True, "system": "b"}, 400, "system"),
    ("/api/embed", {"input": "a", "truncate": True}, 400, "truncate"),
    ("/api/embed", {"input": []}, 400, "entries"),
    ("/api/pull", {"model": "a"}, 400, "/api/pull"),
    ("/api/push", {"model": "a"}, 400, "/api/push"),
    ("/api/create", {"model": "a"}, 400, "/api/create"),
    ("/api/copy", {"source": "a"}, 400, "/api/copy"),
]


async def test_what_cannot_be_done_is_refused_in_ollamas_own_form() -> None:
    async with serving(FakeEngine("Hi"), api_keys=["secret"]) as served:
        key = {"headers": {"Authorization": "Bearer secret"}}
        for path, body, expected, words in REFUSED:
            sent = {"messages": HI, **body} if path == "/api/chat" else body
            status, found = await served.post(path, sent, **key)
            assert (status, list(found)) == (expected, ["error"]), (path, body, found)
            assert words in found["error"], (path, body, found)
        async with served.http.delete(f"{served.url}/api/delete", json={"model": "a"}, **key) as response:
            assert response.status == 400
        async with client_of(served, headers={"Authorization": "Bearer wrong"}) as client:
            with pytest.raises(ollama.ResponseError) as caught:
                await client.chat("fake", HI)
        assert caught.value.status_code == 401
        assert caught.value.error.startswith("The key is")


async def test_a_failure_in_mid_stream_is_a_line() -> None:
    async with serving(FakeEngine("Hi there", fail_at=4)) as served, client_of(served) as client:
        with pytest.raises(ollama.ResponseError) as caught:
            async for _ in await client.chat("fake", HI, stream=True):
                pass
    assert "engine" in caught.value.error


async def test_thinking_is_switched_where_the_template_has_a_switch() -> None:
    template = (
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
        "{% if enable_thinking is defined and enable_thinking %}{{ 'yes, at length' }}{% else %}{{ 'no' }}{% endif %}"
    )
    async with serving(tiny(chat_template=template)) as served:
        counts = {}
        for think in (True, False, None):
            body = {"messages": HI, "think": think, "stream": False, "options": {"num_predict": 1}}
            status, found = await served.post("/api/chat", body)
            assert status == 200, found
            counts[think] = found["prompt_eval_count"]
        assert counts[True] != counts[False] == counts[None]


@pytest.mark.parametrize(
    ("name", "kind", "at_least"),
    [
        ("ChatRequest", OllamaChatRequest, 10),
        ("GenerateRequest", OllamaGenerateRequest, 17),
        ("EmbedRequest", EmbedRequest, 6),
        ("EmbeddingsRequest", EmbeddingsRequest, 4),
        ("ShowRequest", ShowRequest, 1),
        ("Options", OllamaOptions, 29),
    ],
)
def test_no_field_of_ollama_lacks_a_policy(name: str, kind: Any, at_least: int) -> None:
    from ollama import _types

    fields = set(getattr(_types, name).model_fields)
    assert len(fields) >= at_least
    assert sorted(fields - set(kind.__struct_fields__) - set(UNSUPPORTED)) == []


async def test_curl_as_its_documentation_has_it() -> None:
    """No Content-Type says that a body is JSON; what a browser sends has to."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    body = json.dumps({"model": "fake", "prompt": "Hi", "stream": False})
    async with serving(FakeEngine("Hello")) as served:
        async with served.http.post(f"{served.url}/api/generate", data=body, headers=form) as answer:
            assert (await answer.json())["response"] == "Hello"
        for said in ({"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-origin"}):
            async with served.http.post(f"{served.url}/api/generate", data=body, headers={**form, **said}) as answer:
                assert answer.status == 400
        async with served.http.post(f"{served.url}/v1/completions", data=body, headers=form) as answer:
            assert answer.status == 400
