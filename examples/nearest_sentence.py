"""Find the sentence that is nearest to each question, by the cosine of their embeddings.

python examples/nearest_sentence.py [MODEL]
"""

from __future__ import annotations

import asyncio
import sys

from asyncllm import AsyncEngine, Embedding

KNOWN = ["What is 3 + 4?", "Tell me a story.", "Who are you?", "Hello!", "What colour is the sky?"]
ASKED = ["What is 17 + 25?", "Tell me a story about a bear.", "What is your name?", "Hi there!"]


def cosine(one: Embedding, other: Embedding) -> float:
    # Their lengths are 1.
    return sum(a * b for a, b in zip(one.values, other.values, strict=True))


async def main(model: str = "tiny-chat") -> None:
    async with AsyncEngine(model) as llm:
        known = await llm.embed(KNOWN, pooling="mean")
        for question in ASKED:
            embedding = await llm.embed(question, pooling="mean")
            nearest, sentence = max(zip((cosine(embedding, each) for each in known), KNOWN, strict=True))
            print(f"{question} -> {sentence} ({nearest:.2f})")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
