"""Embeddings as those of transformers' hidden states, through the whole engine, on both agents."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm import AsyncEngine, Embedding, EngineConfig, GenerationConfig
from asyncllm.agent.executor import StepExecutor
from asyncllm.agent.model_agent import ModelAgent
from asyncllm.types import Pooling
from tests.agent.tiny_model import AheadAgent
from tests.models.parity import FAMILIES, Case, folder_of, oracle_folder_of, random_tokens
from tests.remote_layouts import LAYOUTS

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop]

TOLERANCE = 1e-5
LENGTHS = (1, 2, 33, 50, 80, 17, 100, 9)
PROMPTS = [random_tokens(seed, length) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(params=[ModelAgent, AheadAgent])
def agent(request: pytest.FixtureRequest) -> type[ModelAgent]:
    kind: type[ModelAgent] = request.param
    return kind


def engine_of(agent: type[ModelAgent], family: str = "llama", **settings: Any) -> AsyncEngine:
    folder = folder_of(Case(family, "default"))
    fields = {"device_type": "cpu", "dtype": "float32", "num_gpu_blocks": 200, "block_size": 4, **settings}
    config = EngineConfig(**fields).checked()
    return AsyncEngine(str(folder), config, executor=StepExecutor(lambda: agent(config, Path(folder))))


@cache
def _oracle(family: str) -> Any:
    from transformers import AutoModel

    folder = oracle_folder_of(Case(family, "default"))
    return AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@cache
def _hidden(family: str, tokens: tuple[int, ...]) -> Tensor:
    with torch.inference_mode():
        states: Tensor = _oracle(family)(torch.tensor([tokens])).last_hidden_state[0]
    return states


def expected(tokens: Sequence[int], pooling: Pooling, family: str = "llama", dimensions: int | None = None) -> Tensor:
    """The embedding that transformers' hidden states give."""
    states = _hidden(family, tuple(tokens))
    pooled = states.mean(0) if pooling == "mean" else states[-1]
    return torch.nn.functional.normalize(pooled[:dimensions], dim=0)


def assert_close(embedding: Any, expected: Tensor) -> None:
    assert isinstance(embedding, Embedding)
    torch.testing.assert_close(torch.tensor(embedding.values), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(family, agent, id=family)
        for family, agent in zip(FAMILIES, cycle((ModelAgent, AheadAgent)))
        if not (family in LAYOUTS and LAYOUTS[family].patch)
    ],
)
async def test_families(family: str, kind: type[ModelAgent]) -> None:
    """With the two agents in turns, whole and in chunks, which are longer and shorter than windows and blocks."""
    for budget in (2048, 7):
        async with engine_of(kind, family, max_prefill_token_num=budget) as engine:
            for pooling in ("last", "mean"):
                assert_close(await engine.embed(PROMPTS[4], pooling=pooling), expected(PROMPTS[4], pooling, family))


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("budget", [2048, 5])
async def test_alone_and_batched(agent: type[ModelAgent], pooling: Pooling, budget: int) -> None:
    async with engine_of(agent, max_prefill_token_num=budget, enable_prefix_caching=False) as engine:
        together = await engine.embed(PROMPTS, pooling=pooling, dimensions=24)
        assert isinstance(together, list)
        for prompt, embedding in zip(PROMPTS, together, strict=True):
            wanted = expected(prompt, pooling, dimensions=24)
            assert_close(embedding, wanted)
            assert_close(await engine.embed(prompt, pooling=pooling, dimensions=24), wanted)
            assert embedding.input_token_len == len(prompt)


async def test_after_cached_blocks(agent: type[ModelAgent]) -> None:
    prompt = PROMPTS[6]
    longer = [*prompt[:60], *PROMPTS[3]]
    async with engine_of(agent) as engine:
        assert_close(await engine.embed(prompt, pooling="mean"), expected(prompt, "mean"))
        assert engine.stats().cached_tokens == 0
        assert_close(await engine.embed(prompt), expected(prompt, "last"))
        assert engine.stats().cached_tokens == 96
        assert_close(await engine.embed(longer), expected(longer, "last"))
        assert engine.stats().cached_tokens == 96 + 60
        assert_close(await engine.embed(longer, pooling="mean"), expected(longer, "mean"))
        assert engine.stats().cached_tokens == 96 + 60


@pytest.mark.parametrize("pooling", ["last", "mean"])
async def test_after_preemption(agent: type[ModelAgent], pooling: Pooling) -> None:
    """An older answer takes the blocks of a prompt whose chunks are half done."""
    settings = GenerationConfig(max_new_tokens=24, ignore_eos=True)
    async with engine_of(agent, num_gpu_blocks=12, max_prefill_token_num=2, enable_prefix_caching=False) as engine:
        generation = engine.generate(input_ids=PROMPTS[7][:8], gen_config=settings)
        await anext(generation)
        embedding = asyncio.create_task(engine.embed(PROMPTS[2][:32], pooling=pooling))
        assert (await generation).generate_token_len == 24
        assert_close(await embedding, expected(PROMPTS[2][:32], pooling))
        assert engine.stats().preemptions > 0


async def test_beside_answers(agent: type[ModelAgent]) -> None:
    settings = GenerationConfig(max_new_tokens=30, ignore_eos=True, logprobs=2)
    async with engine_of(agent, max_prefill_token_num=16, enable_prefix_caching=False) as engine:
        alone = [await engine.generate(input_ids=prompt, gen_config=settings) for prompt in PROMPTS]
        *together, last, mean = await asyncio.gather(
            *(engine.generate(input_ids=prompt, gen_config=settings).response() for prompt in PROMPTS),
            engine.embed(PROMPTS),
            engine.embed(PROMPTS, pooling="mean"),
        )
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    for index, prompt in enumerate(PROMPTS):
        assert_close(last[index], expected(prompt, "last"))
        assert_close(mean[index], expected(prompt, "mean"))


async def test_a_text_is_encoded_as_a_prompt_without_a_template(agent: type[ModelAgent]) -> None:
    async with engine_of(agent) as engine:
        text = "The quick brown fox<|im_end|>"
        ids: Any = await engine.encode(text, do_preprocess=False)
        embedding = await engine.embed(text)
        assert_close(embedding, expected(ids, "last"))
        assert isinstance(embedding, Embedding)
        assert embedding.input_token_len == len(ids)
