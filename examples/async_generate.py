"""Stream one answer, await another, and give a third a deadline: leaving early is the abort.

python examples/async_generate.py [MODEL]
"""

from __future__ import annotations

import asyncio
import sys

from asyncllm import AsyncEngine, GenerationConfig


async def main(model: str = "tiny-chat") -> None:
    async with AsyncEngine(model) as llm:
        async for chunk in llm.generate("What is 17 + 25?"):
            print(chunk.text, end="", flush=True)
        print()

        sampled = GenerationConfig(top_k=40, temperature=0.8, random_seed=7, max_new_tokens=64)
        response = await llm.generate([{"role": "user", "content": "Tell me a story."}], sampled)
        print(f"{response.text!r}: {response.generate_token_len} tokens, {response.finish_reason}")

        try:
            async with asyncio.timeout(0.05):
                await llm.generate("Tell me a story.", GenerationConfig(max_new_tokens=None, ignore_eos=True))
        except TimeoutError:
            print("stopped by its deadline")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
