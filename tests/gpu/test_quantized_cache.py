"""Quantized caches on a GPU: what the CPU computes with the same codes, out of graphs, in chunks, beside others."""

from __future__ import annotations

from typing import Any

import pytest

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig
from tests.gpu.engines import answer_all, device_config
from tests.models.parity import Case, folder_of, random_tokens

pytestmark = [pytest.mark.gpu, pytest.mark.anyio, pytest.mark.timeout(240)]

PROMPTS = [random_tokens(20 + index, length) for index, length in enumerate((150, 40, 3, 90))]
GREEDY = GenerationConfig(max_new_tokens=24, ignore_eos=True, logprobs=1)
ALLOWED = {8: 0.1, "fp8": 0.2, 4: 0.5}
"""Mean distance of log-probabilities: bfloat16 against float32, and codes that went the other way."""


@pytest.mark.parametrize("policy", [8, 4, "fp8"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "bloom", "glm4"])
async def test_answers_are_those_of_the_cpu(family: str, policy: Any) -> None:
    folder = str(folder_of(Case(family, "default")))
    async with AsyncEngine(folder, device_config(dtype="bfloat16", quant_policy=policy, block_size=16)) as engine:
        answers = await answer_all(engine, PROMPTS, GREEDY)
        again = await answer_all(engine, PROMPTS, GREEDY)
    assert [each.token_ids for each in again] == [each.token_ids for each in answers]
    reference = EngineConfig(device_type="cpu", dtype="float32", num_gpu_blocks=64, quant_policy=policy)
    async with AsyncEngine(folder, reference) as engine:
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            logits = await engine.get_logits([*prompt, *answer.token_ids])
            scores = logits[len(prompt) - 1 : -1].log_softmax(-1)
            found = [step[token] for step, token in zip(answer.logprobs or [], answer.token_ids, strict=True)]
            wanted = scores[range(len(found)), answer.token_ids].tolist()
            distance = sum(abs(a - b) for a, b in zip(found, wanted, strict=True)) / len(found)
            assert distance < ALLOWED[policy], (family, policy, distance)


@pytest.mark.parametrize("policy", [8, 4, "fp8"])
async def test_neighbours_and_copies_leave_every_bit(policy: Any) -> None:
    folder = str(folder_of(Case("llama", "default")))
    fields: dict[str, Any] = {"dtype": "bfloat16", "quant_policy": policy, "block_size": 16, "batch_invariant": True}
    async with AsyncEngine(folder, device_config(**fields)) as engine:
        alone = [(await answer_all(engine, [each], GREEDY))[0] for each in PROMPTS]
    tight = {"num_gpu_blocks": 16, "eviction_type": "copy", "num_cpu_blocks": 64}
    async with AsyncEngine(folder, device_config(**{**fields, **tight})) as engine:
        together = await answer_all(engine, PROMPTS, GREEDY)
        assert engine.stats().preemptions > 0
    assert [each.logprobs for each in together] == [each.logprobs for each in alone]
