"""What the tests of ranks share."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig
from tests.engine.waits import until

__all__ = ["LONG", "ranks", "settings", "soon", "tokens_of"]

LONG = GenerationConfig(max_new_tokens=400, ignore_eos=True)

WAYS = [
    GenerationConfig(max_new_tokens=8, temperature=0.0),
    GenerationConfig(max_new_tokens=8, top_k=0, temperature=0.9, random_seed=3, logprobs=3),
    GenerationConfig(max_new_tokens=8, top_k=0, top_p=0.9, min_p=0.01, random_seed=4, repetition_penalty=1.2),
    GenerationConfig(max_new_tokens=8, top_k=30, top_p=0.8, random_seed=5, logit_bias={7: 2.0}, prompt_logprobs=1),
]
"""Of sampling: each rank draws some of the rows, from whole logits."""

LISTED_WAYS = [
    GenerationConfig(max_new_tokens=6, temperature=0.0),
    GenerationConfig(max_new_tokens=6, top_k=0, temperature=0.9, random_seed=6),
    GenerationConfig(max_new_tokens=6, top_k=40, top_p=0.9, random_seed=7),
]
"""Those for which ranks tell each other a few tokens of a row."""


def settings(**fields: Any) -> EngineConfig:
    return EngineConfig(**{"device_type": "cpu", "num_gpu_blocks": 64, "max_batch_size": 8, "isolated": True, **fields})


def ranks(parent: int | None = None) -> list[int]:
    """Processes of ranks that this one, or `parent`, has started and not reaped."""
    found = []
    for thread in Path(f"/proc/{parent or os.getpid()}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # what is gone meanwhile
            for pid in (thread / "children").read_text().split():
                if b"ranks.rank" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(int(pid))
    return found


async def soon(condition: Callable[[], object]) -> None:
    """Wait until the condition holds. Raises TimeoutError: processes may do what no test expects."""
    async with asyncio.timeout(60):
        await until(condition)


async def tokens_of(engine: AsyncEngine, counts: tuple[int, ...] = (1, 4, 9)) -> list[list[int]]:
    """Return the tokens of prompts of so many times five tokens, in all ways of sampling."""
    found = []
    for ways in (WAYS, LISTED_WAYS):
        tasks = [
            asyncio.create_task(engine.generate(input_ids=[7, 8, 9, 200, 31] * count, gen_config=config).response())
            for count in counts
            for config in ways
        ]
        found += [(await task).token_ids for task in tasks]
    return found
