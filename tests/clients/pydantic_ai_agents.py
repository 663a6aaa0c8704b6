"""Pydantic AI: outputs by a tool and by a schema, a tool that is called, streams."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, KEY = os.environ["ASYNCLLM_TEST_URL"] + "/v1", os.environ["ASYNCLLM_TEST_KEY"]


class Weather(BaseModel):
    city: Literal["Paris", "Oslo"]
    degrees: Annotated[int, Field(ge=-40, le=50)]


def did(what: str) -> None:
    print(f"did: {what}", flush=True)


model = OpenAIChatModel("tiny-chat", provider=OpenAIProvider(base_url=URL, api_key=KEY))
settings = {"temperature": 0.0, "max_tokens": 100}
called: list[str] = []
tooled = Agent(model, output_type=ToolOutput(Weather), model_settings={**settings, "temperature": 1.0}, retries=3)


@tooled.tool_plain
def look(city: Literal["Paris", "Oslo"]) -> str:
    """Look at the sky of a city."""
    called.append(city)
    return "It is 7 degrees."


async def main() -> None:
    assert "42" in (await Agent(model, model_settings=settings).run("What is 17 + 25?")).output
    did("text")
    for kind in (ToolOutput, NativeOutput):
        result = await Agent(model, output_type=kind(Weather), model_settings=settings).run("How is the weather?")
        assert isinstance(result.output, Weather)
        assert result.usage.output_tokens > 0
        did(kind.__name__)
    for _ in range(20):
        assert isinstance((await tooled.run("Call look with city Oslo.")).output, Weather)
        if called:
            break
    assert called
    did("a tool's round trip")
    async with Agent(model, output_type=ToolOutput(Weather), model_settings=settings).run_stream("Weather?") as run:
        seen = [part async for part in run.stream_output(debounce_by=None)]
    assert isinstance(seen[-1], Weather)
    did("stream")


asyncio.run(main())
