"""POST /v1/embeddings, asked by OpenAI's own client."""

from __future__ import annotations

import math
import threading
from typing import Any

import openai
import pytest

from asyncllm.server.openai import embeddings
from asyncllm.testing import FakeEngine
from tests.server.serving import serving

pytestmark = pytest.mark.anyio


async def test_vectors_come_in_order_and_are_those_of_the_engine() -> None:
    async with serving(FakeEngine()) as served, served.openai() as client:
        # The package asks for base64 unless it is told otherwise, and unpacks it.
        packed = await client.embeddings.create(model="fake", input=["one", "another"])
        plain = await client.embeddings.create(model="fake", input=["one", "another"], encoding_format="float")
        alone = await served.engine.embed("another")
    assert [each.index for each in packed.data] == [0, 1]
    assert packed.usage.prompt_tokens == packed.usage.total_tokens > 0
    assert not isinstance(alone, list)
    assert plain.data[1].embedding == alone.values
    assert packed.data[1].embedding == pytest.approx(alone.values, abs=1e-7)
    assert packed.data[0].embedding != packed.data[1].embedding
    assert math.isclose(sum(value * value for value in plain.data[0].embedding), 1.0, rel_tol=1e-6)


async def test_token_ids_dimensions_and_pooling() -> None:
    async with serving(FakeEngine()) as served, served.openai() as client:
        text = await client.embeddings.create(model="fake", input="abc", encoding_format="float")
        ids = await client.embeddings.create(model="fake", input=[[97, 98, 99]], encoding_format="float")
        short = await client.embeddings.create(model="fake", input="abc", dimensions=2)
        mean = await client.embeddings.create(
            model="fake", input="abc", encoding_format="float", extra_body={"pooling": "mean"}
        )
    assert ids.data[0].embedding == text.data[0].embedding
    assert len(short.data[0].embedding) == 2
    assert mean.data[0].embedding != text.data[0].embedding


async def test_vectors_have_length_1_unless_they_shall_not() -> None:
    async with serving(FakeEngine()) as served:
        raw = await served.engine.embed("abc", normalize=False)
        assert not isinstance(raw, list)
        for fields, scaled in (
            ({}, True),
            ({"normalize": True}, True),
            ({"normalize": False}, False),
            ({"use_activation": False}, False),
            ({"use_activation": False, "normalize": False}, False),
        ):
            _, found = await served.post("/v1/embeddings", {"input": "abc", **fields})
            assert (found["data"][0]["embedding"] != raw.values) is scaled, fields


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"input": "a", "normalize": True, "use_activation": False}, "use_activation", "contradict"),
        ({"input": []}, "input", "holds 0 entries"),
        ({"input": ""}, "input", "is empty"),
        ({"input": ["one", 5]}, "input", "mixes texts and token ids"),
        ({"input": [-1]}, "input", "input holds -1"),
        ({"dimensions": 10**6}, "dimensions", "in [1, "),
        ({"dimensions": 0}, "dimensions", ">= 1"),
        ({"encoding_format": "hex"}, "encoding_format", "'hex'. It is one of 'float', 'base64'."),
    ],
    ids=str,
)
async def test_what_cannot_be_embedded_is_a_400_that_names_the_field(
    fields: dict[str, object], param: str, says: str
) -> None:
    async with serving(FakeEngine()) as served:
        status, answer = await served.post("/v1/embeddings", {"model": "fake", "input": "abc", **fields})
        assert (status, answer["error"]["param"]) == (400, param)
        assert says in answer["error"]["message"]
        async with served.openai() as client:
            with pytest.raises(openai.NotFoundError):
                await client.embeddings.create(model="other", input="abc")


async def test_many_texts_are_written_down_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """LangChain sends 1,000 at a time."""
    threads: set[str] = set()
    original = embeddings.encoded_alone

    def encoded(part: Any) -> Any:
        threads.add(threading.current_thread().name)
        return original(part)

    monkeypatch.setattr(embeddings, "encoded_alone", encoded)
    async with serving(FakeEngine()) as served:
        status, answer = await served.post("/v1/embeddings", {"input": ["ab"] * 1000})
        assert status == 200, answer
        assert [each["index"] for each in answer["data"]] == list(range(1000))
        assert threading.current_thread().name not in threads
        _, small = await served.post("/v1/embeddings", {"input": "ab"})
    assert small["data"][0] == answer["data"][0]
    assert threading.current_thread().name in threads
