"""With `batch_invariant=True` a CPU gives a request the same bits alone, in chunks and beside others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig, Response
from tests.adapters import shapes_of, write_adapter
from tests.models.parity import Case, folder_of, hub_model

dice = Random(3)
PROMPTS = [[dice.randrange(4, 320) for _ in range(length)] for length in (9, 30, 4, 17)]
CONFIG = GenerationConfig(max_new_tokens=6, ignore_eos=True, logprobs=3)
KINDS = {
    "deepseek_v3": "latents",
    "jamba": "Mamba, experts",
    "kimi_linear": "delta nets whose features decay, latents that no position turns",
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


async def alone(family: str, adapter: str | None = None, **fields: Any) -> list[Any]:
    async with new_engine(family, max_prefill_token_num=64, **fields) as engine:
        return bits(
            [await engine.generate(input_ids=each, gen_config=CONFIG, adapter_name=adapter) for each in PROMPTS]
        )


async def together(family: str, adapter: str | None = None, **fields: Any) -> list[Any]:
    async with new_engine(family, max_prefill_token_num=16, **fields) as engine:
        answers = (
            engine.generate(input_ids=each, gen_config=CONFIG, adapter_name=adapter).response() for each in PROMPTS
        )
        found = bits(await asyncio.gather(*answers))
        assert engine.stats().steps < 6 * len(PROMPTS)
    return found


@pytest.mark.parametrize("family", KINDS)
def test_the_same_bits_in_any_batch(family: str) -> None:
    assert asyncio.run(together(family)) == asyncio.run(alone(family))


def test_the_same_bits_with_an_adapter(tmp_path: Path) -> None:
    shapes = shapes_of(hub_model(Case("llama", "default")), "proj")
    settings: dict[str, Any] = {"adapter": "a", "adapters": {"a": str(write_adapter(tmp_path, shapes, rank=11))}}
    assert asyncio.run(together("llama", **settings)) == asyncio.run(alone("llama", **settings))
