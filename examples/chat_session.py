"""A conversation that remembers, and a fork of it that goes another way.

python examples/chat_session.py [MODEL]
"""

from __future__ import annotations

import asyncio
import sys

from asyncllm import AsyncEngine, GenerationConfig

SHORT = GenerationConfig(max_new_tokens=48)


async def main(model: str = "tiny-chat") -> None:
    async with AsyncEngine(model) as llm, llm.session() as session:
        for prompt in ("Hello!", "What is 17 + 25?"):
            response = await session.chat(prompt, SHORT)
            print(f"> {prompt}\n{response.text}")
            print(f"  ({response.history_token_len} tokens of history, {response.cached_token_len} from the cache)")

        async with session.fork() as other:
            await other.chat("Tell me a story.", SHORT)
            print(f"the fork has {len(other.history)} turns, the conversation {len(session.history)}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
