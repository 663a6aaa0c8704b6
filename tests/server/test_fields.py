"""Every field that OpenAI's own package can send has a policy, and every policy holds."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params

from asyncllm.server.native_requests import GenerateRequest, InteractiveRequest
from asyncllm.server.requests import (
    REFUSED,
    ChatRequest,
    CompletionRequest,
    Drawn,
    EmbeddingRequest,
    Ignored,
    Sampled,
)
from asyncllm.testing import FakeEngine
from tests.server.serving import Served, serving

pytestmark = pytest.mark.anyio

PATHS: dict[type[Sampled], tuple[str, dict[str, Any]]] = {
    ChatRequest: ("/v1/chat/completions", {"messages": "ping"}),
    CompletionRequest: ("/v1/completions", {"prompt": "ping"}),
}
"""Where a Struct is sent, and a request that is served."""

VALUES: list[Any] = [None, True, False, 0, -1.5, 2**53, "", "text", [], [[None]], {}, {"a": {"b": [1]}}]
"""Of every kind that JSON has."""


def fields_of(module: Any) -> set[str]:
    """Every field of the module's request types, streamed and not."""
    kinds = [kind for name, kind in vars(module).items() if name.endswith(("CreateParamsBase", "CreateParams"))]
    kinds += [each for name, kind in vars(module).items() for each in typing.get_args(kind) if "CreateParams" in name]
    return {field for kind in kinds for field in getattr(kind, "__annotations__", ())}


def ignored_by(kind: type[msgspec.Struct]) -> list[str]:
    """The fields of the Struct that are accepted and have no effect."""
    ignored = set(Ignored.__struct_fields__) - set(Drawn.__struct_fields__)
    return sorted(ignored.intersection(kind.__struct_fields__))


def refused_by(kind: type[msgspec.Struct]) -> list[str]:
    return sorted(set(REFUSED).intersection(kind.__struct_fields__))


@pytest.mark.parametrize(
    ("module", "kind", "at_least"),
    [
        (chat_create_params, ChatRequest, 35),
        (completion_create_params, CompletionRequest, 18),
        (embedding_create_params, EmbeddingRequest, 5),
    ],
    ids=["chat", "completions", "embeddings"],
)
def test_no_field_of_openai_lacks_a_policy(module: Any, kind: type[msgspec.Struct], at_least: int) -> None:
    fields = fields_of(module)
    assert len(fields) >= at_least
    assert sorted(fields - set(kind.__struct_fields__)) == []


def test_a_policy_is_one() -> None:
    for name in REFUSED:
        assert name not in Ignored.__struct_fields__, f"{name} is both ignored and refused"
        assert any(name in kind.__struct_fields__ for kind in (*PATHS, GenerateRequest, InteractiveRequest)), (
            f"{name} is refused, and no Struct has it"
        )
    for kind in PATHS:
        untyped = {
            field.name for field in msgspec.structs.fields(kind) if field.type is Any and field.name != "messages"
        }
        assert untyped <= {*ignored_by(kind), *refused_by(kind)}, "a field without a type is ignored or refused"


@pytest.mark.parametrize("kind", PATHS)
async def test_an_ignored_field_takes_any_value_and_changes_nothing(kind: type[Sampled]) -> None:
    path, body = PATHS[kind]
    async with serving(FakeEngine({"ping": "pong"})) as served:
        plain = await answer_to(served, path, body)
        for name in ignored_by(kind):
            for value in VALUES:
                assert await answer_to(served, path, {**body, name: value}) == plain, (name, value)


@pytest.mark.parametrize("kind", PATHS)
async def test_a_refused_field_is_named_and_its_empty_values_pass(kind: type[Sampled]) -> None:
    path, body = PATHS[kind]
    typed = {field.name for field in msgspec.structs.fields(kind) if field.type is not Any}
    async with serving(FakeEngine({"ping": "pong"})) as served:
        for name in refused_by(kind):
            if name in typed:
                status, found = await served.post(path, {**body, name: False})
                assert (status, found["error"]["code"]) == (400, "unsupported_parameter")
            for value in VALUES:
                status, found = await served.post(path, {**body, name: value})
                if any(value == each and type(value) is type(each) for each in REFUSED[name].allowed):
                    assert status == 200, (name, value, found)
                else:
                    assert status == 400, (name, value)
                    error = found["error"]
                    assert error["param"] == name
                    if error["code"] == "unsupported_parameter":
                        assert error["message"].startswith(f"{name} is not supported with this value. ")
                    else:
                        assert (error["code"], name in typed) == ("invalid_type", True)
            for value in REFUSED[name].allowed:
                assert (await served.post(path, {**body, name: value}))[0] == 200, (name, value)


async def test_a_field_that_nobody_knows_is_named() -> None:
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


async def test_a_value_that_python_takes_for_an_allowed_one_is_refused() -> None:
    async with serving(FakeEngine()) as served:
        for path, body, name, value in (
            ("/generate", {"prompt": "ping"}, "preserve_cache", 0),
            ("/v1/completions", {"prompt": "ping"}, "best_of", True),
            ("/v1/completions", {"prompt": "ping"}, "best_of", 1.0),
        ):
            status, answer = await served.post(path, {**body, name: value})
            assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "unsupported_parameter", name)
