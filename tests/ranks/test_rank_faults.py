"""Two ranks of which one or both fail, in a step or at the start, or are late: rows end, or the engine, and no call
waits for ever."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from asyncllm import AsyncEngine, GenerationConfig
from asyncllm.errors import EngineDead, InvalidCheckpoint, ModelError, RequestFailed
from asyncllm.ranks import heartbeat
from tests.adapters import write_adapter
from tests.checkpoints import build_checkpoint
from tests.ranks.engines import LONG, ranks, settings, soon

pytestmark = [pytest.mark.anyio, pytest.mark.one_loop, pytest.mark.timeout(120)]

BOTH_FAIL, ONE_IS_LATE, ONE_FAILS = 311, 312, 313
"""Tokens of prompts, by which a rank knows what to do."""

PLUGIN = f"""
import time
import torch
from asyncllm.agent.model_agent import ModelAgent
from asyncllm.models.loading import adapter_files
from asyncllm.models.decoder import DecoderLM

digest = adapter_files._digest
adapter_files._digest = lambda folder: digest(folder) + str(torch.distributed.get_rank())
launch = ModelAgent.launch
forward = DecoderLM.before_last
failing = False

def fails(self, step, *more):
    if failing:
        raise torch.OutOfMemoryError("no memory, as planned")
    return forward(self, step, *more)

def faulty(self, batch):
    global failing
    tokens = {{token for row in batch.prefill for token in row.tokens}}
    last = self.sampler.ranks._group.rank == 1
    if {ONE_IS_LATE} in tokens and last:
        time.sleep(0.5)
    failing = {BOTH_FAIL} in tokens or ({ONE_FAILS} in tokens and last)
    return launch(self, batch)

ModelAgent.launch, DecoderLM.before_last = faulty, fails
"""
AT_START = """
import os
import signal
import time
import torch
import torch.distributed as dist
from asyncllm.models import build
from asyncllm.ranks.rank import Rank

load, send = build.load, Rank._send

def late(self, message):
    time.sleep(0.5)  # in which the other must not come to fail
    send(self, message)

def faulty(*arguments):
    planned = os.environ["PLANNED"]
    if dist.get_rank() == 1:
        if planned == "memory":
            Rank._send = late
            raise torch.OutOfMemoryError("no memory, as planned")
        os.kill(os.getpid(), getattr(signal, planned))
    dist.all_reduce(torch.ones(1))  # which the other's death breaks
    return load(*arguments)

build.load = faulty
"""
GREEDY = GenerationConfig(max_new_tokens=6, ignore_eos=True, temperature=0.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model, and the plugin beside it."""
    (tmp_path / "faulty.py").write_text(PLUGIN)
    return build_checkpoint("llama", tmp_path / "tiny", vocab_size=320)


async def test_a_step_that_fails_on_all_ranks_ends_its_rows_and_on_one_the_engine(folder: Path) -> None:
    plugin = folder.parent / "faulty.py"
    fields = {"tp": 2, "plugin": [str(plugin)], "max_loras": 1}
    async with AsyncEngine(str(folder), settings(**fields)) as engine:

        def ask(token: int, config: GenerationConfig = GREEDY) -> Any:
            return engine.generate(input_ids=[5, 6, token], gen_config=config).response()

        expected = await ask(7)
        for _ in range(2):
            with pytest.raises(RequestFailed) as failed:
                await ask(BOTH_FAIL)
            assert "as planned" in str(failed.value.__cause__)
            assert (await ask(7)).token_ids == expected.token_ids
        late, other = await asyncio.gather(ask(ONE_IS_LATE), ask(7))
        assert late.generate_token_len == 6
        assert other.token_ids == expected.token_ids
        changing = write_adapter(folder.parent / "changing", {"model.layers.0.self_attn.q_proj": (64, 64)})
        with pytest.raises(InvalidCheckpoint, match="changed while the ranks read them"):
            await engine.load_adapter("changing", str(changing))
        assert (await ask(7)).token_ids == expected.token_ids
        running = asyncio.create_task(ask(7, LONG))
        await soon(lambda: engine.stats().running)
        for error in await asyncio.wait_for(asyncio.gather(ask(ONE_FAILS), running, return_exceptions=True), 60):
            assert isinstance(error, EngineDead)
            assert "as planned" in str(error.__cause__)
        await soon(lambda: not ranks())


@pytest.mark.parametrize(
    ("planned", "said"),
    [
        ("memory", r"^Rank 1 \(process \d+\): .* OutOfMemoryError: no memory, as planned"),
        ("SIGKILL", r"^rank 1 \(process \d+\) was ended by SIGKILL while it was loading the model"),
        ("SIGSTOP", r"^rank 1 \(process \d+\) is to load the model and has said nothing for .* s"),
    ],
)
async def test_a_rank_that_fails_while_it_reads_weights_is_named(
    folder: Path, planned: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short of memory, dead while the other waits for it, or stopped."""
    (folder.parent / "at_start.py").write_text(AT_START)
    monkeypatch.setenv("PLANNED", planned)
    engine = AsyncEngine(str(folder), settings(tp=2, plugin=[str(folder.parent / "at_start.py")]))
    if planned == "SIGSTOP":
        monkeypatch.setattr(heartbeat, "LISTEN_S", 0.2)
        monkeypatch.setattr(heartbeat, "MAX_SILENT_AT_START", 1_000)
    starting = asyncio.create_task(engine.start())
    if planned == "SIGSTOP":
        await soon(lambda: any(state_of(pid) == "T" for pid in ranks()))
        monkeypatch.setattr(heartbeat, "MAX_SILENT_AT_START", 15)
    begun = time.monotonic()
    with pytest.raises(ModelError, match=said):
        await asyncio.wait_for(starting, 60)
    assert time.monotonic() - begun < 50, "not after the group's own patience"
    assert ranks() == []


def state_of(pid: int) -> str:
    """The state of a process, T if it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
