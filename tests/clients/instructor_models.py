"""Instructor: an answer as a pydantic model, by a schema, by a tool and by JSON, whole, partly and asynchronously."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Literal

import instructor
import openai
from pydantic import BaseModel, Field

WHERE = {"base_url": os.environ["ASYNCLLM_TEST_URL"] + "/v1", "api_key": os.environ["ASYNCLLM_TEST_KEY"]}
ASKED = {"model": "tiny-chat", "messages": [{"role": "user", "content": "How is the weather?"}], "max_retries": 0}


class Weather(BaseModel):
    city: Literal["Paris", "Oslo"]
    degrees: Annotated[int, Field(ge=-40, le=50)]
    rain: bool


def did(what: str) -> None:
    print(f"did: {what}", flush=True)


for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT):
    client = instructor.from_openai(openai.OpenAI(**WHERE), mode=mode)
    answer = client.chat.completions.create(response_model=Weather, max_tokens=100, **ASKED)
    assert isinstance(answer, Weather)
    did(mode.value)
client = instructor.from_openai(openai.OpenAI(**WHERE), mode=instructor.Mode.TOOLS)
parts = list(client.chat.completions.create_partial(response_model=Weather, max_tokens=100, **ASKED))
assert parts[-1].city in ("Paris", "Oslo")
assert len(parts) > 1
did("partial answers")


async def not_blocking() -> None:
    client = instructor.from_openai(openai.AsyncOpenAI(**WHERE), mode=instructor.Mode.JSON_SCHEMA)
    answers = [client.chat.completions.create(response_model=Weather, max_tokens=100, **ASKED) for _ in range(4)]
    assert all(isinstance(answer, Weather) for answer in await asyncio.gather(*answers))


asyncio.run(not_blocking())
did("async")
