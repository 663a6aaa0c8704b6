"""LangChain's ChatOpenAI and OpenAI: invoke, stream, batch and their async kin, a chain, an error."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Literal

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

WHERE = {"base_url": os.environ["ASYNCLLM_TEST_URL"] + "/v1", "api_key": os.environ["ASYNCLLM_TEST_KEY"]}
QUESTION = "What is 17 + 25?"


def did(what: str) -> None:
    print(f"did: {what}", flush=True)


chat = ChatOpenAI(model="tiny-chat", temperature=0, stream_usage=True, **WHERE)
answer = chat.invoke(QUESTION)
assert "42" in answer.text
assert answer.usage_metadata["output_tokens"] > 0
assert answer.response_metadata["finish_reason"] == "stop"
did("invoke")
chunks = list(chat.stream(QUESTION))
assert "42" in "".join(chunk.text for chunk in chunks)
assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) > 0
did("stream with usage")
assert len(chat.batch([QUESTION, "Who are you?"], config={"max_concurrency": 2})) == 2
did("batch")
chain = ChatPromptTemplate.from_messages([("system", "Be brief."), ("user", "{question}")]) | chat | StrOutputParser()
assert chain.invoke({"question": QUESTION})
did("chain")


async def not_blocking() -> None:
    assert "42" in (await chat.ainvoke(QUESTION)).text
    assert "42" in "".join([chunk.text async for chunk in chat.astream(QUESTION)])


asyncio.run(not_blocking())
did("async")
logprobs = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata["logprobs"]
assert len(logprobs["content"][0]["top_logprobs"]) == 2
did("logprobs")
plain = OpenAI(model="tiny-chat", max_tokens=8, **WHERE)
assert plain.invoke("Once upon a time")
assert "".join(plain.stream("Once upon a time"))
did("completions")
try:
    ChatOpenAI(model="other", **WHERE).invoke(QUESTION)
except openai.NotFoundError:
    did("errors")


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Oslo"]
    degrees: Annotated[int, Field(ge=-40, le=50)]


brief = ChatOpenAI(model="tiny-chat", max_tokens=100, **WHERE)
for method in ("json_schema", "function_calling"):
    assert isinstance(brief.with_structured_output(Weather, method=method).invoke(QUESTION), Weather)
    did(method)
called = brief.bind_tools([Weather], tool_choice="any").invoke(QUESTION)
assert Weather(**called.tool_calls[0]["args"])
back = [HumanMessage(QUESTION), called, ToolMessage("7 degrees", tool_call_id=called.tool_calls[0]["id"])]
assert brief.bind_tools([Weather]).invoke(back).usage_metadata["output_tokens"]
did("a tool's round trip")
chunks = list(brief.bind_tools([Weather], tool_choice="Weather").stream(QUESTION))
assert Weather(**sum(chunks[1:], chunks[0]).tool_calls[0]["args"])
did("stream of a call")
