"""What the tests of ranks share."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncllm import EngineConfig, GenerationConfig
from tests.engine.waits import until

__all__ = ["LONG", "ranks", "settings", "soon"]

LONG = GenerationConfig(max_new_tokens=400, ignore_eos=True)


def settings(**fields: Any) -> EngineConfig:
    return EngineConfig(**{"device_type": "cpu", "num_gpu_blocks": 64, "max_batch_size": 8, "isolated": True, **fields})


def ranks() -> list[int]:
    """Processes of ranks that this one has started and not reaped."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in children if b"ranks.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def soon(condition: Callable[[], object]) -> None:
    """Wait until the condition holds. Raises TimeoutError: processes may do what no test expects."""
    async with asyncio.timeout(60):
        await until(condition)
