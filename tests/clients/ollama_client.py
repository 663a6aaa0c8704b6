"""Ollama's own client: chats and prompts, whole and streamed, blocking and not, formats, tools, vectors, errors."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import ollama

URL, KEY = os.environ["ASYNCLLM_TEST_URL"], os.environ["ASYNCLLM_TEST_KEY"]
HEADERS = {"Authorization": f"Bearer {KEY}"}
GREEDY = {"temperature": 0, "num_predict": 32, "num_ctx": 2048}
ASKED: dict[str, Any] = {"model": "tiny-chat", "messages": [{"role": "user", "content": "What is 17 + 25?"}]}
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["sum"],
    "additionalProperties": False,
}


def weather(city: str) -> str:
    """Tell the weather.

    Args:
      city: The city's name.
    """
    return f"sunny in {city}"


def did(what: str) -> None:
    print(f"did: {what}", flush=True)


def blocking() -> str:
    client = ollama.Client(host=URL, headers=HEADERS)
    whole = client.chat(**ASKED, options=GREEDY)
    text = whole.message.content
    assert text
    did(f"chat: {text!r}, {whole.done_reason}, {whole.eval_count} tokens")
    parts = list(client.chat(**ASKED, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == text
    assert parts[-1].eval_count == whole.eval_count
    did("chat, streamed: the same")
    assert client.generate("tiny-chat", "What is 17 + 25?", options=GREEDY).response == text
    did("generate: the same")
    held = json.loads(client.chat(**ASKED, format=SCHEMA, options=GREEDY).message.content)
    assert set(held) == {"sum"}
    did(f"format: {held}")
    free = client.chat(**ASKED, tools=[weather], options=GREEDY)
    assert free.message.content or free.message.tool_calls
    history = [
        *ASKED["messages"],
        {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Bern"}}}]},
        {"role": "tool", "tool_name": "weather", "content": weather("Bern")},
    ]
    assert client.chat("tiny-chat", history, tools=[weather], options=GREEDY).message.content
    did("tools, and the result of one")
    vectors = client.embed("tiny-chat", ["a", "b"]).embeddings
    assert [len(each) for each in vectors] == [len(client.embeddings("tiny-chat", "a").embedding)] * 2
    did(f"embed: 2 vectors of {len(vectors[0])}")
    (listed,) = client.list().models
    (running,) = client.ps().models
    assert listed.model == running.model == "tiny-chat"
    did(f"list, ps, show: {client.show('tiny-chat').capabilities}")
    for call, status in (
        (lambda: client.chat("other", ASKED["messages"]), 404),
        (lambda: client.chat(**ASKED, options={"mirostat": 2}), 400),
        (lambda: client.pull("other"), 400),
    ):
        try:
            call()
        except ollama.ResponseError as error:
            if error.status_code == status:
                continue
        raise AssertionError(status)
    did("errors of their statuses")
    return text


async def awaited(text: str) -> None:
    client = ollama.AsyncClient(host=URL, headers=HEADERS)
    answers = await asyncio.gather(*(client.chat(**ASKED, options=GREEDY) for _ in range(2)))
    assert [answer.message.content for answer in answers] == [text] * 2
    did("AsyncClient: two at once")


asyncio.run(awaited(blocking()))
