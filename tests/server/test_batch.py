"""A file of batch requests: a line of answer for each, whatever is wrong with one of them."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from asyncllm.server import batch
from asyncllm.server.batch import answer_file
from asyncllm.testing import FakeEngine

pytestmark = pytest.mark.anyio


def asked(custom_id: Any, body: Any, url: str = "/v1/chat/completions", **more: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body, **more})


def said(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


async def answers(lines: list[str], **engine: Any) -> tuple[dict[Any, dict[str, Any]], batch.Count]:
    target = io.StringIO()
    count = await answer_file(FakeEngine(**engine), io.StringIO("\n".join(lines)), target)
    results = [json.loads(line) for line in target.getvalue().splitlines()]
    assert len({result["id"] for result in results}) == len(results)
    return {result["custom_id"]: result for result in results}, count


async def test_each_line_is_answered_as_the_server_answers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "MAX_UNANSWERED", 3)
    lines = [asked(str(number), said(f"number {number}")) for number in range(20)]
    lines[7:7] = ["", asked("text", {"prompt": "Zo\u00eb", "max_tokens": 64}, "/v1/completions"), "  "]
    results, count = await answers(lines)
    assert (count.answered, count.refused, len(results)) == (21, 0, 21)
    for number in range(20):
        response = results[str(number)]["response"]
        assert response["status_code"] == 200
        assert response["request_id"]
        assert response["body"]["choices"][0]["message"]["content"] == f"number {number}"
    assert results["text"]["response"]["body"]["choices"][0]["text"] == "Zo\u00eb"


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("nonsense", "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        (asked(None, {}), "no custom_id"),
        (asked("a", {}, method="GET"), "not POST"),
        (asked("a", {}, "/v1/files"), "its url is none of"),
        (asked("a", {}, "http://elsewhere/v1/chat/completions"), "its url is none of"),
        (asked("a", []), "its body"),
        (asked("a", {**said("x"), "stream": True}), "a stream"),
        (asked("a", said("x"), temperature=0.5), "'temperature'"),
    ],
    ids=range(9),
)
async def test_a_line_that_is_no_request_is_told_so_and_harms_no_other(line: str, word: str) -> None:
    results, count = await answers([line, asked("good", said("ping")), asked("bad", {"messages": []})])
    assert (count.answered, count.refused) == (1, 2)
    refused = next(result for name, result in results.items() if name not in ("good", "bad"))
    assert refused["response"] is None
    assert refused["error"]["code"] == "invalid_line"
    assert refused["error"]["message"].startswith("Line 1 ")
    assert word in refused["error"]["message"]
    assert results["good"]["response"]["body"]["choices"][0]["message"]["content"] == "ping"
    assert results["bad"]["response"]["status_code"] == 400
    assert results["bad"]["response"]["body"]["error"]["type"] == "invalid_request_error"


class _FullDisk(io.StringIO):
    def write(self, _: str) -> int:
        raise OSError(28, "No space left on device")


async def test_an_output_that_cannot_be_written_ends_it() -> None:
    with pytest.raises(OSError, match="No space left"):
        await answer_file(FakeEngine(), io.StringIO(asked("a", said("ping"))), _FullDisk())
