"""Ranks on CPUs with models that divide in another way than dense ones with a key head for each rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asyncllm import AsyncEngine
from asyncllm.errors import InvalidParameter
from tests.checkpoints import build_checkpoint
from tests.quant.formats import awq, write
from tests.ranks.engines import settings, tokens_of

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop, pytest.mark.timeout(120)]


async def test_whole_experts_give_the_tokens_of_one_rank(tmp_path: Path) -> None:
    folder, found = str(build_checkpoint("mixtral", tmp_path, vocab_size=321)), []
    for fields in ({"isolated": False}, {"tp": 2, "ep": 2}):
        async with AsyncEngine(folder, settings(**fields)) as engine:
            found.append(await tokens_of(engine, (1, 4)))
    assert found[0] == found[1]
    with pytest.raises(InvalidParameter, match="ep is 4 and tp is 2"):
        AsyncEngine(folder, settings(tp=2, ep=4))


@pytest.fixture
def quantized(tmp_path: Path) -> str:
    """A model with two key heads."""
    dense = build_checkpoint("llama", tmp_path / "dense", hidden_size=128, intermediate_size=128, vocab_size=321)
    return str(write(dense, tmp_path / "model", awq(32)))


async def test_quantized_weights_and_cache_on_four_ranks_give_the_tokens_of_one(quantized: str) -> None:
    found = []
    for tp in (1, 4):
        async with AsyncEngine(quantized, settings(isolated=False, tp=tp, quant_policy=4)) as engine:
            before = await tokens_of(engine, (2,))
            await engine.sleep(level=2)
            await engine.wake()
            assert await tokens_of(engine, (2,)) == before
            with pytest.raises(InvalidParameter, match="quantized"):
                await engine.update_weights({"model.layers.0.mlp.down_proj.weight": torch.zeros(128, 128)})
            found.append(before)
    assert found[0] == found[1]
