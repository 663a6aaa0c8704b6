"""Anthropic's own client: whole and streamed, blocking and not, tokens counted, errors."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import anthropic

URL, KEY = os.environ["ASYNCLLM_TEST_URL"], os.environ["ASYNCLLM_TEST_KEY"]
ASKED: dict[str, Any] = {
    "model": "tiny-chat",
    "max_tokens": 32,
    "system": "You are a helpful assistant.",
    "messages": [{"role": "user", "content": "What is 17 + 25?"}],
    "extra_body": {"temperature": 0},
}


def did(what: str) -> None:
    print(f"did: {what}", flush=True)


def text_of(message: anthropic.types.Message) -> str:
    (block,) = message.content
    assert block.type == "text"
    return block.text


def blocking() -> str:
    client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
    whole = client.messages.create(**ASKED)
    text = text_of(whole)
    assert text
    did(f"messages.create: {text!r}, {whole.stop_reason}")
    with client.messages.stream(**ASKED) as stream:
        assert "".join(stream.text_stream) == text
        assert stream.get_final_message().usage == whole.usage
    did("messages.stream: the same text and usage")
    counted = client.messages.count_tokens(**{key: ASKED[key] for key in ("model", "system", "messages")})
    assert counted.input_tokens == whole.usage.input_tokens
    did(f"messages.count_tokens: {counted.input_tokens}")
    blocks = [{"type": "text", "text": "What is "}, {"type": "text", "text": "17 + 25?"}]
    assert text_of(client.messages.create(**{**ASKED, "messages": [{"role": "user", "content": blocks}]})) == text
    did("blocks of text")
    for fields, kind in (
        ({"model": "other"}, anthropic.NotFoundError),
        ({"max_tokens": 0}, anthropic.BadRequestError),
    ):
        try:
            client.messages.create(**{**ASKED, **fields})
        except kind:
            continue
        raise AssertionError(fields)
    did("errors of their kinds")
    return text


async def awaited(text: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0) as client:
        answers = await asyncio.gather(*(client.messages.create(**ASKED) for _ in range(2)))
        assert [text_of(answer) for answer in answers] == [text] * 2
        did("AsyncAnthropic: two at once")


asyncio.run(awaited(blocking()))
