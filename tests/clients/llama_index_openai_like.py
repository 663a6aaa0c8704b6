"""LlamaIndex's OpenAILike: complete, chat, both streamed, both async, as a chat model and as a plain one."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

WHERE = {"api_base": os.environ["ASYNCLLM_TEST_URL"] + "/v1", "api_key": os.environ["ASYNCLLM_TEST_KEY"]}
QUESTION = "What is 17 + 25?"
BEGINNING = "The name of the girl"


MESSAGES = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content=QUESTION)]


def did(what: str) -> None:
    print(f"did: {what}", flush=True)


def blocking(llm: OpenAILike) -> None:
    assert llm.complete(BEGINNING).text
    assert "".join(piece.delta or "" for piece in llm.stream_complete(BEGINNING))
    whole = llm.chat(MESSAGES).message.content
    assert whole == "".join(piece.delta or "" for piece in llm.stream_chat(MESSAGES))


async def not_blocking(llm: OpenAILike) -> None:
    assert (await llm.acomplete(BEGINNING)).text
    whole = (await llm.achat(MESSAGES)).message.content
    assert whole == "".join([piece.delta or "" async for piece in await llm.astream_chat(MESSAGES)])


def weather(city: str) -> str:
    """The weather of a city."""
    return f"Rain in {city}."


def calling(llm: OpenAILike) -> None:
    asked: dict[str, Any] = {
        "tools": [FunctionTool.from_defaults(weather)],
        "user_msg": "Weather in Bern?",
        "tool_required": True,
    }
    (call,) = llm.get_tool_calls_from_response(llm.chat_with_tools(**asked))
    assert call.tool_name == "weather"
    assert call.tool_kwargs["city"]
    *_, last = llm.stream_chat_with_tools(**asked)
    (streamed,) = llm.get_tool_calls_from_response(last)
    assert streamed.tool_kwargs == call.tool_kwargs
    assert weather(**call.tool_kwargs)


for is_chat in (True, False):
    llm = OpenAILike(
        model="tiny-chat", is_chat_model=is_chat, temperature=0, max_tokens=32, context_window=2048, **WHERE
    )
    kind = "chat model" if is_chat else "plain model"
    blocking(llm)
    did(f"{kind}: complete, chat, both streamed")
    asyncio.run(not_blocking(llm))
    did(f"{kind}: async")
    if is_chat:
        able = {**WHERE, "is_function_calling_model": True, "is_chat_model": True, "context_window": 2048}
        calling(OpenAILike(model="tiny-chat", temperature=0, max_tokens=80, **able))
        did(f"{kind}: a tool, streamed and not")
        assert "42" in llm.complete(QUESTION).text
