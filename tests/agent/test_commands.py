"""Commands to a launcher: between steps, in the executor's thread, and fatal only when they fail halfway."""

from __future__ import annotations

import asyncio
import threading

import pytest

from asyncllm.agent.executor import StepExecutor
from asyncllm.errors import EngineClosed, EngineDead, InvalidParameter
from asyncllm.protocol import Sleep
from tests.agent.test_executor import empty_batch
from tests.agent.test_executor_ahead import Made, running, until


@pytest.mark.anyio
async def test_a_command_runs_in_the_thread_and_a_refused_one_changes_nothing() -> None:
    async with running() as (executor, launcher):
        await executor.carry_out(Sleep(1))
        with pytest.raises(InvalidParameter, match="not that deep"):
            await executor.carry_out(Sleep(2))
        assert (await executor.submit(empty_batch())).step == 0
        assert launcher.threads["carry_out"] == {"asyncllm-step"}
        assert threading.current_thread().name not in launcher.threads["carry_out"]


@pytest.mark.anyio
async def test_a_command_that_fails_halfway_is_the_last_of_the_launcher() -> None:
    made = Made(failures={"carry_out": 1})
    executor = StepExecutor(made, release=made.release)
    await executor.start()
    with pytest.raises(ValueError, match="broken carry_out") as failed:
        await executor.carry_out(Sleep(1))
    for later in (executor.submit(empty_batch()), executor.carry_out(Sleep(1))):
        with pytest.raises(EngineDead) as dead:
            await later
        assert dead.value.__cause__ is failed.value
    async with asyncio.timeout(5):
        await until(lambda: made.gone)
    await executor.close()
    with pytest.raises(EngineClosed):
        executor.carry_out(Sleep(1))
