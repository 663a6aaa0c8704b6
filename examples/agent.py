"""An agent's round trip: the model calls a tool, the program runs it, and the model answers with the result.

tiny-chat has not learned tools, so its template gets a place for them and the call is asked for; which numbers it calls
with is the model's own choice. A model that calls by itself needs neither: leave the template and `tool_choice` out.

python examples/agent.py [MODEL]
"""

from __future__ import annotations

import asyncio
import json
import sys

from asyncllm import AsyncEngine, ChatTemplateConfig, EngineConfig, GenerationConfig

TEMPLATE = """{% if tools %}<|im_start|>system
You may call: {{ tools | tojson }}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}{% for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
SCHEMA = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
ADD = {"name": "add", "description": "Adds two numbers.", "strict": True, "parameters": SCHEMA}


def add(a: int, b: int) -> str:
    return str(a + b)


async def main(model: str = "tiny-chat") -> None:
    messages: list[dict] = [{"role": "user", "content": "What is 17 + 25?"}]
    tools, config = [{"type": "function", "function": ADD}], GenerationConfig(temperature=0.0, max_new_tokens=128)
    settings = EngineConfig(tool_call_parser="hermes")
    async with AsyncEngine(model, settings, ChatTemplateConfig(chat_template=TEMPLATE)) as llm:
        asked = await llm.generate(messages, config, tools=tools, tool_choice="required", parallel_tool_calls=False)
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in asked.tool_calls
        ]
        messages.append({"role": "assistant", "content": asked.text or None, "tool_calls": calls})
        for call in asked.tool_calls:
            result = add(**json.loads(call.arguments))
            print(f"called {call.name}({call.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        print((await llm.generate(messages, config, tools=tools, tool_choice="none")).text)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
