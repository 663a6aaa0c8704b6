"""LlamaIndex's OpenAILike: complete, chat, both streamed, both async, as a chat model and as a plain one."""

from __future__ import annotations

import asyncio
import os

from llama_index.core.llms import ChatMessage
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
        assert "42" in llm.complete(QUESTION).text
