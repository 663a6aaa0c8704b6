"""What the GPU tests share: engines on the device, models for them, and requests that all arrive before any step."""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig
from asyncllm.types import Response
from tests.checkpoints import build_checkpoint

__all__ = [
    "DEVICE",
    "WIDE_VOCAB",
    "answer_all",
    "device_config",
    "free_memory",
    "random_prompts",
    "wide_checkpoint",
]

DEVICE = "cuda"

WIDE_VOCAB = 2048


def device_config(**fields: Any) -> EngineConfig:
    """Few blocks and rows unless `fields` says otherwise: small models, quick to start."""
    return EngineConfig(**{"device_type": DEVICE, "num_gpu_blocks": 64, "max_batch_size": 8, **fields})


def free_memory() -> int:
    """Bytes of the device that nobody has."""
    gc.collect()
    if DEVICE == "cpu":
        return 0
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


async def answer_all(
    engine: AsyncEngine,
    prompts: Sequence[Sequence[int]],
    configs: GenerationConfig | Sequence[GenerationConfig],
) -> list[Response]:
    """Answer prompts of token ids together. All requests are there before the first step, whatever the timing."""
    if isinstance(configs, GenerationConfig):
        configs = [configs] * len(prompts)
    generations = [
        engine.generate(input_ids=prompt, gen_config=config, stream_response=False)
        for prompt, config in zip(prompts, configs, strict=True)
    ]
    for generation in generations:
        await generation.start()  # nothing here gives the engine's task a turn
    return [await generation.response() for generation in generations]


def random_prompts(seed: int, count: int, longest: int, *, vocab_size: int = WIDE_VOCAB) -> list[list[int]]:
    """Prompts of 1 to `longest` tokens, none of them special."""
    draw = random.Random(seed)
    return [[draw.randrange(4, vocab_size) for _ in range(draw.randint(1, longest))] for _ in range(count)]


def wide_checkpoint(family: str, folder: Path, **overrides: Any) -> Path:
    """A bfloat16 checkpoint wide enough that matrix products may be split, with activations of an ordinary size."""
    fields = {
        "vocab_size": WIDE_VOCAB,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 3,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        **overrides,
    }
    build_checkpoint(family, folder, dtype=torch.bfloat16, **fields)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and "embed" not in name:
            # build_checkpoint's perturbation suits 64 columns; with more, scores grow until attention sees one token.
            tensors[name] = tensor * (64 / tensor.shape[1]) ** 0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
