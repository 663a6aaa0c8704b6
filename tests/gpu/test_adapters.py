"""LoRA on a GPU: graphs with and without adapters, rows of many adapters in one step, and uploads between steps."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig
from asyncllm.agent.model_agent import ModelAgent
from asyncllm.types import Response
from tests.adapters import write_adapter
from tests.engine.waits import settle
from tests.gpu.engines import DEVICE, WIDE_VOCAB, device_config, free_memory, random_prompts, wide_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.anyio, pytest.mark.timeout(300)]

GREEDY = GenerationConfig(max_new_tokens=24, ignore_eos=True, temperature=0.0)
DRAWN = GenerationConfig(max_new_tokens=24, ignore_eos=True, top_k=0, temperature=1.0, random_seed=5)
FOLDERS = 4
MANY = 64
PROMPTS = random_prompts(7, MANY, 90)

EXACT = 2e-3
"""Most that a float32 logit may be off."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wide_checkpoint("llama", tmp_path_factory.mktemp("lora") / "base")


@pytest.fixture(scope="module")
def adapters(base: Path) -> list[str]:
    """Folders of adapters of all linear layers, of rank 4, 16, 28 and 64."""
    weights = load_file(base / "model.safetensors")
    shapes = {
        name.removesuffix(".weight"): tuple(tensor.shape)
        for name, tensor in weights.items()
        if name.endswith("_proj.weight")
    }
    ranks = (4, 16, 28, 64)
    return [
        str(write_adapter(base.parent / str(seed), shapes, rank=rank, seed=seed, dtype=torch.bfloat16))
        for seed, rank in enumerate(ranks, start=1)
    ]


def named(adapters: list[str], count: int) -> dict[str, str]:
    return {f"adapter {index}": adapters[index % len(adapters)] for index in range(count)}


async def ask(
    engine: AsyncEngine,
    names: list[str | None],
    config: GenerationConfig = GREEDY,
    prompts: list[list[int]] = PROMPTS,
) -> list[Response]:
    """Answers to the first prompts, one by each name, all there before the first step."""
    generations = [
        engine.generate(input_ids=prompt, gen_config=config, adapter_name=name, stream_response=False)
        for prompt, name in zip(prompts, names, strict=False)
    ]
    for generation in generations:
        await generation.start()
    return [await generation.response() for generation in generations]


def tokens(responses: list[Response]) -> list[list[int]]:
    return [response.token_ids for response in responses]


async def test_logits_are_those_of_a_cpu(base: Path, adapters: list[str]) -> None:
    """Which tests on CPUs hold to merged weights."""
    settings = {"adapters": named(adapters, FOLDERS), "dtype": "float32", "num_gpu_blocks": 64, "max_batch_size": 8}
    names = [None, *settings["adapters"]]  # type: ignore[misc]
    cpu_config = EngineConfig(device_type="cpu", **settings)  # type: ignore[arg-type]
    async with AsyncEngine(str(base), cpu_config) as cpu, AsyncEngine(str(base), device_config(**settings)) as gpu:
        seen = []
        for name in names:
            found = await gpu.get_logits(PROMPTS[0], adapter_name=name)
            exact = await cpu.get_logits(PROMPTS[0], adapter_name=name)
            assert float((found - exact).abs().max()) < EXACT, name
            seen.append(exact)
        assert all(not torch.allclose(seen[0], other) for other in seen[1:])
        # Prompts in mixed steps, then decode rows of all of them out of graphs.
        for response, name, prompt in zip(await ask(gpu, names), names, PROMPTS, strict=False):
            exact = await cpu.get_logits([*prompt, *response.token_ids], adapter_name=name)
            rows = exact[len(prompt) - 1 : -1]
            chosen = rows.gather(1, torch.tensor(response.token_ids).unsqueeze(1)).squeeze(1)
            assert float((rows.amax(1) - chosen).max()) < EXACT, name


async def test_one_step_has_rows_of_64_adapters_and_each_is_as_if_alone(base: Path, adapters: list[str]) -> None:
    config = device_config(
        adapters=named(adapters, MANY),
        dtype="bfloat16",
        batch_invariant=True,
        max_batch_size=MANY + 8,
        num_gpu_blocks=512,
        enable_prefix_caching=False,
    )
    names: list[str | None] = list(named(adapters, MANY))
    async with AsyncEngine(str(base), config) as engine:
        together = tokens(await ask(engine, names, DRAWN))
        assert engine.stats().preemptions == 0
        for index in (0, 1, 2, 3, 33, 63):
            alone = await engine.generate(input_ids=PROMPTS[index], gen_config=DRAWN, adapter_name=names[index])
            assert alone.token_ids == together[index]
        # The same folder under another name is the same adapter.
        again = tokens(await ask(engine, [*names[FOLDERS:], *names[:FOLDERS]], DRAWN))
        assert again == together


async def test_rows_of_the_base_have_their_bits_beside_adapters(base: Path, adapters: list[str]) -> None:
    config = device_config(
        adapters=named(adapters, FOLDERS),
        dtype="bfloat16",
        batch_invariant=True,
        max_batch_size=16,
        num_gpu_blocks=256,
        enable_prefix_caching=False,
    )
    async with AsyncEngine(str(base), config) as engine:
        alone = tokens(await ask(engine, [None] * 6, DRAWN))
        names: list[str | None] = [None] * 6 + list(named(adapters, FOLDERS))
        assert tokens(await ask(engine, names, DRAWN))[:6] == alone
    bare = device_config(
        dtype="bfloat16", batch_invariant=True, max_batch_size=16, num_gpu_blocks=256, enable_prefix_caching=False
    )
    async with AsyncEngine(str(base), bare) as engine:
        assert tokens(await ask(engine, [None] * 6, DRAWN)) == alone


async def test_steps_without_adapters_are_those_of_an_engine_without(base: Path, adapters: list[str]) -> None:
    """To the last bit, in graphs and outside: they are launched as without the feature."""
    found = []
    for fields in ({}, {"adapters": named(adapters, 1)}):
        settings = {"dtype": "bfloat16", "num_gpu_blocks": 256, "enable_prefix_caching": False, **fields}
        async with AsyncEngine(str(base), device_config(**settings)) as engine:
            found.append([tokens(await ask(engine, [None] * count, DRAWN)) for count in (1, 5, 8)])
    assert found[0] == found[1]


async def test_adapters_come_up_while_others_decode(base: Path, adapters: list[str]) -> None:
    """Two slots for nine adapters: each comes up between steps of a long answer, which keeps its tokens, as do theirs;
    one is loaded and one unloaded meanwhile."""
    config = device_config(
        adapters=named(adapters, 8),
        max_loras=2,
        max_lora_rank=64,
        dtype="bfloat16",
        batch_invariant=True,
        num_gpu_blocks=256,
        enable_prefix_caching=False,
    )
    long = GenerationConfig(max_new_tokens=600, ignore_eos=True, top_k=0, temperature=1.0, random_seed=1)
    names: list[str | None] = list(named(adapters, 8))
    async with AsyncEngine(str(base), config) as engine:
        expected = [tokens(await ask(engine, [name], DRAWN, [PROMPTS[3]]))[0] for name in names]
        assert expected[:FOLDERS] == expected[FOLDERS:]
        whole = await engine.generate(input_ids=PROMPTS[1], gen_config=long)
        running = asyncio.create_task(engine.generate(input_ids=PROMPTS[1], gen_config=long).response())
        for _ in range(3):
            assert tokens(await ask(engine, names, DRAWN, [PROMPTS[3]] * 8)) == expected
        await engine.load_adapter("late", adapters[2])
        assert tokens(await ask(engine, ["late"], DRAWN, [PROMPTS[3]])) == [expected[2]]
        await engine.unload_adapter("late")
        assert (await running).token_ids == whole.token_ids
        await settle(engine)


@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU has no streams")
def test_an_upload_waits_for_no_step_that_does_not_read_its_slot(base: Path, adapters: list[str]) -> None:
    config = device_config(adapters=named(adapters, 3), max_loras=2, dtype="bfloat16")
    agent = ModelAgent(config, base)
    pool, stream = agent._placement.adapters, agent._streams.stream
    assert pool is not None
    assert pool.uploads is not None
    assert stream is not None
    with agent._streams.launching():
        pool.put(1, 0)
        stream.synchronize()
        torch.cuda._sleep(10**9)  # half a second
        pool.read_by_steps([0])
        pool.put(2, 1)
        pool.uploads.synchronize()
        assert not stream.query(), "the upload has waited for the step"
        torch.cuda._sleep(10**9)
        pool.read_by_steps([1])
        pool.put(3, 1)
        pool.uploads.synchronize()
        # The second step has been waited for, and what is launched now comes behind the upload.
        assert stream.query()
        found = [pool._of_slots(factor)[1].clone() for factor in pool._factors()]
    stream.synchronize()
    for factor, place in zip(pool._factors(), found, strict=True):
        assert torch.equal(place.cpu(), pool._host[3].values[factor])


async def test_slots_sleep_and_wake(base: Path, adapters: list[str]) -> None:
    config = device_config(
        adapters=named(adapters, FOLDERS), dtype="bfloat16", num_gpu_blocks=64, enable_prefix_caching=False
    )
    names: list[str | None] = [None, *named(adapters, FOLDERS)]
    async with AsyncEngine(str(base), config) as engine:
        expected = tokens(await ask(engine, names))
        before = free_memory()
        await engine.sleep()
        assert free_memory() >= before
        await engine.wake()
        assert tokens(await ask(engine, names)) == expected
        assert max(map(max, expected)) < WIDE_VOCAB
