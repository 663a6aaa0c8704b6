"""OpenAI's agents: a tool's round trip, an answer of a type, a hand-over, streams; over chat completions."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

set_tracing_disabled(True)
CLIENT = AsyncOpenAI(base_url=os.environ["ASYNCLLM_TEST_URL"] + "/v1", api_key=os.environ["ASYNCLLM_TEST_KEY"])
MODEL = OpenAIChatCompletionsModel(model="tiny-chat", openai_client=CLIENT)


class Weather(BaseModel):
    city: Literal["Paris", "Oslo"]
    degrees: Annotated[int, Field(ge=-40, le=50)]


def did(what: str) -> None:
    print(f"did: {what}", flush=True)


called: list[str] = []


@function_tool
def look(city: Literal["Paris", "Oslo"]) -> str:
    """Look at the sky of a city."""
    called.append(city)
    return "It is 7 degrees."


async def main() -> None:
    plain = Agent(name="plain", model=MODEL, model_settings=ModelSettings(temperature=0.0))
    assert "42" in (await Runner.run(plain, "What is 17 + 25?")).final_output
    did("text")
    typed = Agent(name="typed", model=MODEL, output_type=Weather, model_settings=ModelSettings(max_tokens=100))
    assert isinstance((await Runner.run(typed, "How is the weather?")).final_output, Weather)
    did("an answer of a type")
    # The first turn has to call the tool; the library lets the model choose in the next one.
    tooled = Agent(
        name="tooled", model=MODEL, tools=[look], model_settings=ModelSettings(tool_choice="required", max_tokens=100)
    )
    result = await Runner.run(tooled, "How is the weather?")
    assert called
    assert isinstance(result.final_output, str)
    did("a tool's round trip")
    called.clear()
    streamed = Runner.run_streamed(tooled, "How is the weather?")
    kinds = [event.type async for event in streamed.stream_events()]
    assert called
    assert "raw_response_event" in kinds
    assert "run_item_stream_event" in kinds
    did("stream with a tool")


asyncio.run(main())
