"""Two ranks on two GPUs: collectives of NCCL inside and outside of CUDA graphs, the answers of one GPU, and what
happens when a rank dies. `pytest -m gpu tests/gpu/test_tensor_parallel.py`, on a machine with two GPUs or more."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig
from asyncllm.errors import EngineDead
from asyncllm.ranks.messages import RemoteError
from tests.adapters import write_adapter
from tests.gpu.engines import DEVICE, WIDE_VOCAB, answer_all, device_config, random_prompts, wide_checkpoint
from tests.ranks.engines import ranks, soon

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.anyio,
    pytest.mark.timeout(300),
    pytest.mark.skipif(DEVICE == "cuda" and torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

GREEDY = GenerationConfig(max_new_tokens=24, ignore_eos=True, temperature=0.0)
WAYS = [
    GREEDY,
    GenerationConfig(max_new_tokens=24, ignore_eos=True, top_k=0, random_seed=1, logprobs=4),
    GenerationConfig(max_new_tokens=24, ignore_eos=True, top_k=40, top_p=0.9, random_seed=2, repetition_penalty=1.1),
    GenerationConfig(max_new_tokens=24, ignore_eos=True, top_k=0, top_p=0.95, min_p=0.01, random_seed=3),
]
LONG = GenerationConfig(max_new_tokens=1800, ignore_eos=True)
QUESTION = "What is 17 + 25?"

EXACT = 2e-3
"""Most that a float32 logit may be off."""
KL_MEAN = 0.004
"""Of bfloat16 logits of two roundings of one model: twice what test_families.py allows between bfloat16 and float32."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("wide")
    return [wide_checkpoint("llama", root / str(seed), seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def experts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
    return wide_checkpoint("qwen3_moe", tmp_path_factory.mktemp("wide") / "experts", **sizes)


async def test_the_bundled_model_says_the_same() -> None:
    """In float32, in which near ties are rare, with each way to draw."""
    found = []
    for tp in (1, 2):
        config = device_config(tp=tp, dtype="float32")
        async with AsyncEngine("tiny-chat", config) as engine:
            found.append([(await engine.generate(QUESTION, way)).token_ids for way in WAYS])
    assert found[0] == found[1]


async def test_logits_of_two_ranks_are_those_of_one(folders: list[Path]) -> None:
    prompts = random_prompts(3, 4, 300)
    found = {}
    for tp, dtype in ((1, "float32"), (2, "float32"), (1, "bfloat16"), (2, "bfloat16")):
        async with AsyncEngine(str(folders[0]), device_config(tp=tp, dtype=dtype)) as engine:
            found[tp, dtype] = torch.cat([await engine.get_logits(prompt) for prompt in prompts])
    assert float((found[1, "float32"] - found[2, "float32"]).abs().max()) < EXACT
    one, two = (found[tp, "bfloat16"].log_softmax(-1) for tp in (1, 2))
    assert float((one.exp() * (one - two)).sum(-1).mean()) < KL_MEAN


async def test_every_size_of_batch_out_of_graphs(folders: list[Path]) -> None:
    """Answers of different lengths take a batch through all captured sizes; chunked prompts run beside them. Each
    token is held to the logits of one rank."""
    count = 24
    prompts = random_prompts(4, count, 120)
    configs = [GenerationConfig(max_new_tokens=4 + index, ignore_eos=True, temperature=0.0) for index in range(count)]
    settings = {"dtype": "float32", "max_batch_size": count, "num_gpu_blocks": 256, "max_prefill_token_num": 100}
    one_config, two_config = device_config(**settings), device_config(tp=2, **settings)
    async with AsyncEngine(str(folders[0]), two_config) as two, AsyncEngine(str(folders[0]), one_config) as one:
        for _ in range(2):
            for prompt, response in zip(prompts, await answer_all(two, prompts, configs), strict=True):
                exact = (await one.get_logits([*prompt, *response.token_ids]))[len(prompt) - 1 : -1]
                chosen = exact.gather(1, torch.tensor(response.token_ids).unsqueeze(1)).squeeze(1)
                assert float((exact.amax(1) - chosen).max()) < EXACT


async def test_two_runs_give_the_same_bits(folders: list[Path]) -> None:
    prompts, runs = random_prompts(5, 40, 200), []
    for _ in range(2):
        config = device_config(tp=2, dtype="bfloat16", max_batch_size=16, num_gpu_blocks=256)
        async with AsyncEngine(str(folders[0]), config) as engine:
            runs.append([each.token_ids for each in await answer_all(engine, prompts, WAYS[1])])
    assert runs[0] == runs[1]


async def test_sleep_new_weights_and_adapters(folders: list[Path]) -> None:
    """Graphs are captured anew after waking, over the same communicator."""
    weights = load_file(folders[1] / "model.safetensors")
    shapes = {
        name.removesuffix(".weight"): tuple(tensor.shape)
        for name, tensor in weights.items()
        if name.endswith("_proj.weight")
    }
    adapter = write_adapter(folders[0].parent / "adapter", shapes, rank=16)
    prompts, found = random_prompts(6, 3, 60), []
    for tp in (1, 2):
        config = device_config(tp=tp, dtype="float32", adapters={"a": str(adapter)})
        async with AsyncEngine(str(folders[0]), config) as engine:

            async def ask(engine: AsyncEngine = engine) -> list[list[int]]:
                plain = await answer_all(engine, prompts, GREEDY)
                adapted = [
                    await engine.generate(input_ids=each, gen_config=GREEDY, adapter_name="a") for each in prompts
                ]
                return [each.token_ids for each in (*plain, *adapted)]

            before = await ask()
            for level in (1, 2):
                await engine.sleep(level)
                await engine.wake()
                assert await ask() == before
            await engine.update_weights(weights)
            after = await ask()
            assert after != before
            assert max(map(max, after)) < WIDE_VOCAB
            found.append((before, after))
    assert found[0] == found[1]


@pytest.mark.parametrize("ep", [1, 2])
async def test_experts_are_divided_by_features_or_whole(experts_folder: Path, ep: int) -> None:
    prompts, found = random_prompts(9, 3, 90), []
    for fields in ({}, {"tp": 2, "ep": ep}):
        async with AsyncEngine(str(experts_folder), device_config(dtype="float32", **fields)) as engine:
            found.append([await engine.get_logits(prompt) for prompt in prompts])
            assert len((await answer_all(engine, prompts, GREEDY))[0].token_ids) == 24
    assert max(float((one - two).abs().max()) for one, two in zip(*found, strict=True)) < EXACT


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_killed_rank_is_the_end_within_a_second(folders: list[Path], victim: int) -> None:
    """Although the other one is in the midst of a collective that never ends."""
    config = EngineConfig(device_type=DEVICE, tp=2, num_gpu_blocks=512, max_batch_size=8)
    async with AsyncEngine(str(folders[0]), config) as engine:
        prompts = random_prompts(8, 6, 100)
        tasks = [
            asyncio.create_task(engine.generate(input_ids=prompt, gen_config=LONG).response()) for prompt in prompts
        ]
        await soon(lambda: engine.stats().steps > 20)
        killed = time.monotonic()
        os.kill(sorted(ranks())[victim], signal.SIGKILL)
        for error in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60):
            assert isinstance(error, EngineDead)
            assert isinstance(error.__cause__, RemoteError)
        assert time.monotonic() - killed < 1
        # Tearing a context down takes the driver longer.
        await soon(lambda: not ranks())
    async with AsyncEngine(str(folders[0]), config) as engine:
        assert len((await engine.generate(input_ids=prompts[0], gen_config=GREEDY)).token_ids) == 24
