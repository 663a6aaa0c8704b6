"""LoRA adapters in whole engines: each answer is that of a model with merged weights, whatever happens around it."""

from __future__ import annotations

import asyncio
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncllm import AsyncEngine, EngineConfig, GenerationConfig, pipeline
from asyncllm.engine.schedule.adapter_slots import Adapter, AdapterSlots
from asyncllm.errors import (
    DeadlineExceeded,
    EngineClosed,
    InvalidCheckpoint,
    InvalidParameter,
    ModelError,
    ModelNotFound,
    UnsupportedFeature,
)
from asyncllm.models.loading.adapter_files import AdapterFiles
from asyncllm.protocol import SlotStart
from asyncllm.testing import FakeEngine
from tests.adapters import delta, write_adapter
from tests.checkpoints import build_checkpoint
from tests.engine.waits import until

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop, pytest.mark.timeout(120)]

dice = Random(7)
PROMPTS = [[dice.randrange(256) for _ in range(length)] for length in (9, 41, 4, 17)]
GREEDY = GenerationConfig(max_new_tokens=16, ignore_eos=True, temperature=0.0)
DRAWN = GenerationConfig(max_new_tokens=12, ignore_eos=True, top_k=0, random_seed=3, n=2, logprobs=2)
NAMES = (None, "a", "b")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path]:
    """The model, two adapters, and by "merged a" and "merged b" what they make of it."""
    root = tmp_path_factory.mktemp("lora")
    made: dict[str | None, Path] = {None: build_checkpoint("llama", root / "base", vocab_size=320)}
    weights = load_file(made[None] / "model.safetensors")
    shapes = {
        name.removesuffix(".weight"): tuple(tensor.shape)
        for name, tensor in weights.items()
        if name.endswith("_proj.weight")
    }
    for seed, (name, rank) in enumerate((("a", 4), ("b", 18)), start=1):
        made[name] = write_adapter(root / name, shapes, rank=rank, seed=seed)
        merged = made[f"merged {name}"] = root / f"merged {name}"
        build_checkpoint("llama", merged, vocab_size=320)
        added = {f"{module}.weight": delta(module, shape, rank=rank, seed=seed) for module, shape in shapes.items()}
        save_file({key: value + added.get(key, 0) for key, value in weights.items()}, merged / "model.safetensors")
    return made


def engine_of(folder: Path, **fields: Any) -> AsyncEngine:
    settings = {"device_type": "cpu", "block_size": 4, "max_batch_size": 6, "num_gpu_blocks": 200, **fields}
    return AsyncEngine(str(folder), EngineConfig(**{"max_prefill_token_num": 16, **settings}))


def with_adapters(folders: dict[str | None, Path], **fields: Any) -> AsyncEngine:
    return engine_of(folders[None], adapters={name: str(folders[name]) for name in ("a", "b")}, **fields)


async def answers(engine: AsyncEngine, name: str | None, config: GenerationConfig = GREEDY) -> list[Any]:
    found = await engine.batch_infer(PROMPTS, config, adapter_name=name)
    assert isinstance(found, list)
    return [[choice.token_ids for choice in each.choices or (each,)] for each in found]


@pytest.fixture(scope="module")
def expected(folders: dict[str | None, Path]) -> dict[tuple[str | None, int], list[Any]]:
    """By name and number of answers, those of engines with merged weights."""

    async def ask() -> dict[tuple[str | None, int], list[Any]]:
        found = {}
        for name in NAMES:
            async with engine_of(folders[name and f"merged {name}"]) as engine:
                for config in (GREEDY, DRAWN):
                    found[name, config.n] = await answers(engine, name=None, config=config)
        return found

    return asyncio.run(ask())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_loras": 1, "max_lora_rank": 24},
        {"num_gpu_blocks": 20},
        {"num_gpu_blocks": 20, "eviction_type": "copy", "num_cpu_blocks": 64},
    ],
)
async def test_answers_are_those_of_merged_weights(
    folders: dict[str | None, Path], expected: dict[tuple[str | None, int], list[Any]], fields: dict[str, Any]
) -> None:
    """All at once, with one slot for two adapters, and with so few blocks that rows are preempted; twice, so that the
    second time the prefix cache has the prompts."""
    async with with_adapters(folders, **fields) as engine:
        for _ in range(2):
            tasks = [asyncio.create_task(answers(engine, name, config)) for config in (GREEDY, DRAWN) for name in NAMES]
            found = await asyncio.gather(*tasks)
            assert found == [expected[name, config.n] for config in (GREEDY, DRAWN) for name in NAMES]
        stats = engine.stats()
        assert stats.cached_tokens > 0
        assert stats.preemptions > 0 or "num_gpu_blocks" not in fields
        one_slot = fields.get("max_loras") == 1
        assert stats.adapters_resident == (1 if one_slot else 2)
        assert stats.adapters_running == 0
        assert stats.adapter_uploads > 2 if one_slot else stats.adapter_uploads == 2
        engine.check_idle()
    assert len({str(expected[name, 1]) for name in NAMES}) == 3, "each adapter says something else"


async def test_turns_of_a_session_and_its_forks_name_their_adapters(
    folders: dict[str | None, Path], expected: dict[tuple[str | None, int], list[Any]]
) -> None:
    async with with_adapters(folders) as engine, engine_of(folders["merged a"]) as merged:
        first, second = engine.session(), merged.session()
        for session, name in ((first, "a"), (second, None)):
            await session.chat("One, two, three.", GREEDY, adapter_name=name)
        assert first.response is not None
        turn = await first.fork().chat("And?", GREEDY, adapter_name="a")
        assert turn.token_ids == (await second.chat("And?", GREEDY)).token_ids
        assert turn.cached_token_len > 0, "the fork finds what was pinned with its adapter"
        base = await first.fork().chat("And?", GREEDY)
        assert base.cached_token_len == 0, "and a turn with another one nothing"


async def test_logits_scores_and_embeddings(folders: dict[str | None, Path]) -> None:
    ids = PROMPTS[3]
    async with with_adapters(folders) as engine, engine_of(folders["merged b"]) as merged:
        torch.testing.assert_close(
            await engine.get_logits(ids, adapter_name="b"), await merged.get_logits(ids), rtol=1e-4, atol=1e-4
        )
        assert await engine.get_ppl(ids, adapter_name="b") == pytest.approx(await merged.get_ppl(ids), rel=1e-4)
        assert await engine.get_ppl(ids) != pytest.approx(await merged.get_ppl(ids), rel=1e-2)
        found, wanted = await engine.embed([ids], adapter_name="b"), await merged.embed([ids])
        assert isinstance(found, list)
        assert isinstance(wanted, list)
        assert found[0].values == pytest.approx(wanted[0].values, abs=1e-4)


async def test_loading_and_unloading_while_answers_run(
    folders: dict[str | None, Path], expected: dict[tuple[str | None, int], list[Any]]
) -> None:
    """Requests in flight keep their adapter; what comes under its name later is another one, with no cached block."""
    async with engine_of(folders[None], max_loras=1, max_lora_rank=18) as engine:
        assert engine.adapters == {}
        await engine.load_adapter("x", str(folders["a"]))
        assert engine.adapters == {"x": str(folders["a"])}
        with pytest.raises(InvalidParameter, match="is loaded, or about to be"):
            await engine.load_adapter("x", str(folders["b"]))
        running = [
            engine.generate(input_ids=prompt, gen_config=GREEDY, adapter_name="x", stream_response=False)
            for prompt in PROMPTS
        ]
        for each in running:
            await each.start()
        await engine.unload_adapter("x")
        with pytest.raises(InvalidParameter, match="'x'"):
            await engine.generate("hello", adapter_name="x")
        await engine.load_adapter("x", str(folders["b"]))
        assert await answers(engine, "x") == expected["b", 1]
        assert [[(await each.response()).token_ids] for each in running] == expected["a", 1]
        await engine.unload_adapter("x")
        await engine.load_adapter("y", str(folders["a"]))
        assert await answers(engine, "y") == expected["a", 1]
        assert await answers(engine, None) == expected[None, 1]
        engine.check_idle()


async def test_adapters_sleep_wake_and_outlive_new_weights(
    folders: dict[str | None, Path], expected: dict[tuple[str | None, int], list[Any]]
) -> None:
    async with with_adapters(folders, max_loras=1) as engine:
        assert await answers(engine, "a") == expected["a", 1]
        for level in (1, 2):
            await engine.sleep(level)
            await engine.load_adapter(f"c{level}", str(folders["b"]))
            await engine.wake()
            assert await answers(engine, "a") == expected["a", 1]
            assert await answers(engine, f"c{level}") == expected["b", 1]
        base = load_file(folders[None] / "model.safetensors")
        await engine.update_weights({name: tensor * 1.5 for name, tensor in base.items()})
        assert await answers(engine, "a") != expected["a", 1]
        await engine.update_weights(base)
        assert await answers(engine, "a") == expected["a", 1]


async def test_a_model_in_another_process(
    folders: dict[str | None, Path], expected: dict[tuple[str | None, int], list[Any]], tmp_path: Path
) -> None:
    async with with_adapters(folders, isolated=True, max_loras=1) as engine:
        found = await asyncio.gather(*(answers(engine, name) for name in NAMES))
        assert found == [expected[name, 1] for name in NAMES]
        await engine.unload_adapter("a")
        await engine.load_adapter("a", str(folders["b"]))
        assert await answers(engine, "a") == expected["b", 1]
        (tmp_path / "adapter_config.json").write_text((folders["a"] / "adapter_config.json").read_text())
        with pytest.raises(InvalidCheckpoint, match="neither"):
            await engine.load_adapter("z", str(tmp_path))
        assert await answers(engine, "b") == expected["b", 1], "what is refused harms no one"


async def test_what_cannot_be_loaded_is_refused(folders: dict[str | None, Path], tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="'base', which is the model's own name"):
        engine_of(folders[None], adapters={"base": str(folders["a"])})
    async with engine_of(folders[None]) as engine:
        with pytest.raises(UnsupportedFeature, match="max_loras"):
            await engine.load_adapter("x", str(folders["a"]))
        with pytest.raises(InvalidParameter, match="adapter_name"):
            await engine.generate("hello", adapter_name="x")
    for path, error in ((tmp_path / "nowhere", ModelNotFound), (tmp_path, InvalidCheckpoint)):
        with pytest.raises(error):
            await engine_of(folders[None], adapters={"x": str(path)}).start()
    async with with_adapters(folders) as engine:
        for name, path in (("", "p"), ("a\n", "p"), (5, "p"), ("x", 5), (engine.model_name, "p")):
            with pytest.raises(InvalidParameter):
                await engine.load_adapter(name, path)  # type: ignore[arg-type]
        with pytest.raises(ModelNotFound):
            await engine.load_adapter("x", str(tmp_path / "nowhere"))
        with pytest.raises(InvalidParameter, match="'x'"):
            await engine.unload_adapter("x")
        await engine.load_adapter("x", str(folders["a"]))


async def test_folders_may_be_paths(folders: dict[str | None, Path]) -> None:
    async with engine_of(folders[None], adapters={"a": folders["a"]}, max_lora_rank=18) as engine:
        before = await answers(engine, "a")
        await engine.load_adapter("a", folders["b"], replace=True)
        assert engine.adapters == {"a": str(folders["b"])}
        assert await answers(engine, "a") != before


def test_a_pipeline_replaces_adapters(folders: dict[str | None, Path]) -> None:
    config = EngineConfig(device_type="cpu", max_loras=1, max_lora_rank=18)
    with pipeline(str(folders[None]), backend_config=config) as pipe:
        pipe.load_adapter("a", folders["a"])
        pipe.load_adapter("a", folders["b"], replace=True)
        assert pipe.adapters == {"a": str(folders["b"])}


async def test_an_unloaded_adapter_goes_with_its_last_request() -> None:
    engine = FakeEngine(None, EngineConfig(adapters={"a": "p", "b": "q"}, max_loras=1))
    async with engine:
        device = engine.executor.device
        waiting = engine.generate("a long answer", adapter_name="a")
        await waiting.start()
        await engine.unload_adapter("a")
        assert device.adapters == {1, 2}
        waiting.cancel()
        await until(lambda: device.adapters == {2})
        await engine.unload_adapter("b")
        await until(lambda: not device.adapters)
        assert (await engine.generate("hello")).text == "hello"


async def test_an_adapter_is_read_beside_the_steps(
    folders: dict[str | None, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A read that does not come to its end holds up no answer, and none of a name that is replaced meanwhile."""
    begun, goes_on = threading.Event(), threading.Event()
    read = AdapterFiles.read

    def slow(folder: Path, model: Any, base: Path) -> AdapterFiles:
        if threading.current_thread().name.startswith("asyncllm-open"):
            begun.set()
            assert goes_on.wait(60)
        return read(folder, model, base)

    monkeypatch.setattr(AdapterFiles, "read", slow)
    async with with_adapters(folders, max_loras=2, max_lora_rank=18) as engine:
        before = await answers(engine, "a")
        loading = asyncio.create_task(engine.load_adapter("a", str(folders["b"]), replace=True))
        await until(begun.is_set)
        for name in NAMES:
            await answers(engine, name)
        assert await answers(engine, "a") == before
        assert not loading.done()
        left = asyncio.create_task(engine.load_adapter("left", str(folders["b"])))
        await asyncio.sleep(0)
        left.cancel()
        goes_on.set()
        await loading
        assert await answers(engine, "a") == await answers(engine, "b") != before
        with pytest.raises(asyncio.CancelledError):
            await left
        await until(lambda: engine.stats().adapters_in_host_memory == 2)
        assert set(engine.adapters) == {"a", "b"}
        broken = tmp_path / "broken"
        shutil.copytree(folders["a"], broken)
        (broken / "adapter_model.safetensors").write_bytes(b"\xff" * 100)
        with pytest.raises(ModelError):
            await engine.load_adapter("a", str(broken), replace=True)
        assert await answers(engine, "a") == await answers(engine, "b")
        engine.check_idle()


async def test_host_memory_has_a_bound(
    folders: dict[str | None, Path], expected: dict[tuple[str | None, int], list[Any]], tmp_path: Path
) -> None:
    """Adapters that find no room are read when they are asked for, and have to be what they were."""
    paths = {name: str(shutil.copytree(folders[name], tmp_path / name)) for name in "ab"}
    names = {f"{name}{index}": paths[name] for index in range(4) for name in "ab"}
    async with engine_of(folders[None], adapters=names, max_loras=2, lora_host_mb=1) as engine:
        room = engine.limits.num_host_adapters
        assert room < len(names), "the test has to be made for smaller adapters"
        assert engine.stats().adapters_in_host_memory == room
        found = await asyncio.gather(*(answers(engine, name) for name in names))
        assert found == [expected[name[0], 1] for name in names]
        stats = engine.stats()
        assert stats.adapter_reads >= len(names) - room
        assert stats.adapters_in_host_memory <= room
        shutil.copytree(folders["b"], paths["a"], dirs_exist_ok=True)
        refused = await asyncio.gather(*(answers(engine, name) for name in names), return_exceptions=True)
        changed = [each for each in refused if isinstance(each, Exception)]
        assert changed
        assert all(isinstance(each, InvalidCheckpoint) and "changed since" in str(each) for each in changed)
        assert await answers(engine, "b3") == expected["b", 1]
        engine.check_idle()
    with pytest.raises(InvalidParameter, match="lora_host_mb"):
        engine_of(folders[None], lora_host_mb=1)


async def test_requests_wait_for_room_in_host_memory_and_leave_when_they_like() -> None:
    config = EngineConfig(adapters={"a": "p", "b": "q"}, max_loras=2)
    async with FakeEngine("x" * 400, config, num_host_adapters=1, latency=0.001) as engine:
        running = asyncio.create_task(engine.generate("hello", adapter_name="a").response())
        await until(lambda: engine.stats().running)
        waiting = asyncio.create_task(engine.generate("hello", adapter_name="b").response())
        with pytest.raises(DeadlineExceeded, match="lora_host_mb"):
            await engine.generate("hello", adapter_name="b", timeout=0.05)
        assert not waiting.done()
        gone = asyncio.create_task(engine.generate("hello", adapter_name="b").response())
        await asyncio.sleep(0.01)
        gone.cancel()
        assert (await engine.generate("hello", GenerationConfig(max_new_tokens=2))).generate_token_len == 2
        await running
        await waiting
        assert engine.executor.device.adapters == {2}
        # Two names for one place, as fast as it goes.
        tasks = [engine.generate("hello", GenerationConfig(max_new_tokens=2), adapter_name=name) for name in "abab" * 8]
        await asyncio.gather(*(task.response() for task in tasks))
        stuck = asyncio.create_task(engine.generate("hello", adapter_name="a").response())
        late = asyncio.create_task(engine.generate("hello", adapter_name="b").response())
        await until(lambda: engine.stats().running)
        engine.check_running()
    for task in (stuck, late):
        with pytest.raises(EngineClosed):
            await task


@pytest.mark.parametrize("seed", range(4))
async def test_adapters_come_and_go_under_load(seed: int, folders: dict[str | None, Path]) -> None:
    """In any order: the device takes no adapter that it has no room for, and misses none that a row names. An answer
    is that of one adapter from its beginning to its end, which had the name while it was asked for."""
    dice, names = Random(seed), ["a", "b", "c", "d"]
    config = EngineConfig(adapters={"a": "p", "b": "q"}, max_loras=2, max_batch_size=3)
    numbers: dict[str, set[str]] = {"a": {"1"}, "b": {"2"}, "c": set(), "d": set()}

    def told(history: list[int], start: SlotStart) -> int:
        return ord("0") + start.adapter % 70

    async with FakeEngine(None, config, oracle=told, num_host_adapters=2 + seed % 2, latency=0.0005) as engine:

        async def ask() -> None:
            name, length = dice.choice(names), dice.randrange(1, 30)
            had = set(numbers[name])
            try:
                answer = await engine.generate(
                    "hello",
                    GenerationConfig(max_new_tokens=length),
                    adapter_name=name,
                    timeout=dice.choice([None, 0.02]),
                )
            except (InvalidParameter, DeadlineExceeded):
                return
            assert len(set(answer.text)) == 1
            assert answer.text[0] in had | numbers[name]

        async def load() -> None:
            name = dice.choice(names)
            with suppress(InvalidParameter):
                loading = engine.load_adapter(name, str(folders["a"]), replace=dice.random() < 0.5)
                task = asyncio.create_task(loading)
                await asyncio.sleep(0)
                if dice.random() < 0.2:
                    task.cancel()
                    await asyncio.wait([task])
                else:
                    await task

        async def unload() -> None:
            with suppress(InvalidParameter):
                await engine.unload_adapter(dice.choice(names))

        # Each adapter that is read gets the next number.
        begin = engine._lifecycle.adapters.begin

        def noted(name: Any, path: str, *, replace: bool = False) -> Adapter:
            adapter = begin(name, path, replace=replace)
            numbers[name].add(chr(ord("0") + adapter.number % 70))
            return adapter

        engine._lifecycle.adapters.begin = noted  # type: ignore[method-assign]
        tasks: list[asyncio.Task[None]] = []
        for _ in range(150):
            kind = dice.choice([ask, ask, ask, load, unload])
            tasks.append(asyncio.create_task(kind()))
            if dice.random() < 0.3:
                await asyncio.sleep(0.001)
            if dice.random() < 0.1:
                dice.choice(tasks).cancel()
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert error is None or isinstance(error, asyncio.CancelledError), error
        await until(lambda: engine.stats().running == 0)
        loaded = {adapter.number for adapter in engine._lifecycle.adapters}
        await until(lambda: engine.executor.device.adapters <= loaded)
        engine.check_idle()


async def test_others_pass_one_whose_adapter_finds_no_slot_and_not_for_ever() -> None:
    config = EngineConfig(adapters={"a": "p", "b": "q"}, max_loras=1, max_batch_size=2)
    ended: list[str] = []
    async with FakeEngine("x" * 300, config) as engine:
        short = GenerationConfig(max_new_tokens=2)

        async def answer(what: str, name: str | None, settings: GenerationConfig | None) -> None:
            await engine.generate("hello", settings, adapter_name=name)
            ended.append(what)

        asked = [("long", "a", None), ("late", "b", short), *[(str(number), None, short) for number in range(18)]]
        await asyncio.gather(*(answer(what, name, settings) for what, name, settings in asked))
    assert ended.index("long") == 15, "so many have passed the one that waits for the slot"
    assert ended.index("late") < 18
    assert len(ended) == 20


def test_slots_go_to_whom_they_are_free_or_have_rested_longest() -> None:
    adapters = [Adapter(number, str(number), "") for number in range(1, 5)]
    slots = AdapterSlots(2)
    first, second = slots.take(adapters[0]), slots.take(adapters[1])
    assert {first, second} == {0, 1}
    assert slots.take(adapters[0]) == first
    assert not slots.has_room(adapters[2])
    assert slots.has_room(adapters[1])
    slots.give_back(adapters[0])
    assert not slots.has_room(adapters[2]), "a sequence has it still"
    slots.give_back(adapters[1])
    slots.give_back(adapters[0])
    assert slots.take(adapters[2]) == second, "the second one has rested longest"
    assert slots.take(adapters[0]) == first, "and the first is still there"
    assert set(slots.resident) == {1, 3}
    slots.give_back(adapters[2])
    slots.forget(3)
    assert slots.take(adapters[3]) == second
