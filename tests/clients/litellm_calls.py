"""litellm with its providers openai and hosted_vllm: completion, streams, their async kin, text completion, errors."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import litellm

WHERE = {"api_base": os.environ["ASYNCLLM_TEST_URL"] + "/v1", "api_key": os.environ["ASYNCLLM_TEST_KEY"]}
QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]
NUMBER = {"type": "integer"}
SCHEMA = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds two numbers.", "parameters": SCHEMA}}
litellm.telemetry = False


def did(what: str) -> None:
    print(f"did: {what}", flush=True)


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def blocking(asked: dict[str, Any]) -> None:
    answer = litellm.completion(**asked)
    assert "42" in answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    assert "42" in text_of(chunks)


async def not_blocking(asked: dict[str, Any]) -> None:
    assert "42" in (await litellm.acompletion(**asked)).choices[0].message.content
    stream = await litellm.acompletion(**asked, stream=True)
    assert "42" in text_of([chunk async for chunk in stream])


def with_tools(asked: dict[str, Any]) -> None:
    """A call, as a whole and by pieces, and the answer to its result."""
    message = litellm.completion(**asked, tools=[ADD]).choices[0].message
    chunks = list(litellm.completion(**asked, tools=[ADD], stream=True))
    rebuilt = litellm.stream_chunk_builder(chunks).choices[0].message
    for said in (message, rebuilt):
        assert said.tool_calls[0].function.name == "add"
        assert json.loads(said.tool_calls[0].function.arguments) == {"a": 17, "b": 25}
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42"}
    answer = litellm.completion(**{**asked, "messages": [*QUESTION, message, result]}, tools=[ADD])
    assert "42" in answer.choices[0].message.content


def mistaken(asked: dict[str, Any], error: type[Exception], **mistake: Any) -> None:
    try:
        litellm.completion(**{**asked, **mistake})
    except error:
        return
    raise AssertionError(f"No {error.__name__}.")


for provider in ("openai", "hosted_vllm"):
    asked = {"model": f"{provider}/tiny-chat", "messages": QUESTION, "temperature": 0, **WHERE}
    blocking(asked)
    did(f"{provider}: completion, stream")
    asyncio.run(not_blocking(asked))
    did(f"{provider}: async")
    with_tools(asked)
    did(f"{provider}: a tool's round trip, streamed and not")
    mistaken(asked, litellm.NotFoundError, model=f"{provider}/other")
    mistaken(asked, litellm.AuthenticationError, api_key="wrong")
    mistaken(asked, litellm.ContextWindowExceededError, messages=[{"role": "user", "content": "word " * 9000}])
    did(f"{provider}: errors by class")

plain = litellm.text_completion(model="text-completion-openai/tiny-chat", prompt="Once", max_tokens=4, **WHERE)
assert plain.choices[0].text
did("text completion")
