"""The agent over checkpoints from disk: every kind of attention, in chunks and in company."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from asyncllm.agent.executor import open_executor
from asyncllm.agent.model_agent import ModelAgent
from asyncllm.config import EngineConfig
from asyncllm.errors import InvalidParameter
from asyncllm.protocol import Batch, PrefillRow, SamplingParams, SlotStart
from tests.agent.tiny_model import GREEDY, Driver, plain_greedy, plain_logits
from tests.checkpoints import build_checkpoint

CONFIG = EngineConfig(device_type="cpu", block_size=8, num_gpu_blocks=60, max_batch_size=4)


@pytest.fixture(scope="module", params=["llama", "gemma2", "qwen3_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def prompt_of(length: int, seed: int, vocab_size: int) -> list[int]:
    return random.Random(seed).choices(range(vocab_size), k=length)


def test_a_batch_from_disk_equals_plain_forward_passes(folder: Path) -> None:
    agent = ModelAgent(CONFIG, folder)
    vocab_size = agent.limits.vocab_size
    prompts = [prompt_of(length, length, vocab_size) for length in (50, 3, 17)]
    driver = Driver(agent)
    for slot, prompt in enumerate(prompts):
        driver.start(slot, prompt)
    driver.step(prefill=[driver.chunk(0, prompts[0][:23], sample=False), driver.chunk(1, prompts[1])])
    answers: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for decode, rows in [
        ([1], [(0, prompts[0][23:], True)]),
        ([0, 1], [(2, prompts[2][:16], False)]),
        ([1, 0], [(2, prompts[2][16:], True)]),
        ([2, 0, 1], []),
        ([0, 2, 1], []),
    ]:
        output = driver.step(decode, [driver.chunk(slot, tokens, sample=last) for slot, tokens, last in rows])
        for slot, token in zip(output.slots, output.tokens, strict=True):
            answers[slot].append(token)
    assert answers[0] == plain_greedy(agent.model, prompts[0], 5)
    assert answers[1] == plain_greedy(agent.model, prompts[1], 6)[1:]
    assert answers[2] == plain_greedy(agent.model, prompts[2], 3)


def test_scores_from_disk_equal_a_plain_forward_pass(folder: Path) -> None:
    agent = ModelAgent(CONFIG, folder)
    prompt = prompt_of(45, 1, agent.limits.vocab_size)
    driver = Driver(agent)
    driver.start(0, prompt)
    logits = []
    for begin in range(0, 45, 13):
        row = driver.chunk(0, prompt[begin : begin + 13], sample=False, output_logits=True)
        logits.append(driver.step(prefill=[row]).logits[0])
    torch.testing.assert_close(torch.cat(logits), plain_logits(agent.model, prompt), atol=1e-4, rtol=1e-4)


def test_seeded_answers_from_disk_do_not_depend_on_company(folder: Path) -> None:
    agent = ModelAgent(CONFIG, folder)
    params = SamplingParams(temperature=1.0, top_k=20, seed=5)
    prompt = prompt_of(12, 2, agent.limits.vocab_size)
    alone = Driver(agent).generate(0, prompt, 10, params, chunk=5)
    driver = Driver(agent)
    for slot in (1, 2, 3):
        driver.start(slot, prompt[:slot], SamplingParams(temperature=2.0, seed=slot))
    driver.start(0, prompt, params)
    first = driver.step(prefill=[driver.chunk(slot, prompt[:slot]) for slot in (1, 2, 3)] + [driver.chunk(0, prompt)])
    tokens = first.tokens[-1:]
    while len(tokens) < 10:
        tokens.append(driver.step(decode=[2, 0, 3, 1]).tokens[1])
    assert tokens == alone


def test_session_len_is_checked_before_the_weights_are_read(folder: Path) -> None:
    within = {"dual_chunk_attention_config": {"chunk_size": 64}}
    config = EngineConfig(session_len=10**6, hf_overrides=within)
    with pytest.raises(InvalidParameter, match=r"1000000, .*64 positions, beyond which .* chunks .*not implemented"):
        ModelAgent(config, folder)


@pytest.mark.anyio
async def test_open_executor_serves_a_checkpoint(folder: Path) -> None:
    executor = open_executor(CONFIG, folder)
    limits = await executor.start()
    assert limits.model_path == str(folder)
    assert limits.num_blocks == 60
    prompt = prompt_of(9, 3, limits.vocab_size)
    start = SlotStart(slot=2, params=GREEDY, num_prompt=9, num_tokens=9, token_ids=[])
    row = PrefillRow(slot=2, tokens=prompt, position=0, sample=True)
    batch = Batch(step=0, starts=[start], new_blocks=[(2, 0, 0, [7, 3])], copies=[], decode=[], prefill=[row])
    output = await executor.submit(batch)
    await executor.close()
    assert output.slots == [2]
    assert output.errors == {}
    assert output.elapsed_ms > 0
