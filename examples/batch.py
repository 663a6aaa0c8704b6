"""Answer many prompts as one batch, each with its own settings.

python examples/batch.py [MODEL]
"""

from __future__ import annotations

import sys

from asyncllm import EngineConfig, GenerationConfig, pipeline


def main(model: str = "tiny-chat") -> None:
    prompts = [f"What is {number} + 25?" for number in range(16)]
    settings = [GenerationConfig(max_new_tokens=8 + number) for number in range(16)]
    with pipeline(model, backend_config=EngineConfig(max_batch_size=16)) as pipe:
        answers = pipe(prompts, gen_config=settings, use_tqdm=True)
        for prompt, answer in zip(prompts, answers, strict=True):
            print(f"{prompt} {answer.text} ({answer.generate_token_len} tokens, {answer.finish_reason})")
        print(f"{pipe.stats().steps} steps")


if __name__ == "__main__":
    main(*sys.argv[1:])
