"""With `batch_invariant=True` a CPU gives a request the same bits alone, in chunks and beside others."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig, Response
from tests.models.parity import Case, folder_of

dice = Random(3)
PROMPTS = [[dice.randrange(4, 320) for _ in range(length)] for length in (9, 30, 4, 17)]
CONFIG = GenerationConfig(max_new_tokens=6, ignore_eos=True, logprobs=3)
KINDS = {
    "deepseek_v3": "latents",
    "jamba": "Mamba, experts",
    "lfm2": "short convolutions",
    "nemotron_h": "Mamba-2, experts chosen by sigmoids",
    "qwen2_moe": "a shared expert behind a gate",
    "qwen3_next": "delta nets, gated attention",
}
"""Families whose layers take sums and functions of other shapes than those of test_differential."""


def new_engine(family: str, **fields: Any) -> AsyncEngine:
    settings = {"device_type": "cpu", "block_size": 4, "max_batch_size": 6, "num_gpu_blocks": 200}
    config = EngineConfig(**{**settings, "batch_invariant": True, "enable_prefix_caching": False, **fields})
    return AsyncEngine(str(folder_of(Case(family, "default"))), config)


def bits(responses: list[Response]) -> list[Any]:
    return [(response.token_ids, response.logprobs) for response in responses]


async def alone(family: str) -> list[Any]:
    async with new_engine(family, max_prefill_token_num=64) as engine:
        return bits([await engine.generate(input_ids=each, gen_config=CONFIG) for each in PROMPTS])


async def together(family: str) -> list[Any]:
    async with new_engine(family, max_prefill_token_num=16) as engine:
        answers = (engine.generate(input_ids=each, gen_config=CONFIG).response() for each in PROMPTS)
        found = bits(await asyncio.gather(*answers))
        assert engine.stats().steps < 6 * len(PROMPTS)
    return found


@pytest.mark.parametrize("family", KINDS)
def test_the_same_bits_in_any_batch(family: str) -> None:
    assert asyncio.run(together(family)) == asyncio.run(alone(family))
