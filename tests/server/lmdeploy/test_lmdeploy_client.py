"""What LMDeploy's own APIClient sends, field by field, and what it reads from the answers.

Its methods put all of their parameters into the body, with the defaults written down here, and the dict of their
further keyword arguments under the name `kwargs`. 0.6 is the last line of releases with conversations.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncllm.testing import FakeEngine
from tests.server.serving import Served, serving

pytestmark = pytest.mark.anyio

SAMPLED: dict[str, Any] = {
    "kwargs": {},
    "temperature": 0.7,
    "top_p": 1.0,
    "n": 1,
    "stop": None,
    "stream": False,
    "user": None,
    "repetition_penalty": 1.0,
    "ignore_eos": False,
    "skip_special_tokens": True,
}
CHAT_0_6 = SAMPLED | {
    "model": "fake",
    "messages": [{"role": "user", "content": "ping"}],
    "logprobs": False,
    "top_logprobs": 0,
    "max_tokens": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "session_id": -1,
}
CHAT_NEW = {name: value for name, value in CHAT_0_6.items() if name != "session_id"} | {
    "max_completion_tokens": None,
    "spaces_between_special_tokens": True,
    "top_k": 40,
    "min_new_tokens": None,
    "min_p": 0.0,
    "logit_bias": None,
    "stream_options": None,
}
COMPLETION_0_6 = SAMPLED | {
    "model": "fake",
    "prompt": "ping",
    "suffix": None,
    "max_tokens": 16,
    "top_k": 40,
    "session_id": -1,
}
COMPLETION_NEW = {name: value for name, value in COMPLETION_0_6.items() if name != "session_id"} | {
    "max_completion_tokens": 16,
    "spaces_between_special_tokens": True,
    "stream_options": None,
}
INTERACTIVE: dict[str, Any] = {
    "kwargs": {},
    "prompt": "ping",
    "image_url": None,
    "session_id": -1,
    "interactive_mode": False,
    "stream": False,
    "stop": None,
    "request_output_len": None,
    "top_p": 0.8,
    "top_k": 40,
    "temperature": 0.8,
    "repetition_penalty": 1.0,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "adapter_name": None,
}
GENERATE: dict[str, Any] = {
    "session_id": -1,
    "prompt": "ping",
    "input_ids": None,
    "image_data": None,
    "return_logprob": None,
    "max_tokens": 128,
    "stop": None,
    "stop_token_ids": None,
    "stream": False,
    "temperature": None,
    "repetition_penalty": None,
    "ignore_eos": False,
    "top_p": None,
    "top_k": None,
    "min_p": None,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "return_routed_experts": False,
    "repetition_ngram_size": 0,
    "repetition_ngram_threshold": 0,
    "media_io_kwargs": None,
    "mm_processor_kwargs": None,
}
"""Its request type for /generate, dumped whole."""


async def items(served: Served, path: str, body: dict[str, Any]) -> list[Any]:
    """The answer as its client reads one: each line is an object, perhaps behind `data: `; the last line is not."""
    async with served.http.post(served.url + path, json=body) as response:
        assert response.status == 200, await response.text()
        lines = [line.decode().strip() async for line in response.content]
    return [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]


@pytest.mark.parametrize("body", [CHAT_0_6, CHAT_NEW], ids=["0.6", "today"])
async def test_chat(body: dict[str, Any]) -> None:
    async with serving(FakeEngine({"ping": "pong"})) as served:
        [answer] = await items(served, "/v1/chat/completions", body)
        assert answer["choices"][0]["message"]["content"] == "pong"
        chunks = await items(served, "/v1/chat/completions", body | {"stream": True})
        choices = [chunk["choices"][0] for chunk in chunks]
        assert choices[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"]["content"] for choice in choices) == "pong"
        assert (choices[-1]["delta"], choices[-1]["finish_reason"]) == ({"content": ""}, "stop")
        [answer] = await items(served, "/v1/chat/completions", body | {"messages": "ping"})
        assert answer["choices"][0]["message"]["content"] == "pong"


async def test_further_arguments_of_its_methods_are_fields() -> None:
    async with serving(FakeEngine("x" * 40)) as served:
        [answer] = await items(served, "/v1/chat/completions", CHAT_0_6 | {"kwargs": {"seed": 1, "max_tokens": 3}})
        # What stands beside it has been said by name.
        assert answer["usage"]["completion_tokens"] == 41
        [answer] = await items(served, "/generate", {"prompt": "a", "kwargs": {"min_tokens": 0, "max_tokens": 3}})
        assert answer["meta_info"]["completion_tokens"] == 3
        for further, code in (({"colour": 1}, "unknown_parameter"), ({"tools": [1]}, "invalid_type")):
            status, error = await served.post("/v1/chat/completions", CHAT_0_6 | {"kwargs": further})
            assert (status, error["error"]["code"], error["error"]["param"]) == (400, code, *further)


@pytest.mark.parametrize("body", [COMPLETION_0_6, COMPLETION_NEW], ids=["0.6", "today"])
async def test_completions(body: dict[str, Any]) -> None:
    async with serving(FakeEngine({"ping": "pong"})) as served:
        [answer] = await items(served, "/v1/completions", body)
        assert answer["choices"][0]["text"] == "pong"
        choices = [chunk["choices"][0] for chunk in await items(served, "/v1/completions", body | {"stream": True})]
        assert "".join(choice["text"] for choice in choices) == "pong"
        assert (choices[-1]["text"], choices[-1]["finish_reason"]) == ("", "stop")


async def test_conversations() -> None:
    async with serving(FakeEngine({"ping": "pong"})) as served:

        async def say(**fields: Any) -> list[Any]:
            return await items(served, "/v1/chat/interactive", INTERACTIVE | fields)

        [answer] = await say()
        assert (answer["text"], answer["finish_reason"]) == ("pong", "stop")
        for turn in range(2):
            lines = await say(session_id=7, interactive_mode=True, stream=True, request_output_len=512)
            assert "".join(line["text"] for line in lines) == "pong"
            assert (lines[0]["history_tokens"] > 0) == bool(turn)
        # Its end_session: nothing is said, and nothing is to be answered.
        [ended] = await say(prompt="", session_id=7, request_output_len=0)
        assert (ended["text"], ended["finish_reason"]) == ("", "stop")
        assert ended["history_tokens"] > 0
        # Its get_streaming_response, of the conversation in a terminal.
        chatted = {"prompt": "ping", "stream": True, "session_id": 8, "request_output_len": 512, "cancel": False}
        lines = await items(
            served,
            "/v1/chat/interactive",
            chatted | {"interactive_mode": False, "ignore_eos": False, "top_p": 0.8, "temperature": 0.7},
        )
        assert "".join(line["text"] for line in lines) == "pong"


async def test_generate_and_encode() -> None:
    async with serving(FakeEngine({"ping": "pong"})) as served:
        for fields in ({}, {"prompt": None, "input_ids": list(b"ping")}):
            [answer] = await items(served, "/generate", GENERATE | fields)
            assert (answer["text"], answer["output_ids"]) == ("pong", [*b"pong", 257])
        [encoded] = await items(served, "/v1/encode", {"input": "ping", "do_preprocess": False, "add_bos": True})
        assert encoded == {"input_ids": [*b"ping"], "length": 4}


async def test_models() -> None:
    async with serving(FakeEngine()) as served:
        status, answer = await served.get("/v1/models")
        assert (status, [model["id"] for model in answer["data"]]) == (200, ["fake"])
        [card] = answer["data"]
        assert (card["object"], card["root"], card["parent"]) == ("model", "fake", None)
        [permission] = card["permission"]
        assert permission["object"] == "model_permission"
        assert permission["id"].startswith("modelperm-")
        assert permission["allow_sampling"]
        assert not permission["is_blocking"]
        assert await served.get("/v1/models/fake") == (200, card)


@pytest.mark.parametrize(
    "path", ["/v1/models/", "//v1/models", "/v1//models", "/v1/models///", "/v1/models/fake/", "/v1/models//fake"]
)
async def test_a_base_url_with_a_slash_too_many(path: str) -> None:
    async with serving(FakeEngine()) as served:
        async with served.http.get(served.url + path) as response:
            assert (response.status, response.history) == (200, ())
        async with served.http.post(served.url + path) as response:
            assert (response.status, response.headers["Allow"]) == (405, "GET,HEAD")
        for posted in ("//v1/chat/completions", "/v1/chat/completions/"):
            assert len(await items(served, posted, CHAT_NEW)) == 1
        assert (await served.get("/v1//nothing/"))[0] == 404


async def test_a_slash_too_many_is_no_way_around_a_key() -> None:
    async with serving(FakeEngine(), api_keys=["secret"]) as served:
        for path in ("//v1/models", "/v1/models/", "//", "/health/", "//health"):
            assert (await served.get(path))[0] == 401
            async with served.http.get(served.url + path, headers={"Authorization": "Bearer secret"}) as response:
                assert response.status == 200


async def test_errors_in_its_format_where_the_owner_says_so() -> None:
    async with serving(FakeEngine(row_failure=lambda prompt: "made to fail"), error_format="lmdeploy") as served:
        for path, body, status, param in (
            ("/v1/chat/completions", CHAT_NEW | {"top_p": 5}, 400, "top_p"),
            ("/v1/chat/completions", CHAT_NEW | {"model": "other"}, 404, "model"),
            ("/nothing", {}, 404, None),
            ("/v1/models", {}, 405, None),
            ("/v1/completions", COMPLETION_NEW, 500, None),
        ):
            found, answer = await served.post(path, body)
            assert set(answer) == {"object", "message", "type", "param", "code"}
            assert (found, answer["object"], answer["code"], answer["param"]) == (status, "error", status, param)
        # In a stream it has them below a key, as OpenAI has.
        [*_, last] = await items(served, "/v1/chat/completions", CHAT_NEW | {"stream": True})
        assert (last["error"]["object"], last["error"]["code"]) == ("error", 500)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_prompt_that_is_too_long_is_named_as_the_caller_called_it(streamed: bool) -> None:
    long = "x" * 20_000
    async with serving(FakeEngine()) as served:
        for path, field, prompt in (
            ("/v1/chat/completions", "messages", [{"role": "user", "content": long}]),
            ("/v1/completions", "prompt", long),
            ("/v1/completions", "prompt", [list(long.encode())]),
            ("/v1/chat/interactive", "prompt", long),
            ("/generate", "prompt", long),
            ("/generate", "input_ids", list(long.encode())),
            ("/v1/embeddings", "input", long),
        ):
            if not (streamed and field == "input"):
                stream = {"stream": True} if streamed else {}
                status, answer = await served.post(path, {field: prompt, **stream})
                found = (status, answer["error"]["code"], answer["error"]["param"])
                assert found == (400, "context_length_exceeded", field), path
