"""On a GPU, embeddings of the model's own table give the answers of the tokens: out of graphs, and beside answers that
are decoded."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from asyncllm import AsyncEngine, GenerationConfig
from tests.checkpoints import build_checkpoint
from tests.gpu.engines import device_config

pytestmark = [pytest.mark.gpu, pytest.mark.anyio, pytest.mark.timeout(180)]

LENGTHS = (5, 40, 90)
"""Some are computed in one captured step, some in several."""


@pytest.fixture(params=["llama", "granite"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return build_checkpoint(request.param, tmp_path / request.param)


@pytest.fixture
def table(folder: Path) -> Tensor:
    return load_file(folder / "model.safetensors")["model.embed_tokens.weight"]


async def test_answers_are_those_of_the_tokens(folder: Path, table: Tensor) -> None:
    config = device_config(dtype="float32", block_size=16, max_prefill_token_num=48, enable_prompt_embeds=True)
    greedy = GenerationConfig(max_new_tokens=8, ignore_eos=True, logprobs=1)
    async with AsyncEngine(str(folder), config) as engine:
        beside = engine.generate("beside", GenerationConfig(max_new_tokens=200, ignore_eos=True))
        async with beside:
            await anext(beside)
            for length in LENGTHS:
                ids = [4 + 7 * at % 250 for at in range(length)]
                of_tokens, of_table = await asyncio.gather(
                    engine.generate(input_ids=ids, gen_config=greedy).response(),
                    engine.generate(input_embeddings=table[ids], gen_config=greedy).response(),
                )
                assert of_table.token_ids == of_tokens.token_ids
                for one, other in zip(of_table.logprobs or (), of_tokens.logprobs or (), strict=True):
                    assert one == pytest.approx(other, abs=1e-3)
        engine.check_idle()
