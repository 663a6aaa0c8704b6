"""What the tests of ranks share."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from asyncllm import EngineConfig, GenerationConfig
from tests.engine.waits import until

__all__ = ["LONG", "ranks", "settings", "soon"]

LONG = GenerationConfig(max_new_tokens=400, ignore_eos=True)


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
