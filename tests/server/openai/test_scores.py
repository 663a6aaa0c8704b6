"""/score, /rerank, /classify and /pooling over the wire."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from asyncllm import AsyncEngine, EngineConfig
from asyncllm.testing import FakeEngine
from tests.models.test_score_heads import checkpoint
from tests.server.serving import serving

pytestmark = pytest.mark.anyio


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


async def raw(engine: AsyncEngine, *texts: str) -> list[float]:
    found = await engine.classify(list(texts))
    assert isinstance(found, list)
    return [each.values[0] for each in found]


async def test_scores_of_pairs() -> None:
    async with serving(FakeEngine()) as served:
        status, answer = await served.post("/v1/score", {"model": "fake", "text_1": "ab", "text_2": ["cd", "ef"]})
        assert status == 200
        expected = await raw(served.engine, "abcd", "abef")
        assert [each["score"] for each in answer["data"]] == pytest.approx([sigmoid(each) for each in expected])
        assert answer["usage"]["prompt_tokens"] == 8
        both = {"model": "fake", "text_1": ["ab", "cd"], "text_2": ["cd", "ef"]}
        _, answer = await served.post("/score", both)
        _, other = await served.post("/score", {"queries": ["ab", "cd"], "documents": ["cd", "ef"]})
        assert other["data"] == answer["data"]
        expected = await raw(served.engine, "abcd", "cdef")
        assert [each["score"] for each in answer["data"]] == pytest.approx([sigmoid(each) for each in expected])


async def test_rerank_sorts() -> None:
    documents: list[Any] = ["one", {"text": "two"}, "three"]
    async with serving(FakeEngine()) as served:
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            body = {"model": "fake", "query": "q", "documents": documents, "top_n": 2}
            status, answer = await served.post(path, body)
            assert status == 200
            scores = [sigmoid(each) for each in await raw(served.engine, "qone", "qtwo", "qthree")]
            order = sorted(range(3), key=lambda index: -scores[index])[:2]
            assert [each["index"] for each in answer["results"]] == order
            assert [each["relevance_score"] for each in answer["results"]] == pytest.approx(
                [scores[index] for index in order]
            )
            assert [each["document"]["text"] for each in answer["results"]] == [
                ("one", "two", "three")[index] for index in order
            ]
        body = {"model": "fake", "query": "q", "documents": documents, "return_documents": False}
        _, answer = await served.post("/rerank", body)
        assert len(answer["results"]) == 3
        assert "document" not in answer["results"][0]


@pytest.mark.one_loop
async def test_labels_and_rewards(tmp_path: Path) -> None:
    folder = checkpoint("llama", "LlamaForSequenceClassification", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    names = ["good", "bad", "neither"]
    (folder / "config.json").write_text(json.dumps({**config, "id2label": dict(enumerate(names))}))
    engine = AsyncEngine(str(folder), EngineConfig(device_type="cpu", num_gpu_blocks=50))
    async with serving(engine) as served:
        assert engine.limits.labels == tuple(names)
        # Nothing is read again for a request.
        (folder / "config.json").unlink()
        found = await served.engine.classify("a text")
        assert not isinstance(found, list)
        _, answer = await served.post("/pooling", {"model": engine.model_name, "input": "a text"})
        assert answer["data"][0]["data"] == pytest.approx(found.values, abs=1e-3)
        _, answer = await served.post("/classify", {"model": engine.model_name, "input": ["a text"]})
        powers = [math.exp(each) for each in found.values]
        assert answer["data"][0]["probs"] == pytest.approx([each / sum(powers) for each in powers], abs=1e-3)
        assert answer["data"][0]["label"] == names[powers.index(max(powers))]
        status, answer = await served.post("/score", {"model": engine.model_name, "text_1": "a", "text_2": "b"})
        assert status == 400
        assert "/classify" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": "a", "queries": "b", "text_2": "c"}, "text_1"),
        ("/score", {"queries": ["a", "b"], "documents": ["c"]}, "queries"),
        ("/score", {"queries": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "q", "documents": []}, "documents"),
        ("/rerank", {"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
        ("/classify", {"input": [5, "a"]}, "input"),
        ("/classify", {}, "input"),
        ("/pooling", {"input": "a", "messages": [{"role": "user", "content": "b"}]}, "input"),
        ("/v1/embeddings", {"messages": []}, "messages"),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ],
    ids=str,
)
async def test_bad_requests(path: str, fields: dict[str, object], param: str) -> None:
    async with serving(FakeEngine()) as served:
        status, answer = await served.post(path, {"model": "fake", **fields})
        assert (status, answer["error"]["param"]) == (400, param)
