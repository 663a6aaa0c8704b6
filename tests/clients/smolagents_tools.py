"""smolagents: an agent that calls a tool of its own accord, the same by streams, and a model's schema."""

from __future__ import annotations

import json
import os

from smolagents import ChatMessageStreamDelta, OpenAIModel, ToolCallingAgent, tool
from smolagents.agents import EMPTY_PROMPT_TEMPLATES

URL, KEY = os.environ["ASYNCLLM_TEST_URL"] + "/v1", os.environ["ASYNCLLM_TEST_KEY"]
QUESTION = [{"role": "user", "content": [{"type": "text", "text": "What is 4711 + 815?"}]}]
called: list[tuple[int, int]] = []


def did(what: str) -> None:
    print(f"did: {what}", flush=True)


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: One number.
        b: The other number.
    """
    called.append((a, b))
    return a + b


model = OpenAIModel("tiny-chat", api_base=URL, api_key=KEY, temperature=0.0, max_tokens=100)

answer = model.generate(QUESTION, tools_to_call_from=[add], tool_choice="auto")
assert json.loads(answer.tool_calls[0].function.arguments) == {"a": 4711, "b": 815}
assert answer.token_usage.output_tokens > 0
did("a call")

pieces = list(model.generate_stream(QUESTION, tools_to_call_from=[add], tool_choice="auto"))
assert all(isinstance(piece, ChatMessageStreamDelta) for piece in pieces)
arguments = "".join(call.function.arguments or "" for piece in pieces for call in piece.tool_calls or [])
assert json.loads(arguments) == {"a": 4711, "b": 815}
did("a call in a stream")

for streams in (False, True):
    called.clear()
    # The agent's own prompts are longer than the model's context.
    agent = ToolCallingAgent(
        [add], model, prompt_templates=EMPTY_PROMPT_TEMPLATES, max_steps=1, stream_outputs=streams, verbosity_level=0
    )
    agent.run("What is 4711 + 815?")
    assert called == [(4711, 815)]
    assert "5526" in agent.memory.steps[1].observations
    did("an agent's round trip" + (", streamed" if streams else ""))

schema = {"type": "object", "properties": {"sum": {"type": "integer", "maximum": 99}}, "required": ["sum"]}
form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema, "strict": True}}
assert json.loads(model.generate(QUESTION, response_format=form).content)["sum"] <= 99
did("a schema")
