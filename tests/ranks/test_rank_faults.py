"""Two ranks of which one or both fail in a step, or are late: rows end, or the engine, and no call waits for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncllm import AsyncEngine, GenerationConfig
from asyncllm.errors import EngineDead, RequestFailed
from tests.checkpoints import build_checkpoint
from tests.ranks.engines import LONG, ranks, settings, soon

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

BOTH_FAIL, ONE_IS_LATE, ONE_FAILS = 311, 312, 313
"""Tokens of prompts, by which a rank knows what to do."""

PLUGIN = f"""
import time
import torch
from asyncllm.agent.model_agent import ModelAgent
from asyncllm.models.decoder import DecoderLM

launch = ModelAgent.launch
forward = DecoderLM.before_last
failing = False

def fails(self, step, *more):
    if failing:
        raise torch.OutOfMemoryError("no memory, as planned")
    return forward(self, step, *more)

def faulty(self, batch):
    global failing
    tokens = {{token for row in batch.prefill for token in row.tokens}}
    last = self.sampler.ranks._group.rank == 1
    if {ONE_IS_LATE} in tokens and last:
        time.sleep(0.5)
    failing = {BOTH_FAIL} in tokens or ({ONE_FAILS} in tokens and last)
    return launch(self, batch)

ModelAgent.launch, DecoderLM.before_last = faulty, fails
"""
GREEDY = GenerationConfig(max_new_tokens=6, ignore_eos=True, temperature=0.0)


@pytest.fixture
def anyio_backend() -> Any:
    """Processes take seconds to start: one event loop, the one that users have."""
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model, and the plugin beside it."""
    (tmp_path / "faulty.py").write_text(PLUGIN)
    return build_checkpoint("llama", tmp_path / "tiny", vocab_size=320)


async def test_a_step_that_fails_on_all_ranks_ends_its_rows_and_on_one_the_engine(folder: Path) -> None:
    plugin = folder.parent / "faulty.py"
    async with AsyncEngine(str(folder), settings(tp=2, plugin=[str(plugin)])) as engine:

        def ask(token: int, config: GenerationConfig = GREEDY) -> Any:
            return engine.generate(input_ids=[5, 6, token], gen_config=config).response()

        expected = await ask(7)
        for _ in range(2):
            with pytest.raises(RequestFailed) as failed:
                await ask(BOTH_FAIL)
            assert "as planned" in str(failed.value.__cause__)
            assert (await ask(7)).token_ids == expected.token_ids
        late, other = await asyncio.gather(ask(ONE_IS_LATE), ask(7))
        assert late.generate_token_len == 6
        assert other.token_ids == expected.token_ids
        running = asyncio.create_task(ask(7, LONG))
        await soon(lambda: engine.stats().running)
        for error in await asyncio.wait_for(asyncio.gather(ask(ONE_FAILS), running, return_exceptions=True), 60):
            assert isinstance(error, EngineDead)
            assert "as planned" in str(error.__cause__)
        await soon(lambda: not ranks())
