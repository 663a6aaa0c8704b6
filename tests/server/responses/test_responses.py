"""The Responses API as OpenAI's own client sees it, whole and streamed, over HTTP."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from asyncllm import AsyncEngine, EngineConfig
from asyncllm.server.http.errors import ApiError
from asyncllm.server.responses.items import messages_of
from asyncllm.server.responses.store import ResponseStore, StoredResponse
from asyncllm.testing import FakeEngine
from tests.server.serving import Served, serving

pytestmark = pytest.mark.anyio

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
THINKS = EngineConfig(reasoning_parser="qwen3")
ANSWER = f"<think>Hm.</think>\nLet me see.\n{CALL}\n{CALL}"


async def events_of(served: Served, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, as they are on the wire."""
    async with served.http.post(f"{served.url}/v1/responses", json={"input": "Hi", "stream": True, **body}) as response:
        assert response.status == 200
        blocks = (await response.text()).split("\n\n")
    assert blocks.pop() == ""
    events = []
    for number, block in enumerate(blocks):
        name, _, data = block.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


def check_order(events: list[dict[str, Any]]) -> None:
    """Assert that items and parts are opened before they grow and closed before the next, one at a time."""
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["status"] == "in_progress"
    item: dict[str, Any] | None = None
    text, part_open, done = "", False, list[dict[str, Any]]()
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert item is None
            item, text = event["item"], ""
            assert (event["output_index"], item["status"]) == (len(done), "in_progress")
            continue
        assert item is not None
        assert event["output_index"] == len(done)
        if kind == "content_part.added":
            part_open = True
        elif kind.endswith(".delta"):
            assert event["item_id"] == item["id"]
            assert part_open or item["type"] in ("function_call", "custom_tool_call")
            text += event["delta"]
        elif kind == "content_part.done":
            assert event["part"]["text"] == text
            part_open = False
        elif kind == "output_item.done":
            assert not part_open
            assert event["item"]["id"] == item["id"]
            done.append(event["item"])
            item = None
        else:
            assert text in (event.get(name) for name in ("text", "arguments", "input"))
    assert item is None
    assert events[-1]["response"]["output"] == done
    assert events[-1]["response"]["id"] == events[0]["response"]["id"]


async def test_events_come_in_the_order_that_clients_rely_on() -> None:
    async with serving(FakeEngine(ANSWER, THINKS)) as served:
        events = await events_of(served, tools=[WEATHER])
        cut = await events_of(served, max_output_tokens=30)
    check_order(events)
    assert events[-1]["type"] == "response.completed"
    kinds = [item["type"] for item in events[-1]["response"]["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    usage = events[-1]["response"]["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens_details"]["reasoning_tokens"] > 0
    check_order(cut)
    assert (cut[-1]["type"], cut[-1]["response"]["incomplete_details"]) == (
        "response.incomplete",
        {"reason": "max_output_tokens"},
    )
    assert cut[-1]["response"]["output"][-1]["status"] == "incomplete"


async def test_the_client_sees_the_same_whole_and_streamed() -> None:
    async with serving(FakeEngine(ANSWER, THINKS)) as served, served.openai() as client:
        asked: Any = {"model": "fake", "input": "Hi", "tools": [WEATHER], "instructions": "Be brief."}
        whole = await client.responses.create(**asked, metadata={"a": "b"})
        async with client.responses.stream(**asked) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_response()
    for response in (whole, streamed):
        reasoning, message, call, second = response.output
        assert response.status == "completed"
        assert response.output_text == "Let me see."
        assert reasoning.type == "reasoning"
        assert reasoning.content is not None
        assert reasoning.content[0].text == "Hm."
        assert message.type == "message"
        assert call.type == second.type == "function_call"
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Bern"})
        assert call.call_id != second.call_id
        assert response.usage is not None
        assert response.usage.output_tokens > 0
    assert whole.metadata == {"a": "b"}
    assert kinds[-1] == "response.completed"


async def test_an_agent_goes_round_with_the_items_as_they_came_and_by_id() -> None:
    answers = {"So?": "It is sunny.", "Hi": CALL}
    async with serving(FakeEngine(answers)) as served, served.openai() as client:
        asked: Any = {"model": "fake", "tools": [WEATHER]}
        first = await client.responses.create(input="Hi", **asked)
        output: Any = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "sunny"}  # type: ignore[union-attr]
        new: Any = [output, {"role": "user", "content": "So?"}]
        said: Any = [{"role": "user", "content": "Hi"}, *(item.to_dict() for item in first.output), *new]
        by_items = await client.responses.create(input=said, **asked)
        by_id = await client.responses.create(input=new, previous_response_id=first.id, **asked)
        assert by_items.output_text == by_id.output_text == "It is sunny."
        assert by_items.usage is not None
        assert by_id.usage is not None
        assert by_items.usage.input_tokens == by_id.usage.input_tokens
        again = await client.responses.retrieve(by_id.id)
        assert again.to_dict() == by_id.to_dict()
        items = await client.responses.input_items.list(by_id.id)
        assert [item.type for item in items.data] == ["message", "function_call_output"]
        await client.responses.delete(first.id)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(input="Hi", previous_response_id=first.id, **asked)
        assert caught.value.code == "previous_response_not_found"
        unkept = await client.responses.create(input="Hi", store=False, **asked)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(unkept.id)


async def test_another_key_has_other_responses() -> None:
    async with (
        serving(FakeEngine("Yes."), api_keys=["one", "two"]) as served,
        served.openai(api_key="one") as one,
        served.openai(api_key="two") as two,
    ):
        response = await one.responses.create(model="fake", input="Hi")
        with pytest.raises(openai.NotFoundError):
            await two.responses.retrieve(response.id)
        with pytest.raises(openai.BadRequestError):
            await two.responses.create(model="fake", input="Hi", previous_response_id=response.id)


class Sum(BaseModel):
    sum: int


async def test_the_bundled_model_answers_in_the_form_that_is_parsed() -> None:
    engine = AsyncEngine("tiny-chat", EngineConfig(num_gpu_blocks=32, session_len=512))
    async with serving(engine) as served, served.openai() as client:
        parsed = await client.responses.parse(model="tiny-chat", input="What is 17 + 25?", text_format=Sum)
        assert isinstance(parsed.output_parsed, Sum)


async def test_tokens_of_a_message_have_their_log_probabilities() -> None:
    engine = AsyncEngine("tiny-chat", EngineConfig(num_gpu_blocks=32, session_len=512))
    asked: Any = {"model": "tiny-chat", "input": "What is 17 + 25?", "temperature": 0, "top_logprobs": 2}
    asked["include"] = ["message.output_text.logprobs"]
    async with serving(engine) as served, served.openai() as client:
        whole = await client.responses.create(**asked)
        (part,) = whole.output[0].content
        assert len(part.logprobs) == whole.usage.output_tokens
        assert "".join(entry.token for entry in part.logprobs).startswith(part.text)
        assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in part.logprobs)
        streamed = []
        async with client.responses.stream(**asked) as stream:
            async for event in stream:
                if event.type == "response.output_text.delta":
                    streamed += [entry.token for entry in event.logprobs]
            final = await stream.get_final_response()
        assert streamed == [entry.token for entry in part.logprobs]
        assert final.output[0].content[0].logprobs == part.logprobs


async def test_text_and_calls_keep_their_order_whole_and_streamed() -> None:
    asked: Any = {"input": "Hi", "tools": [WEATHER]}
    async with serving(FakeEngine(f"One. {CALL} Two. {CALL} Three.", THINKS)) as served:
        _, whole = await served.post("/v1/responses", asked)
        events = await events_of(served, **asked)
    check_order(events)
    for response in (whole, events[-1]["response"]):
        said = [item["content"][0]["text"] if "content" in item else item["arguments"] for item in response["output"]]
        assert said == ["One.", '{"city": "Bern"}', "Two.", '{"city": "Bern"}', "Three."]


async def test_reasoning_has_none() -> None:
    body = {"input": "Hi", "include": ["message.output_text.logprobs"]}
    async with serving(FakeEngine("<think>Hm.</think>Yes", EngineConfig(reasoning_parser="qwen3"))) as served:
        status, found = await served.post("/v1/responses", body)
        assert status == 200, found
        thoughts, message = found["output"]
        assert "logprobs" not in thoughts["content"][0]
        tokens = "".join(entry["token"] for entry in message["content"][0]["logprobs"])
        assert tokens.removesuffix("<eos>") == "Yes"


async def test_input_items_are_listed_page_by_page() -> None:
    """Each message with its text in parts, as clients read it."""
    roles = ("user", "assistant", "user", "assistant", "user")
    said = [{"role": role, "content": f"text {number}"} for number, role in enumerate(roles)]
    async with serving(FakeEngine("Yes")) as served, served.openai() as client:
        response = await client.responses.create(model="fake", input=said)
        listed = client.responses.input_items.list

        def texts(items: Any) -> list[str]:
            return [item.content[0].text for item in items]

        page = await listed(response.id)
        assert texts(page.data) == [f"text {number}" for number in (4, 3, 2, 1, 0)]
        assert [item.content[0].type for item in page.data[:2]] == ["input_text", "output_text"]
        assert texts((await listed(response.id, order="asc")).data) == [f"text {number}" for number in range(5)]
        page = await listed(response.id, limit=2, after=page.data[0].id)
        assert (texts(page.data), page.has_more) == (["text 3", "text 2"], True)
        assert texts([item async for item in listed(response.id, limit=2)]) == [f"text {n}" for n in (4, 3, 2, 1, 0)]
        bad: tuple[tuple[dict[str, Any], str], ...] = (
            ({"limit": 0}, "limit"),
            ({"limit": 101}, "limit"),
            ({"order": "up"}, "order"),
            ({"after": "msg_0"}, "after"),
        )
        for options, param in bad:
            with pytest.raises(openai.BadRequestError) as caught:
                await listed(response.id, **options)
            assert caught.value.param == param


async def test_items_of_kept_responses_may_be_referred_to() -> None:
    async with serving(FakeEngine({"Hi": "Hello", "So?": "Well."})) as served:
        _, first = await served.post("/v1/responses", {"input": "Hi"})
        _, listed = await served.get(f"/v1/responses/{first['id']}/input_items")
        references = [{"type": "item_reference", "id": each["id"]} for each in (*listed["data"], *first["output"])]
        asked = {"input": [*references, {"role": "user", "content": "So?"}]}
        status, second = await served.post("/v1/responses", asked)
        assert (status, second["output"][0]["content"][0]["text"]) == (200, "Well.")
        spelled = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
        _, other = await served.post("/v1/responses", {"input": [*spelled, asked["input"][-1]]})
        assert second["usage"]["input_tokens"] == other["usage"]["input_tokens"]
        async with served.http.delete(f"{served.url}/v1/responses/{first['id']}") as response:
            assert response.status == 200
        # The second response has them still.
        assert (await served.post("/v1/responses", asked))[0] == 200
        unknown = {"input": [{"type": "item_reference", "id": "msg_1"}]}
        status, found = await served.post("/v1/responses", unknown)
        assert (status, found["error"]["param"]) == (404, "input")


REFUSED: list[tuple[Any, str]] = [
    ({"background": True, "store": False}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"truncation": "auto"}, "truncation"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"include": ["message.output_text.logprobs"], "tools": [WEATHER]}, "include"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"reasoning": {"effort": "high"}}, "reasoning"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "messages"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]}, "input"),
    ({"input": [{"role": "wizard", "content": "Hi"}]}, "input"),
    ({"input": [{"type": "function_call", "arguments": "{}"}]}, "input"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
    ({"input": [{"role": "user", "content": 3}]}, "input"),
    ({"input": []}, "input"),
    ({"text": {"format": {"type": "xml"}}}, "response_format"),
    ({"tool_choice": "required"}, "tool_choice"),
]


async def test_what_cannot_be_done_is_refused_by_name() -> None:
    async with serving(FakeEngine("Hi")) as served:
        for body, param in REFUSED:
            status, found = await served.post("/v1/responses", {"input": "Hi", **body})
            assert (status, found["error"]["param"]) == (400, param), (body, found)
        ignored = {"include": ["reasoning.encrypted_content"], "text": {"verbosity": "low"}, "user": "me"}
        status, _ = await served.post("/v1/responses", {"input": "Hi", **ignored, "prompt_cache_key": "k"})
        assert status == 200


async def test_a_failure_in_mid_stream_is_an_event() -> None:
    async with serving(FakeEngine("Hi there", fail_at=4)) as served:
        events = await events_of(served)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["message"]


def test_reasoning_alone_is_a_message_without_text() -> None:
    thought: Any = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    question: Any = {"role": "user", "content": "Hi"}
    alone = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    assert messages_of([question, thought, question]) == [question, alone, question]
    assert messages_of([question, thought])[1] == alone


async def test_penalties_and_further_forms_of_answers_are_those_of_chats() -> None:
    async with serving(AsyncEngine("tiny-chat", EngineConfig(num_gpu_blocks=16))) as served, served.openai() as client:

        async def answer(**fields: Any) -> str:
            response = await client.responses.create(
                model="tiny-chat", input="What is 17 + 25?", temperature=0, max_output_tokens=12, extra_body=fields
            )
            return response.output_text

        chosen = await answer(structured_outputs={"choice": ["red", "blue"]})
        plain, biased = await answer(), await answer(logit_bias={"48": -100})
        await answer(presence_penalty=0.5, frequency_penalty=0.5)
        both = {"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}}
        with pytest.raises(openai.BadRequestError, match="at once"):
            await answer(**both)
    assert chosen in ("red", "blue")
    assert plain.startswith("17")
    assert not biased.startswith("1")


def test_images_are_parts_of_a_message() -> None:
    content = [{"type": "input_text", "text": "See"}, {"type": "input_image", "image_url": "data:x", "detail": "low"}]
    (message,) = messages_of([{"role": "user", "content": content}])
    image = {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}}
    assert message["content"] == [{"type": "text", "text": "See"}, image]
    (output,) = messages_of([{"type": "function_call_output", "call_id": "a", "output": content}])
    assert output == {"role": "tool", "tool_call_id": "a", "content": message["content"]}


async def test_old_responses_make_room() -> None:
    kept = ResponseStore(1000.0)
    for number in range(3):
        kept.put(0, StoredResponse({"id": str(number)}, [], [], 100 * 2**20))
    assert len(kept) == 2
    with pytest.raises(ApiError, match="no response"):
        kept.get(0, "0")
    short = ResponseStore(0.0)
    short.put(0, StoredResponse({"id": "a"}, [], [], 1))
    assert len(short) == 0


async def test_tokens_of_a_prompt_are_counted_as_the_response_would_say() -> None:
    async with (
        serving(FakeEngine(backend_config=THINKS)) as served,
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):
        first = await client.responses.create(model="fake", input="Hi")
        asked: dict[str, Any] = {"input": "And now?", "instructions": "Be brief.", "tools": [WEATHER]}
        asked |= {"model": "fake", "previous_response_id": first.id}
        counted = await client.responses.input_tokens.count(**asked)
        answered = await client.responses.create(**asked)
        assert answered.usage is not None
        assert (counted.object, counted.input_tokens) == ("response.input_tokens", answered.usage.input_tokens)
        with pytest.raises(openai.BadRequestError, match="no response"):
            await client.responses.input_tokens.count(model="fake", input="x", previous_response_id="resp_other")
        with pytest.raises(openai.NotFoundError, match="not made shorter"):
            await client.responses.compact(model="fake", input="x")


@pytest.mark.parametrize(
    ("path", "word"), [("files", "asyncllm batch"), ("batches/b_1", "asyncllm batch"), ("x", "GET /")]
)
async def test_routes_that_are_not_there_say_what_to_do(path: str, word: str) -> None:
    async with serving(FakeEngine()) as served:
        for status, answer in (await served.get(f"/v1/{path}"), await served.post(f"/v1/{path}", {})):
            assert status == 404
            assert word in answer["error"]["message"]
        status, answer = await served.get("/v1/chat/completions")
        assert (status, answer["error"]["code"]) == (405, "method_not_allowed")


async def test_what_codex_sends_is_taken_where_its_own_tools_are_left_out() -> None:
    shell = {"type": "function", "name": "shell", "strict": False, "parameters": {"type": "object", "properties": {}}}
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    patch = {"type": "custom", "name": "patch", "format": grammar}
    asked = {
        "model": "fake",
        "instructions": "You are a coder.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Ask first."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        ],
        "tools": [shell, {"type": "web_search", "external_web_access": True}, patch],
        **{"tool_choice": "auto", "parallel_tool_calls": False, "reasoning": None, "store": False, "stream": False},
        **{"include": ["reasoning.encrypted_content"], "service_tier": None, "prompt_cache_key": "a"},
        **{"text": {"verbosity": "medium"}, "client_metadata": {"session": "a"}},
    }
    async with (
        serving(FakeEngine(), unknown_fields="ignore") as served,
        served.http.post(f"{served.url}/v1/responses", json=asked) as response,
    ):
        answer = await response.json()
        assert (response.status, answer["status"]) == (200, "completed")
        assert response.headers["X-Ignored-Fields"] == "tools.web_search, tools.custom"
        assert [tool["name"] for tool in answer["tools"]] == ["shell"]
    async with serving(FakeEngine()) as served:
        status, answer = await served.post("/v1/responses", asked)
        assert status == 400
        assert "'web_search'" in answer["error"]["message"]
