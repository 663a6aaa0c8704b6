"""Two ranks on CPUs do what one process does: every way of sampling, adapters, sessions and forks, swapped blocks,
several answers, embeddings, commands, requests that are left, and all of it in random order. All tests ask the same two
engines."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncllm import AsyncEngine, GenerationConfig
from asyncllm.errors import DeadlineExceeded, ModelError
from tests.adapters import write_adapter
from tests.checkpoints import build_checkpoint
from tests.ranks.engines import LONG, ranks, settings, soon, tokens_of
from tests.ranks.schedules import Schedule

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

SCHEDULES = int(os.environ.get("ASYNCLLM_RANK_SCHEDULES", "1"))
"""How many random schedules are compared."""
CALLS = 12
"""Of a schedule, besides one of each kind."""
GREEDY = GenerationConfig(max_new_tokens=6, ignore_eos=True, temperature=0.0)
DRAWN = GenerationConfig(max_new_tokens=5, ignore_eos=True, top_k=30, random_seed=3, n=2)
PROMPTS = [[7, 8, 9, 200, 31] * count for count in (1, 4, 9)]


async def ask(engine: AsyncEngine, *names: str | None) -> list[Any]:
    """Return the tokens of all answers, asked for at once."""
    tasks = [
        asyncio.create_task(engine.generate(input_ids=prompt, gen_config=config, adapter_name=name).response())
        for name in names
        for config in (GREEDY, DRAWN)
        for prompt in PROMPTS
    ]
    return [[choice.token_ids for choice in (await task).choices or (await task,)] for task in tasks]


async def everything(engine: AsyncEngine, folders: dict[str, Path], other: dict[str, Tensor]) -> list[Any]:
    """Return what all of it gives, under few blocks and one slot for two adapters."""
    found: list[Any] = [await ask(engine, None, "a", "b")]
    each = len(found[0]) // 3
    assert len({str(found[0][begin : begin + each]) for begin in (0, each, 2 * each)}) == 3
    session = engine.session()
    found.append((await session.chat("Hi", GREEDY)).token_ids)
    for turn in (session.chat("And then?", GREEDY, adapter_name="a"), session.fork().chat("And then?", GREEDY)):
        found.append((await turn).token_ids)
    session.close()
    found.append([list(each.values) for each in await engine.embed(["one", "two"], pooling="mean", adapter_name="b")])
    found.append(await engine.get_ppl(PROMPTS[1], adapter_name="a"))
    for level in (1, 2):
        await engine.sleep(level)
        await engine.wake()
        found.append(await ask(engine, None, "b"))
    assert found[-1] == found[-2]
    await engine.unload_adapter("a")
    with pytest.raises(ModelError):
        await engine.load_adapter("a", str(folders["model"]))
    await engine.load_adapter("a", str(folders["c"]))
    await engine.update_weights(other)
    found.append(await ask(engine, None, "a"))
    with pytest.raises(DeadlineExceeded):
        await engine.generate("Hi", LONG, timeout=0.01)
    async for _ in engine.generate("Hi", LONG):
        break
    await soon(lambda: engine.stats().running == 0)
    found.append(await ask(engine, "a"))
    assert found[-1] == found[-2][len(found[-1]) :]
    engine.check_idle()
    stats = engine.stats()
    assert stats.adapter_uploads > 4
    assert stats.cached_tokens > 0
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, another one's weights, and adapters."""
    root = tmp_path_factory.mktemp("features")
    made = {
        name: build_checkpoint("llama", root / name, vocab_size=321, seed=name == "other")
        for name in ("model", "other")
    }
    weights = load_file(made["model"] / "model.safetensors")
    shapes = {
        name.removesuffix(".weight"): tuple(tensor.shape)
        for name, tensor in weights.items()
        if name.endswith("_proj.weight")
    }
    return made | {name: write_adapter(root / name, shapes, seed=ord(name)) for name in "abc"}


@pytest.fixture(scope="module")
def weights(folders: dict[str, Path]) -> list[dict[str, Tensor]]:
    """Those of the checkpoint, and others."""
    return [load_file(folders[name] / "model.safetensors") for name in ("model", "other")]


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The event loop of the shared engines."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
async def engines(folders: dict[str, Path], anyio_backend: object) -> AsyncIterator[list[AsyncEngine]]:
    """One process and two ranks, with few blocks and one slot for two adapters."""
    asked = {
        "isolated": False,
        "block_size": 4,
        "num_gpu_blocks": 40,
        "num_cpu_blocks": 40,
        "eviction_type": "copy",
        "max_loras": 1,
        "adapters": {name: str(folders[name]) for name in "ab"},
    }
    model = str(folders["model"])
    async with AsyncEngine(model, settings(tp=1, **asked)) as one:
        assert ranks() == []
        async with AsyncEngine(model, settings(tp=2, **asked)) as two:
            assert len(ranks()) == 2
            yield [one, two]
    assert ranks() == []


async def test_tokens_are_drawn_alike(engines: list[AsyncEngine], weights: list[dict[str, Tensor]]) -> None:
    """With the weights of the checkpoint, read once more, and with others."""
    found: list[Any] = []
    for engine in engines:
        await engine.update_weights(weights[0])
        before = await tokens_of(engine)
        logits = await engine.get_logits([5, 9, 7])
        score = await engine.get_ppl([5, 6, 7, 8, 9])
        await engine.sleep(level=2)
        await engine.wake()
        assert await tokens_of(engine) == before
        await engine.update_weights(weights[1])
        after = await tokens_of(engine)
        assert after != before
        found.append((before, after, logits, score))
    assert found[0][:2] == found[1][:2]
    torch.testing.assert_close(found[0][2], found[1][2], rtol=1e-4, atol=1e-4)
    assert found[0][3] == pytest.approx(found[1][3], rel=1e-5)


async def test_features_do_the_same(
    engines: list[AsyncEngine], folders: dict[str, Path], weights: list[dict[str, Tensor]]
) -> None:
    found = []
    for engine in engines:
        await engine.update_weights(weights[0])
        found.append(await everything(engine, folders, weights[1]))
    embeddings = [one.pop(4) for one in found]
    assert embeddings[0] == [pytest.approx(each, rel=1e-4, abs=1e-5) for each in embeddings[1]]
    assert found[0].pop(4) == pytest.approx(found[1].pop(4), rel=1e-5)
    assert found[0] == found[1]


async def test_random_schedules_give_the_same(
    engines: list[AsyncEngine], folders: dict[str, Path], weights: list[dict[str, Tensor]]
) -> None:
    """Both begin with the same weights and adapters, whatever has come before."""
    found = []
    for engine in engines:
        await engine.update_weights(weights[0])
        for name in sorted(engine.adapters):
            await engine.unload_adapter(name)
        for name in "ab":
            await engine.load_adapter(name, str(folders[name]))
        found.append([await Schedule(engine, seed, folders, weights).run(CALLS) for seed in range(SCHEDULES)])
        assert engine.stats().preemptions
    assert found[0] == found[1]
