"""POST /invocations answers as the route whose body it gets."""

from __future__ import annotations

from typing import Any

import pytest

from asyncllm.testing import FakeEngine
from tests.server.serving import serving

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ping"}], "temperature": 0}),
        ("/v1/completions", {"prompt": "ping", "max_tokens": 3}),
        ("/v1/chat/completions", {"messages": "ping", "max_tokens": 0}),
        ("/v1/chat/completions", {"messages": "ping", "nonsense": 0}),
        ("/v1/embeddings", {"input": ["ping", "pong"]}),
        ("/v1/score", {"text_1": "ping", "text_2": ["pong"]}),
        ("/v1/score", {"queries": "ping", "documents": ["pong"]}),
        ("/v1/rerank", {"query": "ping", "documents": ["pong"]}),
    ],
)
async def test_the_body_says_which_route_is_meant(path: str, body: dict[str, Any]) -> None:
    async with serving(FakeEngine("pong")) as served:
        there, here = await served.post(path, body), await served.post("/invocations", body)
    for _, answer in (there, here):
        answer.pop("id", None)
        answer.pop("created", None)
        answer.pop("usage", None)
    assert here == there


async def test_streams_are_those_of_the_route() -> None:
    async with serving(FakeEngine("pong")) as served:
        body = {"messages": "ping", "stream": True}
        async with served.http.post(f"{served.url}/invocations", json=body) as response:
            text = await response.text()
        assert response.content_type == "text/event-stream"
        assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("body", [{}, {"model": "fake"}, [], "text", {"messages": None}])
async def test_a_body_that_says_nothing_is_refused(body: Any) -> None:
    async with serving(FakeEngine("pong")) as served:
        status, answer = await served.post("/invocations", body)
    assert (status, answer["error"]["code"]) == (400, "missing_required_parameter")
    assert "messages" in answer["error"]["message"]
