"""Steps that fail on a GPU: one that raises while it is launched or read, and one after which the device is lost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncllm import AsyncEngine, GenerationConfig
from asyncllm.agent.executor import open_executor
from asyncllm.errors import RequestFailed
from asyncllm.testing import Fault, FaultPlan, InjectedFault
from asyncllm.testing.faults import Point
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.tokenizer import Tokenizer
from tests.checkpoints import build_checkpoint
from tests.engine.waits import settle
from tests.gpu.engines import device_config, random_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PROMPTS = random_prompts(3, 6, 90, vocab_size=320)
ANSWER = GenerationConfig(max_new_tokens=24, temperature=0.0, ignore_eos=True)
WISHFUL = GenerationConfig(max_new_tokens=24, temperature=0.0, ignore_eos=True, bad_words=["ab cd"], logprobs=2)

LOST = """
import asyncio, sys, torch
from pathlib import Path
from asyncllm import AsyncEngine, EngineConfig, GenerationConfig
from asyncllm.agent.executor import open_executor
from asyncllm.errors import EngineDead
from asyncllm.testing import FaultPlan

class Poisonous(FaultPlan):
    steps = 0
    def reach(self, point, prompts=()):
        self.steps += point == "decode"
        if point == "decode" and self.steps == 5:
            torch.zeros(4, device="cuda")[torch.tensor([10**6], device="cuda")]

async def main(folder):
    config = EngineConfig(device_type="cuda", num_gpu_blocks=64, max_batch_size=8)
    executor = open_executor(config, Path(folder), wrap=Poisonous().agent)
    engine = AsyncEngine(folder, config, executor=executor)
    await engine.start()
    try:
        await engine.generate(input_ids=[5, 6, 7], gen_config=GenerationConfig(max_new_tokens=60, ignore_eos=True))
    except EngineDead:
        print("dead", (await engine.wait_ended()).lost_device, flush=True)
    await engine.close()
    print("closed", flush=True)

asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    build_checkpoint("llama", path)
    return path


MakeEngine = Callable[[FaultPlan], AsyncEngine]


@pytest.fixture(scope="module")
def engine_of(folder: Path) -> MakeEngine:
    """Makes engines with the faults of a plan. Files are read here, where no event loop waits for them."""
    tokenizer, template = Tokenizer.from_folder(folder), ChatTemplate.open(folder)

    def make(plan: FaultPlan) -> AsyncEngine:
        config = device_config(batch_invariant=True)
        executor = open_executor(config, folder, wrap=plan.agent)
        return AsyncEngine(str(folder), config, **plan.parts(executor, tokenizer, template))

    return make


async def ask(engine: AsyncEngine) -> list[Any]:
    """Token ids of all answers, or errors."""
    generations = [
        engine.generate(input_ids=prompt, gen_config=WISHFUL if number % 3 == 2 else ANSWER, stream_response=False)
        for number, prompt in enumerate(PROMPTS)
    ]
    for generation in generations:
        await generation.start()
    answers = []
    for generation in generations:
        try:
            answers.append((await generation.response()).token_ids)
        except RequestFailed as error:
            answers.append(error)
    return answers


@pytest.mark.anyio
@pytest.mark.parametrize(("point", "at"), [("prefill", 0), ("decode", 0), ("decode", 9), ("sample", 0), ("sample", 12)])
async def test_a_step_that_raises_ends_its_rows_alone(engine_of: MakeEngine, point: Point, at: int) -> None:
    async with engine_of(FaultPlan()) as engine:
        expected = await ask(engine)
    async with engine_of(FaultPlan(Fault(point, at=at))) as engine:
        found = await ask(engine)
        failed = [answer for answer in found if isinstance(answer, RequestFailed)]
        assert failed
        assert all(isinstance(error.__cause__, InjectedFault) for error in failed)
        assert all(answer in (right, *failed) for answer, right in zip(found, expected, strict=True))
        await settle(engine)
        assert engine.stats().steps_failed == 1
        for _ in range(2):
            assert await ask(engine) == expected
        await settle(engine)


def test_a_cuda_error_is_the_end_of_the_engine(folder: Path) -> None:
    """In a process of its own, in which no kernel runs afterwards, but all else does."""
    done = subprocess.run(
        [sys.executable, "-c", LOST, str(folder)], capture_output=True, text=True, timeout=120, check=False
    )
    assert "dead True" in done.stdout, done.stdout + done.stderr
    assert "closed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
