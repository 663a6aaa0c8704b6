"""POST /tokenize, /detokenize, /v1/encode and /get_ppl."""

from __future__ import annotations

from typing import Any

import pytest

from asyncllm.engine.async_engine import AsyncEngine
from asyncllm.testing import ByteTokenizer, FakeEngine, fake_parts
from tests.server.serving import serving

pytestmark = pytest.mark.anyio

MESSAGES: list[Any] = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "ü"}]
LONG = "long text, " * 2000


def with_bos() -> AsyncEngine:
    return AsyncEngine("fake", **{**fake_parts(), "tokenizer": ByteTokenizer(adds_bos=True)})


async def test_a_text_there_and_back() -> None:
    async with serving(with_bos()) as served:
        limit = served.engine.session_len
        for text in ("hé<eos>!", LONG):
            status, answer = await served.post("/tokenize", {"model": "fake", "prompt": text})
            ids = answer["tokens"]
            assert (status, answer) == (200, {"count": len(ids), "max_model_len": limit, "tokens": ids})
            assert ids[0] == 256
            assert ids[1:] == served.engine.tokenizer.encode(text, add_bos=False)
            status, answer = await served.post("/detokenize", {"tokens": ids[1:]})
            assert (status, answer) == (200, {"prompt": text})
        _, answer = await served.post("/tokenize", {"prompt": "a<eos>", "add_special_tokens": False})
        assert answer["tokens"] == [97, 257]
        _, answer = await served.post("/tokenize", {"prompt": "aé", "return_token_strs": True})
        assert answer["token_strs"] == ["<bos>", "a", "\ufffd", "\ufffd"]


async def test_a_conversation_is_counted_as_a_chat_computes_it() -> None:
    async with serving(with_bos()) as served:
        tool = {"type": "function", "function": {"name": "weather"}}
        counts = set()
        for fields in ({}, {"add_generation_prompt": False}, {"tools": [tool]}):
            _, counted = await served.post("/tokenize", {"messages": MESSAGES, **fields})
            _, answer = await served.post(
                "/v1/chat/completions", {"messages": MESSAGES, "return_token_ids": True, **fields}
            )
            assert answer["prompt_token_ids"] == counted["tokens"]
            assert answer["usage"]["prompt_tokens"] == counted["count"]
            counts.add(counted["count"])
        assert len(counts) == 3


async def test_encode_takes_one_text_or_several() -> None:
    async with serving(with_bos()) as served:
        assert await served.post("/v1/encode", {"input": "ab"}) == (200, {"input_ids": [256, 97, 98], "length": 3})
        assert await served.post("/v1/encode", {"input": ["a", "bc"], "add_bos": False}) == (
            200,
            {"input_ids": [[97], [98, 99]], "length": [1, 2]},
        )
        _, answer = await served.post("/v1/encode", {"input": "ab", "do_preprocess": True})
        assert answer["input_ids"] == served.engine.tokenizer.encode("\x02user\x1fab\x03\x02assistant\x1f")


async def test_perplexity_is_the_librarys() -> None:
    async with serving(with_bos()) as served:
        for given, ids in (("ab", [256, 97, 98]), ([97, 98, 99], [97, 98, 99])):
            expected = await served.engine.get_ppl(ids)
            assert await served.post("/get_ppl", {"model": "fake", "input": given}) == (200, {"ppl": expected})
        status, answer = await served.post("/get_ppl", {"input": LONG})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/tokenize", {}, "prompt", "invalid_value"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt", "invalid_value"),
        ("/tokenize", {"prompt": ["a"]}, "prompt", "invalid_type"),
        ("/tokenize", {"messages": []}, "messages", "invalid_value"),
        ("/tokenize", {"messages": [{"role": "user", "content": ""}]}, "messages", "invalid_value"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt", "invalid_value"),
        ("/tokenize", {"messages": MESSAGES, "tools": [{}]}, "tools", "invalid_value"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "x"}, "chat_template", "unsupported_parameter"),
        ("/tokenize", {"prompt": "a", "text": "b"}, "text", "unknown_parameter"),
        ("/detokenize", {}, "tokens", "missing_required_parameter"),
        ("/detokenize", {"tokens": [258]}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [-1] * 5000}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": ["a"]}, "tokens", "invalid_type"),
        ("/get_ppl", {}, "input", "missing_required_parameter"),
        ("/get_ppl", {"input": ""}, "input", "invalid_value"),
        ("/get_ppl", {"input": "a"}, "input", "invalid_value"),
        ("/get_ppl", {"input": [97, 258]}, "input", "invalid_value"),
        ("/get_ppl", {"input": ["a"]}, "input", "invalid_type"),
        ("/v1/encode", {"input": []}, "input", "invalid_value"),
        ("/v1/encode", {"input": ["a"] * 1025}, "input", "invalid_value"),
        ("/v1/encode", {"input": "a", "prompt": "a"}, "prompt", "unsupported_parameter"),
    ],
    ids=str,
)
async def test_what_cannot_be_served_is_a_400(path: str, body: dict[str, Any], param: str, code: str) -> None:
    async with serving(FakeEngine()) as served:
        status, answer = await served.post(path, body)
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code)


async def test_an_empty_text_has_no_tokens_to_encode() -> None:
    async with serving(FakeEngine()) as served:
        for path, body in (("/tokenize", {"prompt": ""}), ("/v1/encode", {"input": ["a", ""]})):
            assert (await served.post(path, body))[0] == 400
        assert await served.post("/detokenize", {"tokens": []}) == (200, {"prompt": ""})
