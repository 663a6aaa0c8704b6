"""POST /v1/chat/completions, asked by OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from asyncllm import AsyncEngine, EngineConfig
from asyncllm.testing import FakeEngine
from tests.server.serving import Served, serving

pytestmark = pytest.mark.anyio

PING: list[Any] = [{"role": "user", "content": "ping"}]


async def test_an_answer_has_what_clients_read() -> None:
    async with serving(FakeEngine({"ping": "pong"})) as served, served.openai() as client:
        answer = await client.chat.completions.create(model="fake", messages=PING)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == "fake"
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "stop", "assistant")
    assert choice.message.content == "pong"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5  # four bytes and the end of sequence
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5


async def test_a_stream_says_its_role_its_text_and_its_end_once_each() -> None:
    async with serving(FakeEngine({"ping": "pong"})) as served, served.openai() as client:
        stream = await client.chat.completions.create(
            model="fake", messages=PING, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    *pieces, usage = chunks
    choices = [chunk.choices[0] for chunk in pieces]
    assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert "".join(choice.delta.content or "" for choice in choices) == "pong"
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert all(chunk.usage is None for chunk in pieces)
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 5


async def test_n_answers_come_under_their_index_whole_and_streamed() -> None:
    async with serving(FakeEngine({"ping": "pong"})) as served, served.openai() as client:
        whole = await client.chat.completions.create(model="fake", messages=PING, n=3)
        texts = [""] * 3
        async for chunk in await client.chat.completions.create(model="fake", messages=PING, n=3, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert texts == [choice.message.content for choice in whole.choices] == ["pong"] * 3


async def test_a_developer_message_is_a_system_message_and_an_assistant_message_comes_back_as_it_was_sent() -> None:
    said: list[str] = []

    def answer(question: str) -> str:
        said.append(question)
        return "pong"

    async with serving(FakeEngine(answer)) as served, served.openai() as client:
        first = await client.chat.completions.create(
            model="fake", messages=[{"role": "developer", "content": "be brief"}, *PING]
        )
        again: list[Any] = [*PING, first.choices[0].message, {"role": "user", "content": "once more"}]
        await client.chat.completions.create(model="fake", messages=again)
    assert list(dict.fromkeys(said)) == ["ping", "once more"]


async def test_log_probabilities_have_the_chosen_token_and_the_most_likely_ones() -> None:
    async with serving(FakeEngine({"ping": "pong"})) as served, served.openai() as client:
        answer = await client.chat.completions.create(
            model="fake", messages=PING, logprobs=True, top_logprobs=2, temperature=0
        )
        streamed = []
        async for chunk in await client.chat.completions.create(
            model="fake", messages=PING, logprobs=True, top_logprobs=2, temperature=0, stream=True
        ):
            if chunk.choices[0].logprobs is not None:
                streamed += chunk.choices[0].logprobs.content or []
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content][:4] == list("pong")
    assert [entry.bytes for entry in logprobs.content][:4] == [[byte] for byte in b"pong"]
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs.content)
    assert all(entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob for entry in logprobs.content)
    assert streamed == logprobs.content


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": []}, "messages", "invalid_value"),
        ({"temperature": 2.5}, "temperature", "invalid_value"),
        ({"n": 17}, "n", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"tools": [{"type": "function"}]}, "tools", "invalid_value"),
        ({"response_format": {"type": "xml"}}, "response_format", "unsupported_parameter"),
        ({"extra_body": {"colour": "red"}}, "colour", "unknown_parameter"),
        ({"logit_bias": {"258": 1}}, "logit_bias", "invalid_value"),
    ],
    ids=str,
)
async def test_what_cannot_be_served_is_a_400_that_names_the_field(
    fields: dict[str, Any], param: str, code: str
) -> None:
    async with serving(FakeEngine()) as served, served.openai() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**{"model": "fake", "messages": PING, **fields})
        assert (caught.value.param, caught.value.code) == (param, code)
        assert (await client.chat.completions.create(model="fake", messages=PING)).choices[0].message.content == "ping"


async def test_an_error_names_parameters_as_the_api_does() -> None:
    async with serving(FakeEngine()) as served:
        asked = {"messages": PING, "min_tokens": 5, "max_tokens": 2}
        status, answer = await served.post("/v1/chat/completions", asked)
    assert (status, answer["error"]["param"]) == (400, "min_tokens")
    assert answer["error"]["message"] == "min_tokens (5) is above max_tokens (2)."


async def test_another_model_is_not_found() -> None:
    async with serving(FakeEngine()) as served, served.openai() as client:
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=PING)


async def events_of(served: Served, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a chat's stream, without its end mark."""
    answer = await served.http.post(f"{served.url}/v1/chat/completions", json={**body, "stream": True})
    lines = [line for line in (await answer.text()).split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_the_events_of_a_stream_have_the_shapes_that_clients_depend_on() -> None:
    counted = {"include_usage": True, "continuous_usage_stats": True}
    async with serving(FakeEngine({"ping": "pong"})) as served:
        events = await events_of(served, {"messages": PING, "stream_options": counted, "logprobs": True})
    assert events.pop()["choices"] == []
    first, *pieces, last = (event["choices"][0] for event in events)
    assert first == {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    assert all(piece["logprobs"]["content"] and "role" not in piece["delta"] for piece in pieces)
    assert last == {"index": 0, "delta": {"content": ""}, "logprobs": None, "finish_reason": "stop"}
    used = [event["usage"]["completion_tokens"] for event in events]
    assert (used[0], used[-1]) == (0, 5)
    assert used == sorted(used)
    assert {event["usage"]["prompt_tokens"] for event in events} == {events[0]["usage"]["prompt_tokens"]}


async def test_no_top_log_probabilities_are_nothing_to_ask_for() -> None:
    async with serving(FakeEngine({"ping": "pong"})) as served:
        for fields in ({"top_logprobs": 0}, {"top_logprobs": 0, "logprobs": False}, {"top_logprobs": None}):
            status, answer = await served.post("/v1/chat/completions", {"messages": PING, **fields})
            assert (status, answer["choices"][0]["logprobs"]) == (200, None)


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_a_completions_log_probabilities_have_the_chosen_token_always(count: int) -> None:
    body = {"prompt": "ping", "logprobs": count, "seed": 1, "max_tokens": 4, "temperature": 2}
    async with serving(FakeEngine({"ping": "pong"})) as served:
        _, answer = await served.post("/v1/completions", body)
        found = answer["choices"][0]["logprobs"]
        assert found["tokens"] == list("pong")
        for token, value, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
            assert top[token] == value
            assert max(1, count) <= len(top) <= count + 1


async def test_tokens_as_their_ids_and_a_prompts_log_probabilities() -> None:
    """In vLLM's forms; a stream sends them as the whole answer has them."""
    wanted = {"return_tokens_as_token_ids": True, "return_token_ids": True, "prompt_logprobs": 2, "max_tokens": 3}
    async with serving(FakeEngine({"ping": "pong"})) as served:
        chat = {"messages": PING, "logprobs": True, "top_logprobs": 2, **wanted}
        _, answer = await served.post("/v1/chat/completions", chat)
        first, *pieces, _ = await events_of(served, chat)
        _, plain = await served.post("/v1/completions", {"prompt": "ping", "logprobs": 2, "echo": True, **wanted})
        _, unknown = await served.post("/v1/completions", {"prompt": "ping", **wanted, "prompt_logprobs": 0})
        unasked = {"stream_options": {"continuous_usage_stats": True}, "messages": PING}
        assert not any("usage" in event for event in await events_of(served, unasked))
    entries = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in answer["choices"][0]["token_ids"]]
    assert [bytes(entry["bytes"]) for entry in entries] == [b"p", b"o", b"n"]
    assert all(top["token"].startswith("token_id:") for entry in entries for top in entry["top_logprobs"])
    assert [entry for piece in pieces for entry in piece["choices"][0]["logprobs"]["content"]] == entries
    assert first["prompt_logprobs"] == answer["prompt_logprobs"]
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]

    choice = plain["choices"][0]
    ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in ids]
    assert choice["logprobs"]["text_offset"] == list(range(len("pingpon")))
    start, *rest = choice["prompt_logprobs"]
    assert start is None
    for token, entry in zip(choice["prompt_token_ids"][1:], rest, strict=True):
        assert entry[str(token)]["decoded_token"] == chr(token)
        assert sorted(each["rank"] for each in entry.values() if each["rank"]) == [1, 2]
        best = max(entry.values(), key=lambda each: each["logprob"])
        assert best["rank"] == 1 or entry[str(token)] == best
    assert [each["rank"] for entry in unknown["choices"][0]["prompt_logprobs"][1:] for each in entry.values()] == [
        None
    ] * 3


async def test_offsets_are_positions_in_the_text() -> None:
    """Streamed too, though a stop word may hold characters back; the parts of a character have its position."""
    body: dict[str, Any] = {"prompt": "ping", "logprobs": 0, "max_tokens": 20, "stop": ["nögx"]}
    async with serving(FakeEngine({"ping": "pönög"})) as served, served.openai() as client:
        _, whole = await served.post("/v1/completions", body)
        stream = await client.completions.create(model="fake", stream=True, **body)
        pieces = [event.choices[0].logprobs async for event in stream]
    expected = [0, 1, 1, 2, 3, 3, 4]
    assert whole["choices"][0]["logprobs"]["text_offset"][:7] == expected
    assert [each for piece in pieces if piece for each in piece.text_offset or ()][:7] == expected


@pytest.mark.one_loop
async def test_tokens_that_the_text_leaves_out_have_no_width() -> None:
    async with serving(AsyncEngine("tiny-chat", EngineConfig(device_type="cpu", num_gpu_blocks=50))) as served:
        body = {"prompt": "What is 17 + 25?", "echo": True, "logprobs": 0, "max_tokens": 12, "ignore_eos": True}
        for skips in (True, False):
            _, answer = await served.post("/v1/completions", {**body, "skip_special_tokens": skips})
            text, logprobs = answer["choices"][0]["text"], answer["choices"][0]["logprobs"]
            marks = [token for token in logprobs["tokens"][1:] if token.startswith("<|")]
            assert marks
            for token, offset in list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))[1:]:
                assert text.startswith(token, offset) or (skips and token in marks)


async def test_prompts_are_cut_where_that_is_asked_for() -> None:
    def asked(**fields: object) -> dict[str, object]:
        return {"prompt": ["abcdef", "gh"], "max_tokens": 2, "return_token_ids": True, "echo": True, **fields}

    async with serving(FakeEngine(backend_config=EngineConfig(session_len=64))) as served:
        for fields, kept in (
            ({"truncate_prompt_tokens": 3}, ["def", "gh"]),
            ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, ["abc", "gh"]),
            ({"prompt": [[97, 98, 99]], "truncate_prompt_tokens": 1, "truncation_side": "left"}, ["c"]),
            ({"prompt": "x" * 90 + "y", "truncate_prompt_tokens": -1}, ["x" * 61 + "y"]),
        ):
            status, answer = await served.post("/v1/completions", asked(**fields))
            assert status == 200
            assert [bytes(each["prompt_token_ids"]).decode() for each in answer["choices"]] == kept
            assert [each["text"][: len(text)] for each, text in zip(answer["choices"], kept, strict=True)] == kept
            assert answer["usage"]["prompt_tokens"] == sum(map(len, kept))
        for fields in ({"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": -1, "max_tokens": 64}):
            status, answer = await served.post("/v1/completions", asked(**fields))
            assert (status, answer["error"]["param"]) == (400, "truncate_prompt_tokens")


async def test_a_prompt_of_token_ids() -> None:
    """As in LMDeploy, which calls the answer's ids output_ids."""
    async with serving(FakeEngine({"ping": "pong"})) as served:
        asked = {"messages": [], "input_ids": list(b"ping"), "return_token_ids": True, "max_tokens": 4}
        _, answer = await served.post("/v1/chat/completions", asked)
        assert answer["prompt_token_ids"] == list(b"ping")
        choice = answer["choices"][0]
        assert choice["message"]["content"] == "pong"
        assert choice["output_ids"] == choice["token_ids"] == list(b"pong")
        events = [event["choices"][0] for event in await events_of(served, asked)]
        for name in ("output_ids", "token_ids"):
            assert [token for each in events for token in each.get(name, ())] == list(b"pong")
        tool = {"type": "function", "function": {"name": "weather"}}
        for fields, param in (
            ({"messages": PING}, "input_ids"),
            ({"input_ids": []}, "input_ids"),
            ({"input_ids": [-1]}, "input_ids"),
            ({"input_ids": ["a"]}, "input_ids"),
            ({"tools": [tool]}, "tools"),
        ):
            status, answer = await served.post("/v1/chat/completions", {**asked, **fields})
            assert (status, answer["error"]["param"]) == (400, param)


async def test_an_answer_has_no_tokens_but_those_that_are_allowed() -> None:
    asked = {"max_tokens": 6, "return_token_ids": True, "ignore_eos": True}
    async with serving(FakeEngine({"ping": "pong"})) as served:
        for path, prompt in (("/v1/completions", {"prompt": "ping"}), ("/v1/chat/completions", {"messages": PING})):
            _, answer = await served.post(path, {**prompt, **asked, "allowed_token_ids": [111, 98]})
            assert set(answer["choices"][0]["token_ids"]) == {98, 111}
            assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 6)
            for refused in ([], [98, 99999], [-1], ["a"], [1] * 16385):
                status, answer = await served.post(path, {**prompt, **asked, "allowed_token_ids": refused})
                assert status == 400
                assert answer["error"]["param"] == "allowed_token_ids"
