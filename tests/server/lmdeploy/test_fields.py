"""Every field of the bodies that are not OpenAI's is implemented or refused, and nothing else is taken."""

from __future__ import annotations

from typing import Any

import pytest

from asyncllm.server.lmdeploy.requests import (
    DetokenizeRequest,
    EncodeRequest,
    GenerateRequest,
    InteractiveRequest,
    PerplexityRequest,
    TokenizeRequest,
)
from asyncllm.server.request.unsupported import UNSUPPORTED
from asyncllm.server.routes import ROUTES
from asyncllm.testing import FakeEngine
from tests.server.serving import serving

pytestmark = pytest.mark.anyio

PATHS: dict[type[Any], tuple[str, dict[str, Any]]] = {
    GenerateRequest: ("/generate", {"prompt": "ping"}),
    InteractiveRequest: ("/v1/chat/interactive", {"prompt": "ping"}),
    TokenizeRequest: ("/tokenize", {"prompt": "ping"}),
    DetokenizeRequest: ("/detokenize", {"tokens": [1]}),
    EncodeRequest: ("/v1/encode", {"input": "ping"}),
    PerplexityRequest: ("/get_ppl", {"input": "ping"}),
}
"""Where a Struct is sent, and a request that is served."""


@pytest.mark.parametrize("kind", PATHS)
async def test_what_is_not_implemented_is_taken_where_it_asks_for_nothing(kind: type[Any]) -> None:
    path, body = PATHS[kind]
    names = [name for name in UNSUPPORTED if name not in kind.__struct_fields__]
    async with serving(FakeEngine()) as served:
        assert (await served.post(path, body | dict.fromkeys(names)))[0] == 200
        neutral = {name: (UNSUPPORTED[name].values or (None,))[0] for name in names}
        assert (await served.post(path, body | neutral))[0] == 200
        for name in [name for name in names if UNSUPPORTED[name].values is not None][::7]:
            for value in (-5, "text", {"a": 1}, [None]):
                status, answer = await served.post(path, {**body, name: value})
                assert (status, answer["error"]["code"]) == (400, "unsupported_parameter"), (name, value)
                assert answer["error"]["param"] == name
        status, answer = await served.post(path, {**body, "colour": None})
        assert (status, answer["error"]["code"]) == (400, "unknown_parameter")
        status, answer = await served.post(path, {**body, "model": "other"})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")


def test_a_qos_route_is_the_route_of_the_same_name() -> None:
    by_path = {route.path: route for route in ROUTES}
    names = [path for path in by_path if path.endswith("_qos")]
    assert len(names) == 3
    for path in names:
        named, plain = by_path[path], by_path[path.removesuffix("_qos")]
        assert (named.handler, named.body, named.auth) == (plain.handler, plain.body, plain.auth)
        assert plain.body is not None
        assert "user_id" in plain.body.__struct_fields__
