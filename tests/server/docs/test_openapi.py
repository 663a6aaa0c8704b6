"""GET /openapi.json: a valid document that says what the server does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from asyncllm.server.docs.field_notes import field_notes
from asyncllm.server.docs.openapi import _digits_up_to
from asyncllm.server.http.access import Auth
from asyncllm.server.openai.requests import ChatRequest, StreamOptions
from asyncllm.server.request.unsupported import UNSUPPORTED
from asyncllm.server.routes import ROUTES
from asyncllm.testing import FakeEngine
from tests.server.serving import Served, serving

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

PING: list[Any] = [{"role": "user", "content": "ping"}]
KEY = {"Authorization": "Bearer secret"}


async def document(served: Served) -> dict[str, Any]:
    status, body = await served.get("/openapi.json", headers=KEY)
    assert status == 200
    assert isinstance(body, dict)
    return body


def validator(whole: dict[str, Any], name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": whole["components"]})


@pytest.mark.parametrize("keys", [None, ["secret"]], ids=["open", "with a key"])
async def test_the_document_is_valid_and_has_every_route(keys: Any, tmp_path: Path) -> None:
    (tmp_path / "admin").write_text("owner", encoding="utf-8")
    everything = {
        "adapters_folder": str(tmp_path),
        "admin_key_file": str(tmp_path / "admin"),
        "allow_terminate_by_client": True,
    }
    async with serving(FakeEngine(), api_keys=keys, **(everything if keys else {})) as served:
        whole = await document(served)
    OpenAPIV31SpecValidator(whole).validate()
    operations = {
        (method.upper(), path): operation
        for path, methods in whole["paths"].items()
        for method, operation in methods.items()
    }
    routes = [route for route in ROUTES if keys or (route.auth is not Auth.ADMIN and route.only_with is None)]
    assert set(operations) == {(route.method, re.sub(r":[^}]*}", "}", route.path)) for route in routes}
    assert len({operation["operationId"] for operation in operations.values()}) == len(operations)
    for operation in operations.values():
        assert operation["description"]
        assert operation["summary"]
    for route in routes:
        operation = operations[route.method, re.sub(r":[^}]*}", "}", route.path)]
        assert ("requestBody" in operation) == (route.body is not None)
        assert (route.stream_type in operation["responses"]["200"]["content"]) == route.streams
        if keys:
            assert operation["security"] == ([] if route.auth is Auth.PUBLIC else [{"bearer": []}])
            assert ("401" in operation["responses"]) == (route.auth is not Auth.PUBLIC)
        else:
            assert "security" not in operation


@pytest.mark.parametrize(
    "body",
    [
        {"messages": PING},
        {"messages": "ping", "stream": True, "stream_options": {"include_usage": True}},
        {"messages": PING, "logprobs": True, "top_logprobs": 2, "n": 2, "logit_bias": {"257": -1, "0": 5}},
        {"messages": PING, "tools": [], "tool_choice": "none", "length_penalty": 1.0, "user": {"any": "thing"}},
        {"messages": [{"role": "developer", "content": [{"type": "text", "text": "x"}]}, *PING], "model": "fake"},
        {"messages": PING, "model": None, "stop_token_ids": [257], "seed": -1},
    ],
    ids=str,
)
async def test_what_the_document_allows_is_taken(body: dict[str, Any]) -> None:
    async with serving(FakeEngine()) as served:
        validator(await document(served), "ChatRequest").validate(body)
        async with served.http.post(f"{served.url}/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": PING, "model": "other"},
        {"messages": PING, "n": 17},
        {"messages": PING, "colour": "red"},
        {"messages": PING, "top_logprobs": 1},
        {"messages": PING, "stream_options": {}},
        {"messages": PING, "tools": [{}]},
        {"messages": PING, "logit_bias": {"258": 1}},
        {"messages": PING, "stop_token_ids": [258]},
        {"messages": PING, "max_tokens": 0},
        {"messages": [{"role": "king", "content": "x"}]},
    ],
    ids=str,
)
async def test_what_the_server_refuses_the_document_does_not_allow(body: dict[str, Any]) -> None:
    async with serving(FakeEngine()) as served:
        assert not validator(await document(served), "ChatRequest").is_valid(body)
        assert (await served.post("/v1/chat/completions", body))[0] in (400, 404)


@pytest.mark.parametrize(
    ("prompt", "fits"),
    [("a", True), (["a", "b"], True), ([1, 2], True), ([[1], [2]], True), ("", False), ([], False), (["a", 1], False)],
    ids=str,
)
async def test_prompts_are_of_one_kind(prompt: Any, fits: bool) -> None:
    async with serving(FakeEngine()) as served:
        assert validator(await document(served), "CompletionRequest").is_valid({"prompt": prompt}) == fits
        assert (await served.post("/v1/completions", {"prompt": prompt}))[0] == (200 if fits else 400)


@pytest.mark.parametrize(("echo", "fits"), [(True, True), (False, False), (None, False)])
async def test_no_new_tokens_only_with_an_echo(echo: bool | None, fits: bool) -> None:
    body = {"prompt": "a", "max_tokens": 0, "echo": echo}
    async with serving(FakeEngine()) as served:
        assert validator(await document(served), "CompletionRequest").is_valid(body) == fits
        assert (await served.post("/v1/completions", body))[0] == (200 if fits else 400)


async def test_answers_are_as_the_document_says() -> None:
    async with serving(FakeEngine(), api_keys=["secret"]) as served:
        whole = await document(served)
        asked = {"messages": PING, "logprobs": True, "top_logprobs": 1, "n": 2, "return_token_ids": True}
        _, answer = await served.post("/v1/chat/completions", asked, headers=KEY)
        validator(whole, "ChatResponse").validate(answer)
        _, answer = await served.post("/v1/completions", {"prompt": "a", "logprobs": 1, "echo": True}, headers=KEY)
        validator(whole, "CompletionResponse").validate(answer)
        validator(whole, "ModelList").validate((await served.get("/v1/models", headers=KEY))[1])
        validator(whole, "Health").validate((await served.get("/health"))[1])
        status, error = await served.get("/openapi.json")
        assert status == 401  # it names the model
        validator(whole, "Error").validate(error)


async def test_errors_in_lmdeploys_format_are_as_the_document_says() -> None:
    async with serving(FakeEngine(), error_format="lmdeploy") as served:
        _, error = await served.post("/v1/chat/completions", {})
        validator(await document(served), "Error").validate(error)


async def test_fields_are_explained_and_have_the_servers_own_defaults() -> None:
    async with serving(FakeEngine()) as served:
        served.service.defaults = msgspec.structs.replace(served.service.defaults, temperature=0.25)
        schemas = (await document(served))["components"]["schemas"]
    chat = schemas["ChatRequest"]["properties"]
    assert chat["temperature"]["default"] == 0.25
    assert chat["session_id"]["description"].startswith("A label")
    assert chat["user"]["x-support"] == "ignored"
    refused = {name for name, field in chat.items() if field.get("x-support") == "refused"}
    named = {name for name, unsupported in UNSUPPORTED.items() if unsupported.values is not None}
    assert refused == named - set(ChatRequest.__struct_fields__)
    assert schemas["CompletionRequest"]["properties"]["max_tokens"]["default"] == 16


async def test_what_is_switched_off_is_not_documented() -> None:
    async with serving(FakeEngine(), disable_metrics=True) as served:
        assert "/metrics" not in (await document(served))["paths"]
    async with serving(FakeEngine(), disable_docs=True) as served:
        assert (await served.get("/openapi.json"))[0] == 404


def test_notes_are_those_under_the_fields() -> None:
    notes = field_notes(StreamOptions)
    assert notes["continuous_usage_stats"] == "With include_usage: send it in every chunk (vLLM's)."
    assert "session_id" in field_notes(ChatRequest)  # of a base


@pytest.mark.parametrize("last", [0, 7, 9, 10, 99, 100, 257, 31999])
def test_numbers_up_to(last: int) -> None:
    pattern = re.compile(_digits_up_to(last))
    assert [number for number in range(10 * last + 20) if pattern.match(str(number))] == list(range(last + 1))
    assert not pattern.match("01")
