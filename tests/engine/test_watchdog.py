"""A stall is noticed while there is work, and only then; the error says what the engine was waiting for."""

from __future__ import annotations

import asyncio
import re
import time

import pytest

from asyncllm.config import EngineConfig, GenerationConfig
from asyncllm.engine.loop.watchdog import GRACE_S, Watchdog
from asyncllm.errors import EngineDead
from asyncllm.testing import FakeEngine, hash_oracle
from tests.engine.waits import settle, until

pytestmark = pytest.mark.anyio

LONG = GenerationConfig(max_new_tokens=500, ignore_eos=True)


def new_engine(stall_timeout: float = 0.0, **device: object) -> FakeEngine:
    config = EngineConfig(max_batch_size=2, stall_timeout=stall_timeout)
    return FakeEngine(None, config, oracle=hash_oracle(256), **device)


class Timers(asyncio.AbstractEventLoop):
    """The part of an event loop that a watchdog needs, with time that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.timers: list[tuple[float, asyncio.TimerHandle]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when, callback, *arguments, context=None):  # type: ignore[no-untyped-def]
        handle = asyncio.TimerHandle(when, callback, arguments, self)
        self.timers.append((when, handle))
        return handle

    def call_later(self, delay, callback, *arguments, context=None):  # type: ignore[no-untyped-def]
        return self.call_at(self.now + delay, callback, *arguments)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def get_debug(self) -> bool:
        return False

    def move(self, seconds: float) -> None:
        self.now += seconds
        due = [(when, handle) for when, handle in self.timers if when <= self.now]
        self.timers = [entry for entry in self.timers if entry not in due]
        for _, handle in due:
            if not handle.cancelled():
                handle._run()

    @property
    def num_set(self) -> int:
        return sum(not handle.cancelled() for _, handle in self.timers)


def test_it_calls_once_after_the_time_without_a_step() -> None:
    timers, stalls = Timers(), []
    watchdog = Watchdog(timers, 10.0, lambda: stalls.append(timers.now))
    assert timers.num_set == 0
    watchdog.watch()
    timers.move(9.0)
    watchdog.step_completed()
    timers.move(1.0)
    timers.move(8.5)
    assert watchdog.seconds_since_progress == 9.5
    watchdog.watch()
    assert timers.num_set == 1
    timers.move(0.5)
    assert stalls == []
    timers.move(GRACE_S)
    timers.move(100.0)
    assert stalls == [119.0 + GRACE_S]


def test_a_step_that_completed_while_the_event_loop_was_held_up_counts() -> None:
    timers = Timers()
    watchdog = Watchdog(timers, 10.0, lambda: pytest.fail("the device was not late"))
    watchdog.watch()
    for _ in range(3):
        timers.move(60.0)
        watchdog.step_completed()
        timers.move(GRACE_S)
        assert timers.num_set == 1


def test_it_sets_no_timer_per_step_and_none_at_rest() -> None:
    timers = Timers()
    watchdog = Watchdog(timers, 10.0, lambda: pytest.fail("there was progress"))
    watchdog.watch()
    for _ in range(1000):
        watchdog.step_completed()
        assert timers.num_set == 1
        timers.move(0.1)
    watchdog.rest()
    assert timers.num_set == 0
    assert watchdog.seconds_since_progress == 0.0
    timers.move(1000.0)


async def test_a_device_that_hangs_ends_the_engine() -> None:
    async with new_engine(stall_timeout=0.05) as engine:
        tasks = [asyncio.create_task(engine.generate("Hi", LONG).response()) for _ in range(5)]
        await until(lambda: engine.stats().steps > 5)
        engine.executor.pause()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for error in results:
            assert isinstance(error, EngineDead)
            assert isinstance(error.__cause__, TimeoutError)
            assert re.search(r"2 steps in flight.* 2 sequences run, 3 wait", str(error.__cause__))
        with pytest.raises(EngineDead, match=r"No step has completed for 0\.05 s"):
            await engine.generate("Hi")
        with pytest.raises(EngineDead):
            engine.stats()


async def test_work_that_is_never_scheduled_ends_the_engine() -> None:
    async with new_engine(stall_timeout=0.03) as engine:
        engine.running().scheduler.admission.max_running = 0  # as if rows were lost
        with pytest.raises(EngineDead, match="waits for a step to be scheduled: 0 sequences run, 1 wait"):
            await engine.generate("Hi", LONG)


async def test_slow_steps_and_idle_times_are_no_stall() -> None:
    async with new_engine(stall_timeout=0.2, latency=0.02) as engine:
        for _ in range(2):
            answer = await engine.generate("Hi", GenerationConfig(max_new_tokens=15, ignore_eos=True))
            assert answer.finish_reason == "length"
            await settle(engine)
            await asyncio.sleep(0.25)
        assert engine.stats().seconds_since_progress == 0.0
        assert engine.running()._watchdog._timer is None


async def test_an_event_loop_that_was_held_up_is_no_stall() -> None:
    async with new_engine(stall_timeout=0.3, latency=0.002) as engine:
        async with engine.generate("Hi", LONG) as generation:
            for _ in range(3):
                await anext(generation)
                time.sleep(0.4)  # noqa: ASYNC251 - what a program must not do, and what must not end the engine
                await asyncio.sleep(0.01)
            await anext(generation)
        await settle(engine)


async def test_stats_show_how_long_nothing_has_come() -> None:
    async with new_engine() as engine:
        assert engine.stats().seconds_since_progress == 0.0
        async with engine.generate("Hi", LONG) as generation:
            await anext(generation)
            assert engine.stats().seconds_since_progress < 0.5
            engine.executor.pause()
            await asyncio.sleep(0.06)
            late = engine.stats().seconds_since_progress
            engine.executor.resume()
        assert late >= 0.05
        await settle(engine)
        await asyncio.sleep(0)
        assert engine.stats().seconds_since_progress == 0.0
