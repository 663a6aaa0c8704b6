"""An engine whose model runs in a child process: the same answers, one terminal error for all when the process dies,
and no process left over in any case."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from asyncllm import AsyncEngine, GenerationConfig
from asyncllm.errors import EngineClosed, EngineDead, InvalidCheckpoint, InvalidParameter
from asyncllm.protocol import Batch, PrefillRow, SamplingParams, SlotStart, StepDropped, StepFailed
from asyncllm.ranks import heartbeat
from asyncllm.ranks.executor import RankExecutor
from asyncllm.ranks.messages import RemoteError
from tests.adapters import write_adapter
from tests.checkpoints import build_checkpoint
from tests.ranks.engines import LONG, ranks, settings, soon

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("llama")
    return [build_checkpoint("llama", root / str(seed), seed=seed, vocab_size=320) for seed in (0, 1)]


async def everything(engine: AsyncEngine) -> list[Any]:
    """What an engine is asked for, with all that steps give."""
    greedy = await engine.generate("Hi", GenerationConfig(max_new_tokens=12, temperature=0.0, logprobs=2))
    drawn = GenerationConfig(max_new_tokens=12, top_k=0, random_seed=3, n=2, prompt_logprobs=1)
    sampled = [await engine.generate("Hello", drawn), await engine.generate("Hello", drawn)]
    logits = await engine.get_logits([5, 9, 7])
    return [
        (greedy.token_ids, greedy.logprobs),
        [(answer.token_ids, answer.prompt_logprobs) for answer in sampled],
        await engine.get_ppl([5, 6, 7, 8, 9]),
        [each.values for each in await engine.embed(["one", "two"], pooling="mean")],
        logits.tolist(),
    ]


async def test_answers_are_those_of_one_process(folders: list[Path]) -> None:
    weights = load_file(folders[1] / "model.safetensors")
    found = []
    for isolated in (False, True):
        async with AsyncEngine(str(folders[0]), settings(isolated=isolated)) as engine:
            before = await everything(engine)
            with pytest.raises(InvalidParameter, match="lm_head"):
                await engine.update_weights({"lm_head.weight": weights["lm_head.weight"][:, :3]})
            await engine.sleep(level=1)
            await engine.wake()
            assert await everything(engine) == before
            await engine.update_weights(weights)
            after = await everything(engine)
            assert after != before
            found.append((before, after))
            assert len(ranks()) == isolated
    assert found[0] == found[1]
    assert ranks() == []


async def test_a_killed_rank_is_one_error_for_all(folders: list[Path]) -> None:
    """The first one, which has the results; `test_killed` takes the second."""
    async with AsyncEngine(str(folders[0]), settings(tp=2)) as engine:
        tasks = [asyncio.create_task(engine.generate("Hi", LONG).response()) for _ in range(6)]
        await soon(lambda: engine.stats().steps > 3)
        killed = time.monotonic()
        os.kill(min(ranks()), signal.SIGKILL)
        for error in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60):
            assert isinstance(error, EngineDead)
            assert isinstance(error.__cause__, RemoteError)
            assert "SIGKILL" in str(error.__cause__)
        assert time.monotonic() - killed < 5
        await soon(lambda: not ranks())
        death = await engine.wait_ended()
        assert death is not None
        assert not death.lost_device


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_rank_that_hangs_is_dead_in_bounded_time(
    folders: list[Path], victim: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Stopped while it computes, reads an adapter or carries out a command, or with nothing to do until then."""
    monkeypatch.setattr(heartbeat, "LISTEN_S", 0.2)
    # On a busy machine ranks that load a model say nothing for seconds.
    monkeypatch.setattr(heartbeat, "MAX_SILENT_AT_START", 1_000)
    adapter = str(write_adapter(tmp_path, {"model.layers.0.self_attn.q_proj": (64, 48)}))
    async with AsyncEngine(str(folders[0]), settings(tp=1 + victim, max_loras=1)) as engine:
        await engine.generate("Hi", GenerationConfig(max_new_tokens=2))
        running = [engine.generate("Hi", LONG).response()] if victim else []
        tasks = [asyncio.create_task(each) for each in running]
        await soon(lambda: engine.stats().running == victim)
        os.kill(sorted(ranks())[victim], signal.SIGSTOP)
        tasks += [asyncio.create_task(engine.load_adapter("a", adapter))]
        if not victim:
            tasks += [asyncio.create_task(engine.sleep())]
        for error in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60):
            assert isinstance(error, EngineDead)
            assert f"rank {victim}" in str(error.__cause__)
            assert "has said nothing" in str(error.__cause__)
        await soon(lambda: not ranks())
        death = await engine.wait_ended()
        assert death is not None
        assert not death.lost_device


async def test_a_failed_step_ends_its_rows_and_no_others(folders: list[Path]) -> None:
    executor = RankExecutor(settings(tp=2), folders[0])
    with pytest.raises(EngineClosed):
        executor.submit(prompt(0, 0))
    limits = await executor.start()
    failing, built_on_it = executor.submit(prompt(0, limits.num_blocks * 10_000)), executor.submit(prompt(1, 0))
    with pytest.raises(StepFailed) as failed:
        await failing
    assert isinstance(failed.value.__cause__, RemoteError)
    with pytest.raises(StepDropped):
        await built_on_it
    output = await executor.submit(prompt(2, 0, last_read=1))
    assert output.slots == [0]
    unread = executor.submit(prompt(3, 0, last_read=2))
    await executor.close()
    await executor.close()
    with pytest.raises(EngineClosed):
        await unread
    with pytest.raises(EngineClosed):
        executor.submit(prompt(4, 0))


def prompt(step: int, block: int, last_read: int = -1) -> Batch:
    """A step with one prompt of two tokens in slot 0."""
    start = SlotStart(slot=0, params=SamplingParams(), num_prompt=2, num_tokens=2, token_ids=[])
    row = PrefillRow(slot=0, tokens=[1, 2], position=0, sample=True)
    return Batch(
        step=step,
        starts=[start],
        new_blocks=[(0, 0, 0, [block])],
        copies=[],
        decode=[],
        prefill=[row],
        last_read=last_read,
    )


async def test_what_cannot_be_loaded_says_the_same_as_in_this_process(tmp_path: Path, folders: list[Path]) -> None:
    folder = build_checkpoint("llama", tmp_path / "cut", vocab_size=320)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    said = []
    for tp in (1, 2):
        with pytest.raises(InvalidCheckpoint) as error:
            await AsyncEngine(str(folder), settings(isolated=False, tp=tp)).start()
        said.append(str(error.value))
    assert said[0] == said[1]
    assert ranks() == []


async def test_a_start_that_is_cancelled_leaves_nothing(folders: list[Path]) -> None:
    engine = AsyncEngine(str(folders[0]), settings())
    starting = asyncio.create_task(engine.start())
    await soon(ranks)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert ranks() == []


PARENT = """
import asyncio, os, sys
from asyncllm import AsyncEngine, EngineConfig, GenerationConfig

async def main():
    config = EngineConfig(device_type="cpu", num_gpu_blocks=64, max_batch_size=8, isolated=True)
    async with AsyncEngine(sys.argv[1], config) as engine:
        await engine.generate("Hi", GenerationConfig(max_new_tokens=2))
        children = open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read()
        print("torch" in sys.modules, children, flush=True)
        await engine.generate("Hi", GenerationConfig(max_new_tokens=1000, ignore_eos=True))

asyncio.run(main())
"""


async def test_a_rank_does_not_outlive_its_parent_which_needs_no_torch(folders: list[Path]) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(folders[0]), stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert process.stdout is not None
    has_torch, child = (await process.stdout.readline()).split()
    rank = os.pidfd_open(int(child))
    try:
        process.kill()
        await process.wait()
        gone = asyncio.Event()
        asyncio.get_running_loop().add_reader(rank, gone.set)
        await asyncio.wait_for(gone.wait(), 10)
        asyncio.get_running_loop().remove_reader(rank)
    finally:
        os.close(rank)
    await process.stdout.read()
    assert has_torch == b"False"


STREAMLESS = """
import asyncio, os, sys
from pathlib import Path
from asyncllm import AsyncEngine, EngineConfig, GenerationConfig

async def main():
    config = EngineConfig(device_type="cpu", num_gpu_blocks=64, max_batch_size=8, tp=2)
    async with AsyncEngine(sys.argv[1], config) as engine:
        response = await engine.generate("Hi", GenerationConfig(max_new_tokens=2, ignore_eos=True))
        Path(sys.argv[2]).write_text(str(response.generate_token_len))

for stream in (0, 1, 2):
    os.close(stream)
asyncio.run(main())
"""


async def test_ranks_of_a_program_without_standard_streams(folders: list[Path], tmp_path: Path) -> None:
    """As some daemons are; the numbers are then those of other files."""
    answer = tmp_path / "answer"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STREAMLESS, str(folders[0]), str(answer), cwd=Path(__file__).parents[2]
    )
    await asyncio.wait_for(process.wait(), 60)
    assert answer.read_text() == "2"
