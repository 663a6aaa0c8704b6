"""The Messages API as Anthropic's own client sees it, whole and streamed, over HTTP."""

from __future__ import annotations

import inspect
import json
import typing
from typing import Any

import pytest

from asyncllm import AsyncEngine, ChatTemplateConfig, EngineConfig
from asyncllm.server.anthropic.blocks import messages_of
from asyncllm.server.anthropic.requests import CountTokensRequest, MessagesRequest
from asyncllm.server.http.errors import ApiError
from asyncllm.server.request.unsupported import UNSUPPORTED
from asyncllm.testing import FakeEngine
from tests.server.serving import Served, serving

anthropic = pytest.importorskip("anthropic", reason="the test extra has it")

pytestmark = pytest.mark.anyio

WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
THINKS = EngineConfig(reasoning_parser="qwen3")
ANSWER = f"<think>Hm.</think>\nLet me see.\n{CALL}\n{CALL}"
HI: Any = [{"role": "user", "content": "Hi"}]


def client_of(served: Served, **options: Any) -> Any:
    return anthropic.AsyncAnthropic(**{"base_url": served.url, "api_key": "none", "max_retries": 0, **options})


async def events_of(served: Served, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, as they are on the wire."""
    asked = {"messages": HI, "max_tokens": 300, "stream": True, **body}
    async with served.http.post(f"{served.url}/v1/messages", json=asked) as response:
        assert response.status == 200
        blocks = (await response.text()).split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, _, data = block.partition("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def test_events_come_in_the_order_that_clients_rely_on() -> None:
    async with serving(FakeEngine(ANSWER, THINKS)) as served:
        events = await events_of(served, tools=[WEATHER])
        _, counted = await served.post("/v1/messages/count_tokens", {"messages": HI, "tools": [WEATHER]})
    assert events[0]["message"]["usage"]["input_tokens"] == counted["input_tokens"] > 0
    kinds: list[str] = []
    is_open = False
    for event in events[1:-2]:
        assert event["index"] == len(kinds) - (event["type"] != "content_block_start")
        match event["type"]:
            case "content_block_start":
                assert not is_open
                kinds.append(event["content_block"]["type"])
                is_open = True
            case "content_block_delta":
                assert is_open
                last = event["delta"]["type"]
            case "content_block_stop":
                assert is_open
                assert kinds[-1] != "thinking" or last == "signature_delta"
                is_open = False
    assert not is_open
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] > 0
    assert events[-1] == {"type": "message_stop"}


async def test_the_client_sees_the_same_whole_and_streamed() -> None:
    async with serving(FakeEngine(ANSWER, THINKS)) as served, client_of(served) as client:
        asked: Any = {"model": "fake", "messages": HI, "tools": [WEATHER], "max_tokens": 300, "system": "Be brief."}
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
        counted = await client.messages.count_tokens(model="fake", messages=HI, tools=[WEATHER], system="Be brief.")
    for message in (whole, streamed):
        thinking, text, call, second = message.content
        assert (thinking.type, text.type, call.type, second.type) == ("thinking", "text", "tool_use", "tool_use")
        assert thinking.thinking == "Hm."
        assert text.text == "Let me see."
        assert (call.name, call.input) == ("weather", {"city": "Bern"})
        assert call.id != second.id
        assert message.stop_reason == "tool_use"
        assert message.usage.input_tokens == counted.input_tokens


async def test_an_agent_goes_round_with_the_blocks_as_they_came() -> None:
    async with (
        serving(FakeEngine({"Hi": ANSWER, "So?": "It is sunny."}, THINKS)) as served,
        client_of(served) as client,
    ):
        asked: Any = {"model": "fake", "tools": [WEATHER], "max_tokens": 300}
        first = await client.messages.create(messages=HI, **asked)
        calls: Any = [block for block in first.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": calls[0].id, "content": "sunny"},
            {
                "type": "tool_result",
                "tool_use_id": calls[1].id,
                "content": [{"type": "text", "text": "?"}],
                "is_error": True,
            },
            {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}},
        ]
        said: Any = [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        second = await client.messages.create(messages=said, **asked)
    assert (second.content[0].text, second.stop_reason) == ("It is sunny.", "end_turn")


async def test_text_and_calls_keep_their_order() -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [WEATHER], "max_tokens": 500}
    async with serving(FakeEngine(f"One. {CALL} Two. {CALL}", THINKS)) as served:
        status, found = await served.post("/v1/messages", body)
    assert status == 200, found
    assert [block.get("text", block.get("name")) for block in found["content"]] == [
        "One.",
        "weather",
        "Two.",
        "weather",
    ]


async def test_documents_of_text_are_their_text() -> None:
    inner = {"type": "content", "content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]}
    for source, more, text in (
        ({"type": "text", "media_type": "text/plain", "data": "abc"}, {"title": "T", "context": "C"}, "T\nC\nabc\n"),
        (inner, {"citations": {"enabled": False}, "title": None}, "abc\n"),
    ):
        document = {"type": "document", "source": source, **more}
        (message,) = messages_of(None, [{"role": "user", "content": [document, {"type": "text", "text": "?"}]}])
        assert message["content"] == text + "?"
    for refused in (
        {"source": {"type": "base64", "media_type": "application/pdf", "data": "AA"}},
        {"source": {"type": "text", "data": "a"}, "citations": {"enabled": True}},
        {"source": {"type": "text", "data": "a"}, "citations": "all"},
        {},
    ):
        with pytest.raises(ApiError, match="document"):
            messages_of(None, [{"role": "user", "content": [{"type": "document", **refused}]}])


async def test_answers_end_as_they_say() -> None:
    async with serving(FakeEngine("One, two, STOP")) as served, client_of(served) as client:
        asked: Any = {"model": "fake", "messages": HI}
        cut = await client.messages.create(max_tokens=4, **asked)
        assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 4)
        stopped = await client.messages.create(max_tokens=99, stop_sequences=["STOP"], **asked)
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")
        off = await client.messages.create(max_tokens=99, thinking={"type": "disabled"}, **asked)
        assert off.stop_reason == "end_turn"


async def test_the_bundled_model_calls_the_tool_that_it_has_to() -> None:
    template = (
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    schema = {
        "type": "object",
        "properties": {"days": {"enum": [1, 2]}},
        "required": ["days"],
        "additionalProperties": False,
    }
    config = EngineConfig(num_gpu_blocks=32, session_len=512, tool_call_parser="hermes")
    engine = AsyncEngine("tiny-chat", config, chat_template_config=ChatTemplateConfig(chat_template=template))
    async with serving(engine) as served, client_of(served) as client:
        message = await client.messages.create(
            model="tiny-chat",
            messages=HI,
            max_tokens=200,
            tools=[{"name": "trip", "input_schema": schema, "strict": True}],
            tool_choice={"type": "tool", "name": "trip", "disable_parallel_tool_use": True},
        )
    (block,) = message.content
    assert block.type == "tool_use"
    assert block.input in ({"days": 1}, {"days": 2})


REFUSED: list[tuple[Any, str]] = [
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking_budget"),
    ({"output_config": {"effort": "high"}}, "degrees of reasoning"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search"),
    ({"tool_choice": {"type": "any"}}, "no tools"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
    ({"messages": [{"role": "wizard", "content": "Hi"}]}, "wizard"),
    ({"messages": [{"role": "user", "content": 3}]}, "no content"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]}, "tool_use"),
    ({"container": "c"}, "container"),
    ({"max_tokens": None}, "max_tokens"),
]


async def test_what_cannot_be_done_is_refused_in_anthropics_own_form() -> None:
    async with serving(FakeEngine("Hi"), api_keys=["secret"]) as served:
        key = {"headers": {"x-api-key": "secret", "anthropic-version": "2023-06-01"}}
        for body, words in REFUSED:
            status, found = await served.post("/v1/messages", {"messages": HI, "max_tokens": 9, **body}, **key)
            assert (status, found["type"], found["error"]["type"]) == (400, "error", "invalid_request_error"), body
            assert words in found["error"]["message"]
        status, found = await served.post("/v1/messages?beta=true", {"messages": HI, "max_tokens": 9}, **key)
        assert (status, found["content"]) == (200, [{"type": "text", "text": "Hi"}])
        async with client_of(served, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await client.messages.create(model="fake", messages=HI, max_tokens=9)
            body: Any = caught.value.body
            assert body["error"]["type"] == "authentication_error"


def test_images_are_parts_of_a_message() -> None:
    blocks = [
        {"type": "tool_result", "tool_use_id": "a", "content": "1"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
        {"type": "image", "source": {"type": "url", "url": "https://a/b"}},
        {"type": "text", "text": "See"},
    ]
    result, message = messages_of(None, [{"role": "user", "content": blocks}])
    assert result == {"role": "tool", "tool_call_id": "a", "content": "1"}
    urls = ["data:image/png;base64,AAAA", "https://a/b"]
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    assert message == {"role": "user", "content": [*images, {"type": "text", "text": "See"}]}
    shown = [{"type": "text", "text": "Seen"}, blocks[1]]
    (result,) = messages_of(
        None, [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": shown}]}]
    )
    assert result == {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "Seen"}, images[0]]}


async def test_what_claude_code_sends_beside_its_prompt_changes_nothing() -> None:
    system: Any = [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=abc;"}]
    keep_all = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    async with serving(FakeEngine("Hi")) as served, client_of(served) as client:
        asked: Any = {"model": "fake", "messages": HI, "max_tokens": 9}
        plain = await client.messages.create(**asked)
        found = await client.messages.create(**asked, system=system, extra_body={"context_management": keep_all})
    assert messages_of(system, HI) == messages_of(None, HI)
    assert messages_of([*system, {"type": "text", "text": "Be brief."}], [])[0]["content"] == "Be brief."
    assert found.usage == plain.usage


async def test_a_failure_in_mid_stream_is_an_error_event() -> None:
    async with serving(FakeEngine("Hi there", fail_at=4)) as served, client_of(served) as client:
        with pytest.raises(anthropic.APIStatusError):
            async with client.messages.stream(model="fake", messages=HI, max_tokens=99) as stream:
                await stream.until_done()


@pytest.mark.parametrize(
    ("name", "kind"),
    [("message_create_params", MessagesRequest), ("message_count_tokens_params", CountTokensRequest)],
)
def test_no_field_of_anthropic_lacks_a_policy(name: str, kind: Any) -> None:
    fields: set[str] = set()
    for module in (getattr(anthropic.types, name), getattr(anthropic.types.beta, name)):
        kinds = [each for title, each in vars(module).items() if inspect.isclass(each) and title.startswith("Message")]
        fields |= {field for each in kinds for field in typing.get_type_hints(each)}
    assert len(fields) > 9
    assert sorted(fields - set(kind.__struct_fields__) - set(UNSUPPORTED)) == []


async def test_its_tool_runner_goes_on_without_a_thread() -> None:
    """It asks the server to keep the conversation, and reads from the error that this one does not."""
    async with serving(FakeEngine("Hi there")) as served, client_of(served) as client:
        runner = client.beta.messages.tool_runner(model="fake", messages=HI, max_tokens=99, tools=[])
        message = await runner.until_done()
        assert message.content[0].text == "Hi there"
        kept = {"model": "fake", "messages": HI, "max_tokens": 9, "thread": {"type": "create"}}
        status, answer = await served.post("/v1/messages", kept)
        assert status == 400
        assert answer["error"]["details"]["error_code"] == "thread_unsupported_request"


async def test_models_are_listed_in_its_form() -> None:
    async with serving(FakeEngine()) as served:
        client = anthropic.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0)
        async with client:
            listed = [model async for model in client.models.list()]
            (model,) = listed
            assert (model.id, model.type, model.display_name) == ("fake", "model", "fake")
            assert abs(model.created_at.timestamp() - served.service.created) < 1
            assert model.max_input_tokens == served.engine.session_len
            assert await client.models.retrieve("fake") == model
            with pytest.raises(anthropic.NotFoundError):
                await client.models.retrieve("other")
        _, plain = await served.get("/v1/models")
        assert plain["object"] == "list"
        status, own = await served.get("/anthropic/v1/models")
        assert status == 200
        assert (own["first_id"], own["last_id"], own["has_more"]) == ("fake", "fake", False)
        assert [(each["id"], each["type"]) for each in own["data"]] == [("fake", "model")]


async def test_answers_and_errors_of_every_route_have_the_clients_form() -> None:
    """It reads a request's id from a header of its own, and finds the models on OpenAI's route."""
    async with serving(FakeEngine("Yes")) as served, client_of(served) as client:
        answer = await client.messages.create(model="fake", max_tokens=5, messages=HI)
        assert answer._request_id
        for call in (client.models.retrieve("other"), client.messages.batches.list()):
            with pytest.raises(anthropic.NotFoundError) as caught:
                await call
            assert caught.value.body["type"] == "error"
            assert caught.value.body["error"]["type"] == "not_found_error"
            assert caught.value.request_id
        async with served.http.get(f"{served.url}/v1/models") as response:
            assert "request-id" not in response.headers


@pytest.mark.one_loop
async def test_the_form_of_the_answer_has_an_older_name() -> None:
    schema = {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]}
    form = {"type": "json_schema", "schema": schema}
    async with serving(AsyncEngine("tiny-chat", EngineConfig(device_type="cpu", num_gpu_blocks=50))) as served:
        body = {"messages": HI, "max_tokens": 40, "temperature": 0}
        answers = []
        for asked in ({"output_format": form}, {"output_config": {"format": form}}):
            status, answer = await served.post("/v1/messages", {**body, **asked})
            assert status == 200, answer
            answers.append(answer["content"][0]["text"])
        assert answers[0] == answers[1]
        assert isinstance(json.loads(answers[0])["days"], int)
        assert (await served.post("/v1/messages/count_tokens", {"messages": HI, "output_format": form}))[0] == 200
        both = {**body, "output_format": form, "output_config": {"format": form}}
        status, answer = await served.post("/v1/messages", both)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        broken = {**body, "output_format": {"type": "json_schema"}}
        _, answer = await served.post("/v1/messages", broken)
        assert answer["error"]["message"].startswith("output_format has no schema")
