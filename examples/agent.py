"""An agent's round trip: the model calls a tool, the program runs it, and the model answers with the result.

python examples/agent.py [MODEL] [QUESTION]
"""

from __future__ import annotations

import asyncio
import json
import sys

from asyncllm import AsyncEngine, GenerationConfig

NUMBER = {"type": "integer"}
SCHEMA = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
ADD = {"name": "add", "description": "Adds two numbers.", "parameters": SCHEMA}


def add(a: int, b: int) -> str:
    return str(a + b)


async def main(model: str = "tiny-chat", question: str = "What is 4711 + 815?") -> None:
    messages: list[dict] = [{"role": "user", "content": question}]
    tools, config = [{"type": "function", "function": ADD}], GenerationConfig(temperature=0.0, max_new_tokens=128)
    async with AsyncEngine(model) as llm:
        while (reply := await llm.generate(messages, config, tools=tools)).tool_calls:
            calls = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in reply.tool_calls
            ]
            messages.append({"role": "assistant", "content": reply.text or None, "tool_calls": calls})
            for call in reply.tool_calls:
                result = add(**json.loads(call.arguments))
                print(f"called {call.name}({call.arguments}) = {result}")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        print(reply.text)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
