"""Find five digits in a text of four times the model's context, with dynamic NTK scaling of positions and without.

python examples/passkey.py [MODEL] [TRIES]
"""

from __future__ import annotations

import random
import sys

from asyncllm import EngineConfig, GenerationConfig, pipeline

SENTENCES = 890
"""Some 8,200 tokens of tiny-chat, which was trained on 2,048."""

THINGS = ("the cart", "a baker", "the old mill", "my neighbour", "the river", "a small dog", "the teacher", "our boat")
DOINGS = ("waits near the bridge", "sings in the garden", "is red and quiet", "comes home late", "likes warm bread")

CONTEXT = 8704

CONFIGS = {
    "with rope_scaling_factor=2": EngineConfig(rope_scaling_factor=2.0, session_len=CONTEXT),
    "without": EngineConfig(hf_overrides={"max_position_embeddings": CONTEXT}),
}


def passkey_prompt(chance: random.Random) -> tuple[str, str]:
    """Return a text with the passkey somewhere in it and the question behind it, and the passkey."""
    key = f"{chance.randrange(10**5):05}"
    text = [f"{chance.choice(THINGS)} {chance.choice(DOINGS)}.".capitalize() for _ in range(SENTENCES)]
    text.insert(chance.randrange(SENTENCES + 1), f"The passkey is {key}.")
    return f"Read this text. {' '.join(text)} What is the passkey?", key


def main(model: str = "tiny-chat", tries: str = "1") -> None:
    asked = [passkey_prompt(random.Random(seed)) for seed in range(int(tries))]
    for name, config in CONFIGS.items():
        with pipeline(model, backend_config=config) as pipe:
            answers = pipe([prompt for prompt, _ in asked], gen_config=GenerationConfig(max_new_tokens=16))
        found = [f"passkey is {key}." in answer.text for (_, key), answer in zip(asked, answers, strict=True)]
        print(f"found {sum(found)} of {len(found)} in {answers[0].input_token_len} tokens {name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
