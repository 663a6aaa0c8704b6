"""Every field that OpenAI's own package can send has a policy, and every policy holds."""

from __future__ import annotations

import json
import re
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import input_token_count_params, response_create_params

from asyncllm.config.unsupported import Unsupported
from asyncllm.server.openai.requests import ChatRequest, CompletionRequest, EmbeddingRequest, OpenAIFields
from asyncllm.server.request.unsupported import UNSUPPORTED
from asyncllm.server.responses.requests import InputTokensRequest, ResponsesRequest
from asyncllm.testing import FakeEngine
from tests.server.serving import Served, serving

pytestmark = pytest.mark.anyio

PATHS: dict[type[OpenAIFields], tuple[str, dict[str, Any]]] = {
    ChatRequest: ("/v1/chat/completions", {"messages": "ping"}),
    CompletionRequest: ("/v1/completions", {"prompt": "ping"}),
}
"""Where a Struct is sent, and a request that is served."""

VALUES: list[Any] = [None, True, False, 0, -1.5, 2**53, "", "text", [], [[None]], {}, {"a": {"b": [1]}}]
"""Of every kind that JSON has."""


def fields_of(module: Any) -> set[str]:
    """Every field of the module's request types, streamed and not."""
    kinds = [
        kind
        for name, kind in vars(module).items()
        if name.endswith(("CreateParamsBase", "CreateParams", "CountParams"))
    ]
    kinds += [each for name, kind in vars(module).items() for each in typing.get_args(kind) if "CreateParams" in name]
    return {field for kind in kinds for field in getattr(kind, "__annotations__", ())}


def looked_up(kind: type[msgspec.Struct], *, taken: bool) -> list[str]:
    """The names that the route of the Struct does not implement: those taken with any value, or the others."""
    return sorted(
        name
        for name, unsupported in UNSUPPORTED.items()
        if name not in kind.__struct_fields__ and (unsupported.values is None) == taken
    )


@pytest.mark.parametrize(
    ("module", "kind", "at_least"),
    [
        (chat_create_params, ChatRequest, 35),
        (completion_create_params, CompletionRequest, 18),
        (embedding_create_params, EmbeddingRequest, 5),
        (response_create_params, ResponsesRequest, 30),
        (input_token_count_params, InputTokensRequest, 10),
    ],
    ids=["chat", "completions", "embeddings", "responses", "input tokens"],
)
def test_no_field_of_openai_lacks_a_policy(module: Any, kind: type[msgspec.Struct], at_least: int) -> None:
    fields = fields_of(module)
    assert len(fields) >= at_least
    assert sorted(fields - set(kind.__struct_fields__) - set(UNSUPPORTED)) == []


def test_the_routes_that_a_refusal_names_take_the_field() -> None:
    kinds = {path: kind for kind, (path, _) in PATHS.items()}
    for name, unsupported in UNSUPPORTED.items():
        for path in re.findall(r"/v1/[a-z/]*[a-z]", unsupported.why.partition(", or use ")[2]):
            assert name in kinds[path].__struct_fields__, (name, path)


def test_every_field_of_a_body_is_implemented() -> None:
    for kind in PATHS:
        assert [field.name for field in msgspec.structs.fields(kind) if field.type is Any] == []


@pytest.mark.parametrize("kind", PATHS)
async def test_an_ignored_field_takes_any_value_and_changes_nothing(kind: type[OpenAIFields]) -> None:
    path, body = PATHS[kind]
    async with serving(FakeEngine({"ping": "pong"})) as served:
        plain = await answer_to(served, path, body)
        for value in VALUES:
            everything = dict.fromkeys(looked_up(kind, taken=True), value)
            assert len(everything) > 10
            assert await answer_to(served, path, {**body, **everything}) == plain, value


@pytest.mark.parametrize("kind", PATHS)
async def test_neutral_values_are_taken_and_change_nothing(kind: type[OpenAIFields]) -> None:
    path, body = PATHS[kind]
    async with serving(FakeEngine({"ping": "pong"})) as served:
        plain = await answer_to(served, path, body)
        names = looked_up(kind, taken=False)
        assert len(names) > 80
        assert await answer_to(served, path, body | dict.fromkeys(names)) == plain
        for turn in range(3):
            values = {name: UNSUPPORTED[name].values or (None,) for name in names}
            sent = {name: each[turn % len(each)] for name, each in values.items()}
            assert await answer_to(served, path, body | sent) == plain
            assert (
                await answer_to(served, path, body | {name: mistyped(value) for name, value in sent.items()}) == plain
            )


def mistyped(value: Any) -> Any:
    """The value as a client sends it that takes all for text, or all numbers for floats."""
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return str(value) if value else float(value)
    return value


@pytest.mark.parametrize("kind", PATHS)
async def test_a_value_that_asks_for_something_is_refused_by_name(kind: type[OpenAIFields]) -> None:
    path, body = PATHS[kind]
    async with serving(FakeEngine({"ping": "pong"})) as served:
        for name in looked_up(kind, taken=False):
            for value in ("text", [[None]]):
                status, found = await served.post(path, {**body, name: value})
                assert (status, found["error"]["code"], found["error"]["param"]) == (400, "unsupported_parameter", name)
                assert found["error"]["message"].startswith(f"{name} is not supported with this value. ")


async def test_an_unknown_field_is_named() -> None:
    async with serving(FakeEngine()) as served:
        for kind, (path, body) in PATHS.items():
            for name in ("colour", "Temperature", "max-tokens", "a`b", "é", "\x7f", "a" * 1000, "`- at `$.n`"):
                assert name not in kind.__struct_fields__
                status, found = await served.post(path, {**body, name: None})
                assert (status, found["error"]["code"], found["error"]["param"]) == (
                    400,
                    "unknown_parameter",
                    name[:64],
                )
            status, found = await served.post(path, {**body, "stream": True, "stream_options": {"colour": 1}})
            assert (status, found["error"]["code"], found["error"]["param"]) == (
                400,
                "unknown_parameter",
                "stream_options",
            )
            assert "'colour' in stream_options" in found["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"logit_bias": {"a": 1}}, "logit_bias", "logit_bias: a key: Expected `int`, got `str`."),
        ({"logit_bias": {"5": "a"}}, "logit_bias", "logit_bias[...]: Expected `float`, got `str`."),
        ({"stop": ["a", ""]}, "stop", "stop[1]: Expected `str` of length >= 1."),
        ({"stream_options": {"include_usage": 5}}, "stream_options", "stream_options.include_usage: "),
        ({"request_id": "a\n"}, "request_id", "request_id: "),
        ({"messages": [{}] * 4097}, "messages", "messages: "),
        ({"messages": [5]}, "messages", "messages[0]: "),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_wrong_value_is_placed(fields: dict[str, Any], param: str, message: str) -> None:
    async with serving(FakeEngine()) as served:
        status, found = await served.post("/v1/chat/completions", {"messages": "ping", **fields})
    assert (status, found["error"]["param"]) == (400, param)
    assert found["error"]["message"].startswith(message)


async def answer_to(served: Served, path: str, body: dict[str, Any]) -> Any:
    """The answer, less what differs from one to the next."""
    status, found = await served.post(path, body)
    assert status == 200, found
    return {name: value for name, value in found.items() if name not in ("id", "created", "usage")}


async def test_a_value_that_python_takes_for_a_neutral_one_is_refused() -> None:
    async with serving(FakeEngine()) as served:
        for path, body, name, value in (
            ("/generate", {"prompt": "ping"}, "preserve_cache", 2),
            ("/generate", {"prompt": "ping"}, "best_of", True),
            ("/generate", {"prompt": "ping"}, "best_of", 1.5),
            ("/generate", {"prompt": "ping"}, "suffix", 0),
        ):
            status, answer = await served.post(path, {**body, name: value})
            assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "unsupported_parameter", name)


async def test_what_newer_clients_send_with_its_default_is_taken() -> None:
    vllm = {"repetition_detection": None, "return_prompt_text": False, "routed_experts_prompt_start": 0}
    sglang = {"data_parallel_rank": None, "return_meta_info": False, "use_audio_in_video": False, "extra_key": None}
    async with serving(FakeEngine({"ping": "pong"})) as served:
        for path, body in PATHS.values():
            await answer_to(served, path, body | vllm | sglang)
            for field in ({"repetition_detection": {"max_pattern_size": 4}}, {"data_parallel_rank": 1}):
                status, found = await served.post(path, body | field)
                assert (status, found["error"]["code"]) == (400, "unsupported_parameter")


@pytest.mark.parametrize("kind", PATHS)
async def test_mistyped_values_are_taken_for_what_they_say(kind: type[OpenAIFields]) -> None:
    path, body = PATHS[kind]
    exact = {"max_tokens": 2, "seed": 1, "n": 1, "temperature": 0.5, "ignore_eos": True, "logit_bias": {"5": 1.0}}
    loose = {
        "max_tokens": "2",
        "seed": 1.0,
        "n": "1.0",
        "temperature": "0.5",
        "ignore_eos": 1,
        "logit_bias": {"5": "1"},
    }
    nothing = dict.fromkeys(name for name in kind.__struct_fields__ if name not in body)
    async with serving(FakeEngine("x" * 40)) as served:
        expected = await answer_to(served, path, body | exact)
        assert await answer_to(served, path, body | loose) == expected
        assert await answer_to(served, path, body | nothing | loose | {"max_tokens": 2.0}) == expected
        async with served.http.post(served.url + path, json={**body, "stream": "true", "stop": "null"}) as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("max_tokens", 2.5, "invalid_type"),
        ("max_tokens", "many", "invalid_type"),
        ("max_tokens", True, "invalid_type"),
        ("temperature", "nan", "invalid_value"),
        ("timeout", "inf", "invalid_value"),
        ("logit_bias", {"5": "nan"}, "invalid_value"),
        ("stream", "yes, please", "invalid_type"),
        ("n", "1e400", "invalid_value"),
    ],
)
async def test_what_is_no_such_value_is_refused_however_it_is_spelled(name: str, value: Any, code: str) -> None:
    async with serving(FakeEngine()) as served:
        for path, body in PATHS.values():
            status, answer = await served.post(path, {**body, name: value})
            assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, code, name)


async def test_unknown_fields_are_ignored_where_the_owner_says_so_and_named_in_a_header() -> None:
    async with serving(FakeEngine({"ping": "pong"}), unknown_fields="ignore") as served:
        asked: dict[str, Any] = {"colour": 1, "a\r\nb": 2, "stream_options": {"shape": 3}, "tools": [], "stream": True}
        for path, body in PATHS.values():
            async with served.http.post(served.url + path, json=body | asked) as response:
                assert response.status == 200
                assert response.headers["X-Ignored-Fields"] == "colour, a%0D%0Ab, stream_options.shape"
            status, answer = await served.post(path, body | {"colour": 1, "tools": [{}]})
            assert (status, answer["error"]["param"]) == (400, "tools")
        many = {"messages": "ping"} | {f"field{index}": 0 for index in range(100)}
        async with served.http.post(f"{served.url}/v1/chat/completions", json=many) as response:
            assert response.headers["X-Ignored-Fields"].endswith("field31, ...")
        handed_back = [{"role": "user", "content": "ping", "mood": "good"}]
        async with served.http.post(f"{served.url}/v1/chat/completions", json={"messages": handed_back}) as response:
            assert response.headers["X-Ignored-Fields"] == "messages.mood"
        async with served.http.post(f"{served.url}/v1/chat/completions", json={"messages": "ping"}) as response:
            assert "X-Ignored-Fields" not in response.headers


def test_the_documents_table_is_the_codes() -> None:
    text = (Path(__file__).parents[3] / "docs" / "differences.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE))
    assert rows == {
        name: f"{values_of(unsupported)} | {unsupported.peers} | {unsupported.why}"
        for name, unsupported in UNSUPPORTED.items()
    }


def values_of(unsupported: Unsupported) -> str:
    """As the table shows them."""
    if unsupported.values is None:
        return "any"
    return ", ".join(f"`{json.dumps(value)}`" for value in (None, *unsupported.values))
