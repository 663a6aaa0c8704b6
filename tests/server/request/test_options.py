"""Fields about the chat template, the queue and the prefix cache, on chats and completions."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from asyncllm.config import ChatTemplateConfig, EngineConfig
from asyncllm.engine.async_engine import AsyncEngine
from asyncllm.testing import ByteTokenizer, FakeEngine, fake_parts
from asyncllm.text.chat_template import ChatTemplate
from tests.engine.waits import until
from tests.server.serving import Served, serving

pytestmark = pytest.mark.anyio

PING: list[Any] = [{"role": "user", "content": "ping"}]
BEGUN: list[Any] = [*PING, {"role": "assistant", "content": "po"}]
JINJA = (
    "{% for m in messages %}[{{ m.role[0] }}:{{ m.content }}]{% endfor %}"
    "{% if add_generation_prompt %}[a:{{ '!' if enable_thinking is defined and not enable_thinking }}{{ tone }}"
    "{% endif %}"
)
KEYS = {"api_keys": ["first-key", "second-key"]}
QOS = {
    "enable_user_qos": True,
    "user_groups": ["Gold"],
    "user_group_map": {"Gold": [{"id": "alice", "quota_pct": 100}]},
}


def by(key: str) -> dict[str, Any]:
    return {"headers": {"Authorization": f"Bearer {key}"}}


@pytest.fixture
def templated(tmp_path: Path) -> AsyncEngine:
    """Answers with its prompt, which a Jinja template has written."""
    template = ChatTemplate.open(tmp_path, ChatTemplateConfig(chat_template=JINJA))
    return AsyncEngine("fake", **{**fake_parts(), "chat_template": template})


async def chat(served: Served, **fields: Any) -> tuple[int, Any]:
    return await served.post("/v1/chat/completions", {"messages": PING, "max_tokens": 99, **fields})


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"messages": BEGUN}, "[u:ping][a:po"),
        ({"messages": BEGUN, "add_generation_prompt": False, "continue_final_message": True}, "[u:ping][a:po"),
        ({"messages": BEGUN, "continue_final_message": False}, "[u:ping][a:po][a:"),
        ({"messages": BEGUN, "add_generation_prompt": True}, "[u:ping][a:po][a:"),
        ({"add_generation_prompt": False}, "[u:ping]"),
        ({"chat_template_kwargs": {"tone": "kind"}}, "[u:ping][a:kind"),
        ({"enable_thinking": False, "chat_template_kwargs": {"tone": 1.5}}, "[u:ping][a:!1.5"),
        ({"messages": "as it is", "do_preprocess": False}, "as it is"),
        ({"messages": "hello"}, "[u:hello][a:"),
    ],
    ids=str,
)
async def test_the_template_writes_what_was_asked_for(
    templated: AsyncEngine, fields: dict[str, Any], prompt: str
) -> None:
    async with serving(templated) as served:
        status, answer = await chat(served, **fields)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, prompt)
        if "do_preprocess" not in fields:
            asked = {"messages": PING, **fields}
            if isinstance(asked["messages"], list):
                status, answer = await served.post("/tokenize", asked)
                assert (status, bytes(answer["tokens"]).decode()) == (200, prompt)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": BEGUN, "add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tone": ["x"]}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {f"k{n}": 1 for n in range(33)}}, "chat_template_kwargs"),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "enable_thinking"),
        ({"do_preprocess": False}, "messages"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"stop": True}, "stop"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": "soon"}, "timeout"),
        ({"priority": 2**40}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"user_id": "alice"}, "user_id"),
    ],
    ids=str,
)
async def test_what_does_not_fit_is_a_400_that_names_the_field(
    templated: AsyncEngine, fields: dict[str, Any], param: str
) -> None:
    async with serving(templated) as served:
        status, answer = await chat(served, **fields)
        assert (status, answer["error"]["param"]) == (400, param)
        assert (await chat(served, stop=False))[0] == 200


async def test_a_built_in_template_refuses_variables() -> None:
    async with serving(FakeEngine()) as served:
        status, answer = await chat(served, enable_thinking=True)
        assert (status, answer["error"]["code"]) == (400, "unsupported_parameter")


@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
async def test_not_to_think_is_nothing_to_ask_of_a_template_that_knows_of_no_thinking(name: str) -> None:
    async with serving(FakeEngine({"ping": "pong"})) as served:
        plain = {"chat_template_kwargs": {name: False}}
        unset = {"chat_template_kwargs": {name: False, "tone": None}}
        for fields in (plain, {"enable_thinking": False}, {"enable_thinking": None, **plain}, unset):
            status, answer = await chat(served, **fields)
            assert (status, answer["choices"][0]["message"]["content"]) == (200, "pong")
            messages = [{"role": "user", "content": "ping"}]
            assert (await served.post("/tokenize", {"messages": messages, **fields}))[0] == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate", "/v1/chat/interactive"])
async def test_a_timeout_is_a_504_that_is_not_repeated(path: str) -> None:
    async with serving(FakeEngine(delay_per_token=0.02)) as served:
        body = {"timeout": 0.05}
        body |= {"messages": "x" * 400} if path == "/v1/chat/completions" else {"prompt": "x" * 400}
        if path == "/v1/completions":
            body["max_tokens"] = 400
        async with served.http.post(served.url + path, json=body) as response:
            answer = await response.json()
            assert (response.status, answer["error"]["code"]) == (504, "deadline_exceeded")
            assert answer["error"]["type"] == "timeout_error"
            assert response.headers["x-should-retry"] == "false"
        async with served.http.post(served.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200
            assert "deadline_exceeded" in await response.text()


async def test_a_full_queue_is_a_429_that_says_when_to_come_back() -> None:
    engine = FakeEngine({"ping": "pong"}, EngineConfig(max_batch_size=1, max_queued_requests=1))
    async with serving(engine) as served:
        engine.executor.pause()
        first = asyncio.create_task(chat(served))
        await until(lambda: engine.stats().running)
        second = asyncio.create_task(chat(served))
        await until(lambda: engine.stats().waiting)
        async with served.http.post(served.url + "/v1/completions", json={"prompt": "x"}) as response:
            answer = await response.json()
            assert (response.status, answer["error"]["code"]) == (429, "queue_full")
            assert 1 <= int(response.headers["Retry-After"]) <= 120
        engine.executor.resume()
        assert [status for status, _ in await asyncio.gather(first, second)] == [200, 200]


async def test_a_lower_priority_is_served_earlier() -> None:
    engine = FakeEngine(None, EngineConfig(max_batch_size=1))
    async with serving(engine) as served:
        engine.executor.pause()
        order: list[str] = []

        async def ask(prompt: str, priority: int) -> None:
            status, _ = await served.post("/v1/completions", {"prompt": prompt, "priority": priority, "max_tokens": 9})
            assert status == 200
            order.append(prompt)

        tasks: list[asyncio.Task[None]] = []
        for prompt, priority in (("first", 5), ("late", 1), ("soon", -1)):
            tasks.append(asyncio.create_task(ask(prompt, priority)))
            await until(lambda: engine.stats().running + engine.stats().waiting == len(tasks))
        engine.executor.resume()
        await asyncio.gather(*tasks)
        assert order == ["first", "soon", "late"]


async def test_prefixes_are_shared_by_equal_salts_only() -> None:
    async with serving(FakeEngine()) as served:

        async def cached(**fields: Any) -> int:
            _, answer = await served.post("/v1/completions", {"prompt": "p" * 300, **fields})
            tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            return tokens

        assert [await cached(), await cached() > 0] == [0, True]
        assert [await cached(cache_salt="a"), await cached(cache_salt="a") > 0] == [0, True]
        assert await cached(cache_salt="b") == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate", "/v1/chat/interactive"])
async def test_keys_do_not_see_each_others_prefixes(path: str) -> None:
    async with serving(FakeEngine(), **KEYS) as served:

        async def cached(key: str, **fields: Any) -> int:
            text = "p" * 300
            body = {"messages": text} if path.endswith("chat/completions") else {"prompt": text}
            before = served.engine.stats().cached_tokens
            status, _ = await served.post(path, {**body, **fields}, **by(key))
            assert status == 200
            return served.engine.stats().cached_tokens - before

        assert await cached("first-key") == 0
        assert await cached("first-key") > 0
        assert await cached("second-key") == 0
        # Neither does a key that knows how the salts are made.
        for salt in ("0/", "0", "first-key"):
            assert await cached("second-key", cache_salt=salt) == 0
        assert await cached("second-key") > 0


async def test_one_key_needs_no_salt() -> None:
    async with serving(FakeEngine(), api_keys=["only-key"]) as served:
        for cached in (False, True):
            _, answer = await served.post("/v1/completions", {"prompt": "p" * 300}, **by("only-key"))
            assert (answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == cached
        response = await served.engine.generate("p" * 300, do_preprocess=False)
        assert response.cached_token_len > 0


@pytest.mark.parametrize("suffix", ["", "_qos"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/chat/interactive"])
async def test_users_are_served_by_the_file_of_the_engine(path: str, suffix: str, tmp_path: Path) -> None:
    file = tmp_path / "qos.json"
    file.write_text(json.dumps(QOS))
    async with serving(FakeEngine(None, EngineConfig(qos_config_path=str(file)))) as served:
        body = {"messages": "x"} if path == "/v1/chat/completions" else {"prompt": "x"}
        status, _ = await served.post(path + suffix, {**body, "user_id": "alice"})
        assert status == 200
        assert served.engine.stats().user_tokens["alice"] > 0
        for fields in ({"user_id": "mallory"}, {}):
            status, answer = await served.post(path + suffix, {**body, **fields})
            assert (status, answer["error"]["param"]) == (400, "user_id")


async def test_the_best_of_as_many_are_all() -> None:
    async with serving(FakeEngine()) as served:
        for fields, count in (({"n": 3, "best_of": 3}, 3), ({"best_of": 1}, 1)):
            status, answer = await served.post("/v1/completions", {"prompt": "x", **fields})
            assert (status, len(answer["choices"])) == (200, count)
        for fields in ({"best_of": 3}, {"n": 2, "best_of": 3}):
            status, answer = await served.post("/v1/completions", {"prompt": "x", **fields})
            assert (status, answer["error"]["param"]) == (400, "best_of")


async def test_request_id_is_the_answers_id() -> None:
    async with serving(FakeEngine()) as served:
        _, answer = await chat(served, request_id="mine-1")
        assert answer["id"] == "chatcmpl-mine-1"
        _, answer = await served.post("/v1/completions", {"prompt": "x", "request_id": "mine-2"})
        assert answer["id"] == "cmpl-mine-2"


async def test_a_completion_begins_with_what_the_tokenizer_puts_there_unless_it_shall_not() -> None:
    engine = AsyncEngine("fake", **{**fake_parts(), "tokenizer": ByteTokenizer(adds_bos=True)})
    async with serving(engine) as served:

        async def prompt_ids(**fields: Any) -> list[list[int]]:
            body = {"prompt": ["a", "b"], "return_token_ids": True, "echo": True, **fields}
            _, answer = await served.post("/v1/completions", body)
            assert [choice["text"][0] for choice in answer["choices"]] == ["a", "b"]
            return [choice["prompt_token_ids"] for choice in answer["choices"]]

        assert await prompt_ids() == await prompt_ids(add_special_tokens=True) == [[256, 97], [256, 98]]
        assert await prompt_ids(add_special_tokens=False) == [[97], [98]]


async def test_inputs_that_are_pooled_have_what_the_tokenizer_adds_unless_they_shall_not() -> None:
    engine = AsyncEngine("fake", **{**fake_parts(), "tokenizer": ByteTokenizer(adds_bos=True)})
    async with serving(engine) as served:

        async def count(path: str, **body: Any) -> int:
            status, answer = await served.post(path, body)
            assert status == 200
            counted: int = answer["usage"]["prompt_tokens"]
            return counted

        for path in ("/v1/embeddings", "/classify", "/pooling"):
            assert await count(path, input="abcd") == 5
            assert await count(path, input="abcd", add_special_tokens=False) == 4
            assert await count(path, input="abcd", truncate_prompt_tokens=3) == 3
            assert await count(path, input=["x" * 5000], truncate_prompt_tokens=-1) == engine.session_len
            assert await count(path, input=[[97, 98, 99]], truncate_prompt_tokens=2) == 2
        pair = {"text_1": "ab", "text_2": "cd"}
        assert await count("/score", **pair) == 5
        assert await count("/score", **pair, add_special_tokens=False) == 4
        assert await count("/score", **pair, truncate_prompt_tokens=2) == 2
        _, cut = await served.post("/v1/embeddings", {"input": "abcd", "truncate_prompt_tokens": 3})
        _, right = await served.post(
            "/v1/embeddings", {"input": "abcd", "truncate_prompt_tokens": 3, "truncation_side": "right"}
        )
        _, ids = await served.post("/v1/embeddings", {"input": [[256, 99, 100], [256, 97, 98]]})
        status, answer = await served.post("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 1})
        _, plain = await served.post("/generate", {"prompt": "ab", "add_special_tokens": False})
    assert [cut["data"][0]["embedding"], right["data"][0]["embedding"]] == [each["embedding"] for each in ids["data"]]
    assert (status, answer["error"]["param"]) == (400, "truncate_prompt_tokens")
    assert plain["meta_info"]["prompt_tokens"] == 2


async def test_scores_may_be_those_of_the_head_itself() -> None:
    async with serving(FakeEngine()) as served:
        raw = {"use_activation": False}
        _, score = await served.post("/score", {"text_1": "a", "text_2": "b", **raw})
        _, ranked = await served.post("/rerank", {"query": "a", "documents": ["b"], **raw})
        _, classified = await served.post("/classify", {"input": "ab", **raw})
        found = await served.engine.classify("ab")
    assert not isinstance(found, list)
    assert score["data"][0]["score"] == ranked["results"][0]["relevance_score"] == found.values[0]
    assert classified["data"][0]["probs"] == found.values


async def test_a_conversation_is_pooled_as_its_template_writes_it() -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    async with serving(AsyncEngine("tiny-chat", EngineConfig(num_gpu_blocks=32, session_len=512))) as served:
        for further in (
            {},
            {"add_generation_prompt": True},
            {"continue_final_message": True},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]},
        ):
            _, written = await served.post(
                "/tokenize", {"messages": messages, "add_generation_prompt": False, **further}
            )
            body = {"messages": messages, **further}
            status, found = await served.post("/v1/embeddings", body)
            _, expected = await served.post("/v1/embeddings", {"input": [written["tokens"]]})
            assert (status, found["data"]) == (200, expected["data"]), further
            assert found["usage"]["prompt_tokens"] == written["count"]
        _, found = await served.post("/v1/embeddings", {"messages": messages, "truncate_prompt_tokens": 3})
        assert found["usage"]["prompt_tokens"] == 3
