"""The fake executor runs steps in order, in a thread, as late as it is told to, and ends from any state."""

from __future__ import annotations

import asyncio

import pytest

from asyncllm.errors import EngineClosed, InvalidCheckpoint
from asyncllm.protocol import Batch, PrefillRow, SamplingParams, Sleep, SlotStart, UpdateWeights
from asyncllm.testing import FakeExecutor, StepViolation

pytestmark = pytest.mark.anyio


def batch(step: int) -> Batch:
    """The first step prefills slot 0, later ones decode it."""
    params = SamplingParams(temperature=0.0)
    first = step == 0
    return Batch(
        step=step,
        starts=[SlotStart(slot=0, params=params, num_prompt=2, num_tokens=2, token_ids=[])] if first else [],
        new_blocks=[(0, 0, 0, [0, 1, 2])] if first else [],
        copies=[],
        decode=[] if first else [0],
        prefill=[PrefillRow(slot=0, tokens=[1, 2], position=0, sample=True)] if first else [],
    )


async def test_steps_complete_in_order() -> None:
    executor = FakeExecutor()
    limits = await executor.start()
    futures = [executor.submit(batch(step)) for step in range(4)]
    outputs = [await future for future in futures]
    await executor.close()
    assert limits.num_blocks == 64
    assert [output.step for output in outputs] == [0, 1, 2, 3]
    assert executor.max_in_flight == 4


async def test_a_paused_executor_completes_what_it_is_allowed_to() -> None:
    executor = FakeExecutor()
    await executor.start()
    executor.pause()
    futures = [executor.submit(batch(step)) for step in range(3)]
    executor.advance()
    await futures[0]
    await asyncio.sleep(0.01)
    assert [future.done() for future in futures] == [True, False, False]
    executor.resume()
    await asyncio.gather(*futures)
    await executor.close()


async def test_a_failing_step_fails_all_later_ones() -> None:
    executor = FakeExecutor(fail_at=1)
    await executor.start()
    futures = [executor.submit(batch(step)) for step in range(3)]
    await futures[0]
    for future in futures[1:]:
        with pytest.raises(RuntimeError, match="fails at step 1"):
            await future
    await executor.close()


async def test_close_drops_what_waits() -> None:
    executor = FakeExecutor(latency=60)
    await executor.start()
    futures = [executor.submit(batch(step)) for step in range(3)]
    await asyncio.sleep(0.01)
    await executor.close()
    await executor.close()
    assert all(isinstance(future.exception(), EngineClosed) for future in futures)
    with pytest.raises(EngineClosed):
        executor.submit(batch(3))


async def test_commands_are_carried_out_between_steps() -> None:
    executor = FakeExecutor()
    await executor.start()
    await executor.submit(batch(0))
    await executor.carry_out(UpdateWeights({"a": 1}))
    await executor.carry_out(Sleep(1))
    assert executor.device.weights == {"a": 1}
    with pytest.raises(StepViolation, match="sleeps"):
        await executor.submit(batch(1))
    await executor.close()


async def test_a_command_behind_a_step_in_flight_is_a_mistake() -> None:
    executor = FakeExecutor()
    await executor.start()
    executor.pause()
    step = executor.submit(batch(0))
    with pytest.raises(AssertionError, match="in flight"):
        executor.carry_out(Sleep(1))
    executor.resume()
    await step
    await executor.close()


async def test_close_without_start() -> None:
    executor = FakeExecutor()
    await executor.close()
    with pytest.raises(EngineClosed):
        executor.submit(batch(0))


async def test_start_error() -> None:
    executor = FakeExecutor(start_error=InvalidCheckpoint("broken"))
    with pytest.raises(InvalidCheckpoint):
        await executor.start()
    await executor.close()


async def test_cancelled_future_is_left_alone() -> None:
    executor = FakeExecutor(latency=0.005)
    await executor.start()
    first, second = executor.submit(batch(0)), executor.submit(batch(1))
    first.cancel()
    assert (await second).step == 1
    await executor.close()
