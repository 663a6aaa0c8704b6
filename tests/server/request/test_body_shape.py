"""Bodies of very many small parts are refused before decoding them holds up others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncllm.server.http.errors import ApiError
from asyncllm.server.request.decode import MAX_PARTS, MAX_VALUES, check_shape
from asyncllm.testing import FakeEngine
from tests.server.serving import serving

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, 2]}'}}
TAKEN = [
    "a" * 3_000_000,
    '"{[,: ' * 300_000,
    "\\" * 1_000_000,
    '\\"' * 500_000,
    [[1, 2, 3] * 100_000] * 2,
    [{"role": "assistant", "content": None, "tool_calls": [CALL]}] * 4096,
    ["a b" * 1000] * 1000,
]
REFUSED = [
    [[1]] * (MAX_PARTS + 1),
    [{}] * (MAX_PARTS + 1),
    ["a"] * (MAX_PARTS + 1),
    ["\\"] * (MAX_PARTS + 1),
    {str(number): 1 for number in range(MAX_PARTS + 1)},
    [1] * (MAX_VALUES + 2),
]


@pytest.mark.parametrize("value", TAKEN, ids=range(len(TAKEN)))
def test_long_texts_and_lists_of_ids_and_whole_conversations_are_taken(value: Any) -> None:
    check_shape(json.dumps(value, separators=(",", ":")).encode())


@pytest.mark.parametrize("value", REFUSED, ids=range(len(REFUSED)))
def test_what_takes_long_to_decode_is_refused(value: Any) -> None:
    with pytest.raises(ApiError, match="at most") as caught:
        check_shape(json.dumps(value, separators=(",", ":")).encode())
    assert (caught.value.status, caught.value.code) == (400, "too_many_values")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}] * 4097}),
        ("/v1/chat/interactive", {"prompt": [{"role": "user", "content": "a"}] * 4097}),
        ("/v1/completions", {"prompt": [[1]] * (MAX_PARTS + 1)}),
    ],
)
async def test_over_http(path: str, body: Any) -> None:
    async with serving(FakeEngine()) as served:
        status, answer = await served.post(path, body)
        assert status == 400, answer
