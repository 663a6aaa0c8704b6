"""Stream several answers at once from synchronous code.

python examples/stream_infer.py [MODEL]
"""

from __future__ import annotations

import sys

from asyncllm import GenerationConfig, pipeline

PROMPTS = ["What is 17 + 25?", "Who are you?", "Tell me a story."]


def main(model: str = "tiny-chat") -> None:
    answers = [""] * len(PROMPTS)
    with pipeline(model) as pipe:
        for chunk in pipe.stream_infer(PROMPTS, gen_config=GenerationConfig(max_new_tokens=64)):
            answers[chunk.index] += chunk.text
            if chunk.finish_reason is not None:
                print(f"{PROMPTS[chunk.index]} -> {answers[chunk.index]} ({chunk.finish_reason})")


if __name__ == "__main__":
    main(*sys.argv[1:])
