"""bench/grammars.py: rows with grammars beside others, and what a row's gaps are."""

from __future__ import annotations

import pytest
from engines import engine_config
from grammars import Row, format_table, run_level

from asyncllm import AsyncEngine, EngineConfig


def test_tokens_of_a_chunk_share_the_gap_before_it() -> None:
    assert Row(True, [(1.0, 1), (1.5, 1), (2.5, 4)]).gaps() == pytest.approx([0.5, 0.25, 0.25, 0.25, 0.25])


@pytest.fixture
def config() -> EngineConfig:
    return engine_config("tiny-chat", '{"num_gpu_blocks": 32, "max_batch_size": 4, "device_type": "cpu"}')


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["json", "pattern"])
async def test_held_answers_last_as_long_as_the_others(kind: str, config: EngineConfig) -> None:
    async with AsyncEngine("tiny-chat", config) as engine:
        figures = [await run_level(engine, 3, held, 12, kind) for held in (0, 2, 3)]
    assert [figure["held_ms"] is None for figure in figures] == [True, False, False]
    assert [figure["free_ms"] is None for figure in figures] == [False, False, True]
    assert format_table(figures).count("\n") == 4
