"""A forward pass that raises in its middle: the requests outside that step get the very same tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm.agent.executor import StepExecutor
from asyncllm.agent.model_agent import ModelAgent
from asyncllm.config import EngineConfig, GenerationConfig
from asyncllm.engine.async_engine import AsyncEngine
from asyncllm.errors import EngineDead, RequestFailed
from asyncllm.layers.mlp import GatedMLP
from asyncllm.layers.step_inputs import StepInputs
from asyncllm.testing import ByteTokenizer, FakeTemplate, Fault, FaultPlan, InjectedFault
from tests.agent.tiny_model import AheadAgent, prompt_of, tiny_llama
from tests.engine.waits import settle, until

pytestmark = pytest.mark.anyio

PROMPTS = [prompt_of(length, seed) for seed, length in enumerate((5, 30, 17, 9))]
ANSWER = GenerationConfig(max_new_tokens=12, temperature=0.0, ignore_eos=True)
AGENTS = pytest.mark.parametrize("kind", [ModelAgent, AheadAgent])


@asynccontextmanager
async def engine_of(kind: type[ModelAgent], plan: FaultPlan) -> AsyncIterator[AsyncEngine]:
    """An engine over a small model, every forward pass of which comes to "alloc" in its last layer, when all keys and
    values are written."""
    config = EngineConfig(
        device_type="cpu", block_size=4, num_gpu_blocks=40, max_batch_size=8, num_cpu_blocks=20, eviction_type="copy"
    ).checked()
    model = tiny_llama()
    last = [module for module in model.modules() if isinstance(module, GatedMLP)][-1]
    forward = last.forward

    def faulty(hidden: Tensor, step: StepInputs) -> Tensor:
        plan.reach("alloc")
        return forward(hidden, step)

    last.forward = faulty  # type: ignore[method-assign]

    executor = StepExecutor(lambda: plan.agent(kind(config, Path("tiny"), model=model)))
    async with AsyncEngine(
        "tiny", config, executor=executor, tokenizer=ByteTokenizer(), chat_template=FakeTemplate()
    ) as engine:
        # Whatever it reached while it was warmed up is no occurrence.
        for fault in plan.faults:
            fault.num_reached = 0
        yield engine


async def ask(engine: AsyncEngine) -> list[Any]:
    """Token ids of all answers, or errors."""
    generations = [engine.generate(input_ids=prompt, gen_config=ANSWER) for prompt in PROMPTS]
    answers = await asyncio.gather(*generations, return_exceptions=True)
    return [answer if isinstance(answer, BaseException) else answer.token_ids for answer in answers]


@AGENTS
@pytest.mark.parametrize("at", [0, 1, 4, 11])
async def test_the_engine_goes_on(kind: type[ModelAgent], at: int) -> None:
    async with engine_of(kind, FaultPlan()) as engine:
        expected = await ask(engine)
    plan = FaultPlan(Fault("alloc", at=at))
    async with engine_of(kind, plan) as engine:
        found = await ask(engine)
        failed = [answer for answer in found if isinstance(answer, BaseException)]
        assert failed
        assert all(isinstance(error, RequestFailed) for error in failed)
        assert all(isinstance(error.__cause__, InjectedFault) for error in failed)
        await settle(engine)
        assert engine.stats().steps_failed == 1
        for _ in range(2):
            assert await ask(engine) == expected
        await settle(engine)


@AGENTS
async def test_a_sequence_admitted_behind_the_failing_step_is_computed_again(
    kind: type[ModelAgent],
) -> None:
    """Its slot was never started on the device when the step that was built on the failing one is dropped."""
    async with engine_of(kind, FaultPlan()) as engine:
        expected = await ask(engine)
    plan = FaultPlan(Fault("alloc", "sleep", seconds=0.05), Fault("alloc", at=0))
    async with engine_of(kind, plan) as engine:
        first = asyncio.create_task(engine.generate(input_ids=PROMPTS[1], gen_config=ANSWER).response())
        await until(lambda: engine.stats().steps >= 1 or first.done())
        found = await ask(engine)
        with pytest.raises(RequestFailed):
            await first
        assert found == expected
        await settle(engine)


@AGENTS
async def test_nan_that_a_failed_step_has_written_reaches_no_request(kind: type[ModelAgent]) -> None:
    plan = FaultPlan(Fault("prefill", "corrupt", times=2), Fault("alloc", at=3), Fault("sample", at=5))
    async with engine_of(kind, FaultPlan()) as engine:
        expected = await ask(engine)
    async with engine_of(kind, plan) as engine:
        for found, right in zip(await ask(engine), expected, strict=True):
            assert isinstance(found, RequestFailed) or found == right
        await settle(engine)
        plan.clear()
        assert await ask(engine) == expected
        await settle(engine)


@pytest.mark.parametrize("call", ["launch", "output"])
async def test_an_error_of_the_accelerator_is_the_end(call: str) -> None:
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    plan = FaultPlan(Fault("alloc" if call == "launch" else "sample", at=2, error=error))
    async with engine_of(AheadAgent, plan) as engine:
        found = await ask(engine)
        assert any(isinstance(answer, EngineDead) for answer in found)
        with pytest.raises(EngineDead) as dead:
            engine.stats()
        assert dead.value.__cause__ is error
        death = await engine.wait_ended()
        assert death is not None
        assert death.lost_device
