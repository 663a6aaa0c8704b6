"""POST /v1/chat/interactive: conversations that the server keeps, per key, and how it forgets them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from asyncllm.testing import FakeEngine
from tests.engine.waits import until
from tests.server.serving import Served, serving

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/interactive"
ANSWERS = {"one": "first", "two": "second", "three": "third"}
KEYS = {"api_keys": ["first-key", "second-key"]}


def by(key: str) -> dict[str, Any]:
    return {"headers": {"Authorization": f"Bearer {key}"}}


async def say(served: Served, prompt: Any, key: str = "", **fields: Any) -> tuple[int, Any]:
    """A turn of session 7."""
    body = {"session_id": 7, "interactive_mode": True, "prompt": prompt, **fields}
    return await served.post(PATH, body, **(by(key) if key else {}))


async def test_turns_go_on_until_the_client_ends_the_session() -> None:
    async with serving(FakeEngine(ANSWERS)) as served:
        status, first = await say(served, "one")
        assert status == 200
        assert first == {
            "text": "first",
            "tokens": 6,
            "input_tokens": first["input_tokens"],
            "history_tokens": 0,
            "finish_reason": "stop",
        }
        _, second = await say(served, [{"role": "user", "content": "two"}])
        assert second["text"] == "second"
        assert second["history_tokens"] == first["input_tokens"] + first["tokens"]
        _, last = await say(served, "three", interactive_mode=False)
        assert last["text"] == "third"
        assert last["history_tokens"] == second["history_tokens"] + second["input_tokens"] + second["tokens"]
        assert (len(served.service.sessions), served.engine.stats().sessions) == (0, 0)
        assert (await say(served, "one"))[1]["history_tokens"] == 0


async def test_an_empty_prompt_ends_a_session_and_an_unknown_one() -> None:
    async with serving(FakeEngine(ANSWERS)) as served:
        _, first = await say(served, "one")
        for history in (first["input_tokens"] + first["tokens"], 0):
            status, answer = await say(served, "", interactive_mode=False)
            assert (status, answer["text"], answer["tokens"]) == (200, "", 0)
            assert (answer["history_tokens"], answer["finish_reason"]) == (history, "stop")
        assert served.engine.stats().sessions == 0
        assert (await say(served, "two"))[1]["history_tokens"] == 0


async def test_without_a_session_nothing_is_kept() -> None:
    async with serving(FakeEngine(ANSWERS)) as served:
        for fields in ({"session_id": -1}, {"session_id": 3}, {}):
            status, answer = await served.post(PATH, {"prompt": "one", **fields})
            assert (status, answer["text"], answer["history_tokens"]) == (200, "first", 0)
        assert served.engine.stats().sessions == 0


async def test_a_stream_is_lines_of_json() -> None:
    async with serving(FakeEngine("x" * 200)) as served:
        body = {"prompt": "one", "session_id": 7, "interactive_mode": True, "stream": True}
        async with served.http.post(served.url + PATH, json=body) as response:
            assert response.headers["Content-Type"] == "application/x-ndjson"
            text = await response.text()
        assert text.endswith("}\n")
        lines = [json.loads(line) for line in text.splitlines()]
        assert len(lines) > 1
        assert "".join(line["text"] for line in lines) == "x" * 200
        assert [line["finish_reason"] for line in lines] == [None] * (len(lines) - 1) + ["stop"]
        assert (lines[-1]["tokens"], lines[-1]["history_tokens"]) == (201, 0)
        _, second = await say(served, "two")
        assert second["history_tokens"] == lines[-1]["input_tokens"] + 201


async def test_step_goes_on_after_an_earlier_turn() -> None:
    async with serving(FakeEngine(ANSWERS)) as served:
        _, first = await say(served, "one")
        await say(served, "two")
        step = first["input_tokens"] + first["tokens"]
        _, again = await say(served, "three", step=step)
        assert (again["history_tokens"], again["text"]) == (step, "third")
        status, answer = await say(served, "three", step=9999)
        assert (status, answer["error"]["param"]) == (400, "step")
        _, ended = await say(served, "", interactive_mode=False)
        assert ended["history_tokens"] == step + again["input_tokens"] + again["tokens"]


async def test_cancel_stops_the_answer_and_keeps_the_conversation() -> None:
    engine = FakeEngine({"one": "x" * 3000, "two": "second"}, delay_per_token=0.002)
    async with serving(engine) as served:
        running = asyncio.create_task(say(served, "one"))
        await until(lambda: engine.stats().decode_tokens > 5)
        status, answer = await say(served, "", cancel=True)
        assert (status, answer["finish_reason"]) == (200, "stop")
        status, stopped = await running
        assert (status, stopped["finish_reason"]) == (200, "abort")
        assert 0 < stopped["tokens"] < 3000
        assert answer["history_tokens"] == stopped["input_tokens"] + stopped["tokens"]
        _, second = await say(served, "two")
        assert second["text"] == "second"
        assert second["history_tokens"] > stopped["input_tokens"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate", PATH])
async def test_cancel_stops_labelled_answers_of_the_same_key(path: str) -> None:
    engine = FakeEngine("x" * 3000, delay_per_token=0.002)
    async with serving(engine, **KEYS) as served:
        body: dict[str, Any] = {"session_id": 7}
        body |= {"messages": "one"} if path == "/v1/chat/completions" else {"prompt": "one"}
        body |= {} if path == PATH else {"max_tokens": 3000}
        running = asyncio.create_task(served.post(path, body, **by("first-key")))
        await until(lambda: engine.stats().decode_tokens > 5)
        assert (await say(served, "", "second-key", cancel=True))[0] == 200
        assert engine.stats().running == 1
        assert (await say(served, "", "first-key", cancel=True))[0] == 200
        status, answer = await running
        assert status == 200
        assert "abort" in json.dumps(answer)


async def test_a_session_takes_one_turn_at_a_time() -> None:
    engine = FakeEngine(ANSWERS)
    async with serving(engine) as served:
        engine.executor.pause()
        running = asyncio.create_task(say(served, "one"))
        await until(lambda: engine.stats().requests_started)
        for fields in ({}, {"interactive_mode": False}):
            body = {"session_id": 7, "interactive_mode": True, "prompt": "two", **fields}
            async with served.http.post(served.url + PATH, json=body) as response:
                answer = await response.json()
                assert (response.status, answer["error"]["code"]) == (409, "session_busy")
                assert response.headers["x-should-retry"] == "false"
        engine.executor.resume()
        assert (await running)[1]["text"] == "first"
        assert (await say(served, "two"))[1]["history_tokens"] > 0


async def test_64_requests_for_one_session_end_in_turns_or_409() -> None:
    async with serving(FakeEngine(ANSWERS)) as served:
        answers = await asyncio.gather(*(say(served, "one") for _ in range(64)))
        done = [answer for status, answer in answers if status == 200]
        assert {status for status, _ in answers} <= {200, 409}
        assert len({answer["history_tokens"] for answer in done}) == len(done) >= 1
        assert len(served.service.sessions) == 1


async def test_sessions_of_different_keys_never_meet() -> None:
    async with serving(FakeEngine(ANSWERS), **KEYS) as served:
        _, first = await say(served, "one", "first-key")
        _, other = await say(served, "two", "second-key")
        assert other["history_tokens"] == 0
        _, ended = await say(served, "", "second-key", interactive_mode=False)
        assert ended["history_tokens"] == other["input_tokens"] + other["tokens"]
        _, again = await say(served, "three", "first-key")
        assert again["history_tokens"] == first["input_tokens"] + first["tokens"]
        # Nor does a key reach a session by the number that the engine gives it.
        for number in range(1, 9):
            _, answer = await say(served, "", "second-key", session_id=number, interactive_mode=False)
            assert answer["history_tokens"] == 0
        assert served.engine.stats().sessions == 1


async def test_an_idle_session_expires_and_says_so_once() -> None:
    async with serving(FakeEngine(ANSWERS), session_ttl=0.2) as served:
        await say(served, "one")
        await asyncio.sleep(0.25)
        status, answer = await say(served, "two")
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (410, "session_expired", "session_id")
        assert served.engine.stats().sessions == 0
        status, answer = await say(served, "two")
        assert (status, answer["history_tokens"]) == (200, 0)


async def test_ending_a_session_that_has_expired_is_no_error() -> None:
    async with serving(FakeEngine(ANSWERS), session_ttl=0.05) as served:
        await say(served, "one")
        await asyncio.sleep(0.1)
        await say(served, "one", session_id=8)
        assert served.engine.stats().sessions == 1
        assert (await say(served, "", interactive_mode=False))[0] == 200
        assert (await say(served, "two"))[1]["history_tokens"] == 0


async def test_the_longest_idle_makes_room_for_a_new_one() -> None:
    async with serving(FakeEngine(ANSWERS), max_sessions=3) as served:
        for number in (1, 2, 3, 1, 4):
            assert (await say(served, "one", session_id=number))[0] == 200
        assert served.engine.stats().sessions == len(served.service.sessions) == 3
        assert [(await say(served, "two", session_id=number))[0] for number in (1, 3, 4)] == [200] * 3
        assert (await say(served, "two", session_id=2))[0] == 410


async def test_a_long_turn_counts_as_use_to_its_end() -> None:
    engine = FakeEngine({"one": "x" * 200, "two": "second"})
    async with serving(engine, max_sessions=2) as served:
        engine.executor.pause()
        running = asyncio.create_task(say(served, "one", session_id=1))
        await until(lambda: engine.stats().requests_started)
        also = asyncio.create_task(say(served, "two", session_id=2))
        await until(lambda: engine.stats().requests_started == 2)
        engine.executor.resume()
        await also
        assert not running.done()
        await running
        assert (await say(served, "two", session_id=3))[0] == 200
        assert (await say(served, "two", session_id=1))[0] == 200
        assert (await say(served, "two", session_id=2))[0] == 410


async def test_a_key_with_many_sessions_loses_its_own() -> None:
    async with serving(FakeEngine(ANSWERS), max_sessions=4, **KEYS) as served:
        await say(served, "one", "first-key")
        for number in range(20):
            assert (await say(served, "one", "second-key", session_id=number))[0] == 200
        status, answer = await say(served, "two", "first-key")
        assert status == 200
        assert answer["history_tokens"] > 0


async def test_histories_are_bounded_together() -> None:
    async with serving(FakeEngine(), max_session_tokens=1000) as served:
        for number in range(10):
            assert (await say(served, "x" * 200, session_id=number))[0] == 200
        assert len(served.service.sessions) in (2, 3)


async def test_the_key_with_the_longest_histories_makes_room_for_others() -> None:
    """It is tokens that there are too few of, and the first key has a few short conversations."""
    async with serving(FakeEngine(), max_session_tokens=2000, **KEYS) as served:
        for number in range(4):
            assert (await say(served, "x", "first-key", session_id=number))[0] == 200
        for number in range(6):
            assert (await say(served, "x" * 300, "second-key", session_id=number))[0] == 200
        for number in range(4):
            assert (await say(served, "y", "first-key", session_id=number))[0] == 200


async def test_when_all_sessions_are_busy_a_new_one_is_a_429() -> None:
    engine = FakeEngine(ANSWERS)
    async with serving(engine, max_sessions=1) as served:
        engine.executor.pause()
        running = asyncio.create_task(say(served, "one"))
        await until(lambda: engine.stats().requests_started)
        status, answer = await say(served, "one", session_id=8)
        assert (status, answer["error"]["code"]) == (429, "too_many_sessions")
        engine.executor.resume()
        assert (await running)[0] == 200
        assert (await say(served, "one", session_id=8))[0] == 200


async def test_a_client_that_leaves_frees_its_session() -> None:
    engine = FakeEngine({"one": "x" * 3000, "two": "second"}, delay_per_token=0.002)
    async with serving(engine) as served:
        for interactive in (True, False):
            started = engine.stats().requests_started
            running = asyncio.create_task(say(served, "one", interactive_mode=interactive, stream=True))
            await until(lambda started=started: engine.stats().requests_started > started)
            running.cancel()
            await until(lambda: not engine.stats().running)
            assert (await say(served, "two"))[1]["text"] == "second"


async def test_a_first_turn_that_is_refused_keeps_nothing() -> None:
    async with serving(FakeEngine()) as served:
        for fields in ({"prompt": "x" * 10**5}, {"stop_token_ids": [999]}, {"step": 5}, {"timeout": -1}):
            assert (await say(served, **{"prompt": "one", **fields}))[0] == 400
        assert (len(served.service.sessions), served.engine.stats().sessions) == (0, 0)


async def test_sampling_has_lmdeploys_defaults_and_takes_the_fields() -> None:
    async with serving(FakeEngine("one two three")) as served:
        for fields, text in (
            ({"request_output_len": 3}, "one"),
            ({"stop": " two"}, "one"),
            ({"stop": False}, "one two three"),
            ({"stop": ["three"], "include_stop_str_in_output": True}, "one two three"),
            ({"top_k": 1, "top_p": 0.5, "temperature": 0.1, "repetition_penalty": 1}, "one two three"),
        ):
            _, answer = await served.post(PATH, {"prompt": "x", **fields})
            assert answer["text"] == text, fields


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": "", "session_id": -1, "interactive_mode": False}, "prompt", "invalid_value"),
        ({"session_id": -1}, "session_id", "invalid_value"),
        ({"session_id": -1, "cancel": True, "interactive_mode": False}, "session_id", "invalid_value"),
        ({"session_id": -2}, "session_id", "invalid_value"),
        ({"session_id": 2**40}, "session_id", "invalid_value"),
        ({"cancel": True}, "prompt", "invalid_value"),
        ({"stop": True}, "stop", "invalid_value"),
        ({"image_url": "http://x/y.png"}, "messages", "invalid_image_url"),
        ({"image_url": "data:x", "prompt": [{"role": "user", "content": "a"}]}, "image_url", "invalid_value"),
        ({"request_output_len": 0}, "request_output_len", "invalid_value"),
        ({"max_tokens": 5}, "max_tokens", "unknown_parameter"),
        ({"user_id": "alice"}, "user_id", "invalid_value"),
    ],
    ids=str,
)
async def test_what_cannot_be_served_is_a_400_that_names_the_field(
    fields: dict[str, Any], param: str, code: str
) -> None:
    async with serving(FakeEngine()) as served:
        status, answer = await say(served, **{"prompt": "one", **fields})
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code)
        assert len(served.service.sessions) == 0
