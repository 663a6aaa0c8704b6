"""New weights, sleep and waking up in the engine loop: between steps, one at a time, and no request is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncllm.config import EngineConfig, GenerationConfig
from asyncllm.engine.loop.control import PARTS
from asyncllm.errors import (
    DeadlineExceeded,
    EngineClosed,
    EngineDead,
    InvalidParameter,
    ModelError,
    QueueFull,
)
from asyncllm.protocol import Command, Sleep, UpdateWeights, Wake
from asyncllm.testing import FakeEngine, FakePipeline, hash_oracle
from tests.engine.waits import settle, until

pytestmark = pytest.mark.anyio

ANSWER = GenerationConfig(max_new_tokens=12, ignore_eos=True)
LONG = GenerationConfig(max_new_tokens=200, ignore_eos=True)


def new_engine(*, stall_timeout: float = 0.0, max_queued_requests: int = 0, **device: Any) -> FakeEngine:
    config = EngineConfig(max_batch_size=2, stall_timeout=stall_timeout, max_queued_requests=max_queued_requests)
    return FakeEngine(None, config, **{"oracle": hash_oracle(256), "num_blocks": 256, **device})


class TestBetweenSteps:
    """FakeExecutor refuses commands while a step is in flight; FakeDevice steps that read what was written before."""

    async def test_the_answers_of_those_who_run_and_wait_are_the_same(self) -> None:
        async with new_engine(latency=0.0005) as engine:
            expected = [(await engine.generate(f"question {number}", LONG)).token_ids for number in range(5)]
            tasks = [asyncio.create_task(engine.generate(f"question {number}", LONG).response()) for number in range(5)]
            for round in range(10):
                await asyncio.sleep(0.01)
                await engine.update_weights({"round": round})
                await engine.sleep(1 + round % 2)
                assert engine.stats().running == 0
                await engine.wake()
            assert [(await task).token_ids for task in tasks] == expected
            stats = engine.stats()
            assert stats.preemptions > 0
            assert (stats.weight_updates, stats.sleep_level) == (10, 0)
            await settle(engine)

    async def test_nothing_cached_before_is_used_after(self) -> None:
        async with new_engine() as engine:
            prompt = "the same prompt, long enough for some blocks"
            await engine.generate(prompt, ANSWER)
            assert (await engine.generate(prompt, ANSWER)).cached_token_len > 0
            for change in (engine.update_weights({}), engine.sleep()):
                await change
                assert engine.stats().blocks_cached == 0
                await engine.wake()
                assert (await engine.generate(prompt, ANSWER)).cached_token_len == 0
                assert (await engine.generate(prompt, ANSWER)).cached_token_len > 0

    async def test_a_session_goes_on(self) -> None:
        async with new_engine() as engine, engine.session() as session:
            first = await session.chat("what was it", ANSWER)
            await engine.update_weights({})
            second = await session.chat("and then", ANSWER)
            assert second.history_token_len == len(session.token_ids) - second.input_token_len - 12
            assert second.cached_token_len == 0
            third = await session.chat("and then", ANSWER)
            assert third.cached_token_len > 0, "its blocks are pinned anew"
            assert first.finish_reason == "length"

    async def test_they_wait_for_the_steps_in_flight_and_come_in_the_order_of_the_calls(self) -> None:
        async with new_engine() as engine:
            engine.executor.pause()
            running = asyncio.create_task(engine.generate("Hi", ANSWER).response())
            await until(lambda: engine.stats().steps_in_flight == 2)
            changes = [asyncio.create_task(engine.update_weights({"n": number})) for number in range(3)]
            changes.append(asyncio.create_task(engine.sleep(2)))
            changes.append(asyncio.create_task(engine.wake()))
            await asyncio.sleep(0.02)
            assert not any(change.done() for change in changes)
            assert not engine.executor.commands
            engine.executor.resume()
            await asyncio.gather(*changes)
            assert engine.executor.commands == [*(UpdateWeights({"n": n}) for n in range(3)), Sleep(2), Wake(PARTS)]
            assert len((await running).token_ids) == 12

    async def test_a_refusal_changes_nothing(self) -> None:
        refused = InvalidParameter("wrong shape", "weights")
        async with new_engine(command_error=lambda command: refused, latency=0.0005) as engine:
            prompt = "a prompt that is long enough to be cached"
            expected = (await engine.generate(prompt, LONG)).token_ids
            running = asyncio.create_task(engine.generate(prompt, LONG).response())
            await until(lambda: engine.stats().running)
            for change in (engine.update_weights({"a": 1}), engine.sleep(), engine.wake()):
                with pytest.raises(InvalidParameter, match="wrong shape"):
                    await change
            response = await running
            assert response.token_ids == expected
            assert response.cached_token_len > 0
            stats = engine.stats()
            assert (stats.preemptions, stats.weight_updates, stats.sleep_level) == (0, 0, 0)

    async def test_a_failure_halfway_ends_the_engine(self) -> None:
        failure = RuntimeError("the device is lost")
        async with new_engine(command_error=lambda command: failure, latency=0.0005) as engine:
            running = asyncio.create_task(engine.generate("Hi", LONG).response())
            await until(lambda: engine.stats().running)
            changes = [asyncio.create_task(engine.update_weights({})) for _ in range(2)]
            for task in (*changes, running):
                with pytest.raises(EngineDead) as caught:
                    await task
                assert caught.value.__cause__ is failure


class TestHung:
    """What is never carried out ends the engine, and what never ends does not keep it from closing."""

    async def test_a_command_that_does_not_end_is_a_stall(self) -> None:
        async with new_engine(stall_timeout=0.05) as engine:
            engine.executor.carry_out = lambda command: asyncio.get_running_loop().create_future()
            waiting = asyncio.create_task(engine.generate("Hi", LONG).response())
            await until(lambda: engine.stats().running)
            changes = [asyncio.create_task(engine.sleep()), asyncio.create_task(engine.wake())]
            async with asyncio.timeout(20):
                for task in (waiting, *changes):
                    with pytest.raises(EngineDead, match=r"Sleep.*stall_timeout"):
                        await task

    async def test_close_waits_no_longer_than_for_a_stall(self) -> None:
        engine = new_engine(stall_timeout=0.2)
        await engine.start()
        running = asyncio.create_task(engine.generate("Hi", LONG).response())
        await until(lambda: engine.stats().running)
        engine.executor.pause()
        async with asyncio.timeout(20):
            await engine.close()
        with pytest.raises(EngineClosed):
            await running


class TestAsleep:
    async def test_twice_is_once_and_deeper_is_deeper(self) -> None:
        async with new_engine() as engine:
            await engine.wake()
            assert engine.stats().sleep_level == 0
            levels = []
            for level in (1, 1, 2, 1):
                await engine.sleep(level)
                levels.append(engine.stats().sleep_level)
            assert levels == [1, 1, 2, 2]
            await engine.wake()
            await engine.wakeup()
            assert engine.stats().sleep_level == 0
            assert len((await engine.generate("Hi", ANSWER)).token_ids) == 12

    async def test_parts_wake_one_by_one(self) -> None:
        async with new_engine() as engine:
            for level in (1, 2):
                await engine.sleep(level)
                waiting = asyncio.create_task(engine.generate("Hi", ANSWER).response())
                await engine.wake(["weights"])
                await engine.update_weights({})
                await asyncio.sleep(0.01)
                assert engine.stats().sleep_level == level
                assert not waiting.done()
                await engine.wake(["kv_cache"])
                assert engine.stats().sleep_level == 0
                assert len((await waiting).token_ids) == 12
            await engine.sleep(2)
            await engine.update_weights({})
            await engine.wake(["kv_cache"])
            assert engine.stats().sleep_level == 0, "lost weights came back by the update"
            await engine.sleep(1)
            await engine.update_weights({})
            await engine.wake(["kv_cache"])
            assert engine.stats().sleep_level == 1, "the host's copies were updated"

    async def test_requests_come_and_go_and_none_is_computed(self) -> None:
        async with new_engine(max_queued_requests=3) as engine:
            running = [asyncio.create_task(engine.generate("Hi", LONG).response()) for _ in range(2)]
            await until(lambda: engine.stats().running == 2)
            await engine.sleep()
            steps = engine.stats().steps
            late = asyncio.create_task(engine.generate("Ho", LONG, timeout=0.05).response())
            await until(lambda: engine.stats().waiting == 3)
            with pytest.raises(QueueFull):
                await engine.generate("Hu", LONG)
            with pytest.raises(DeadlineExceeded):
                await late
            running[0].cancel()
            await until(lambda: engine.stats().waiting == 1)
            stats = engine.stats()
            assert (stats.steps, stats.blocks_held, stats.running, stats.steps_in_flight) == (steps, 0, 0, 0)
            await engine.wake()
            assert len((await running[1]).token_ids) == 200
            await settle(engine)

    async def test_the_bound_counts_all_who_come(self) -> None:
        """Free rows are of no use while it sleeps."""
        async with new_engine(max_queued_requests=1) as engine:
            await engine.sleep()
            first = engine.generate("Hi", ANSWER)
            await first.start()
            with pytest.raises(QueueFull):
                await engine.generate("Ho", ANSWER)
            await engine.wake()
            assert len((await first).token_ids) == 12

    async def test_it_is_no_stall_but_one_after_it_is(self) -> None:
        async with new_engine(stall_timeout=0.1) as engine:
            running = asyncio.create_task(engine.generate("Hi", LONG).response())
            await until(lambda: engine.stats().running)
            await engine.sleep()
            waiting = asyncio.create_task(engine.generate("Ho", LONG).response())
            await asyncio.sleep(0.3)
            assert engine.stats().seconds_since_progress == 0
            await engine.wake()
            await running
            await waiting
            await engine.sleep()
            stuck = asyncio.create_task(engine.generate("Hi", LONG).response())
            engine.executor.pause()
            await engine.wake()
            with pytest.raises(EngineDead, match="stall_timeout"):
                await stuck

    async def test_what_finds_no_room_sleeps_on(self) -> None:
        errors: list[ModelError] = [ModelError("no memory left")]

        def once(command: Command) -> Exception | None:
            return errors.pop() if errors and isinstance(command, Wake) else None

        async with new_engine(command_error=once) as engine:
            await engine.sleep()
            waiting = asyncio.create_task(engine.generate("Hi", ANSWER).response())
            with pytest.raises(ModelError, match="no memory left"):
                await engine.wake()
            assert engine.stats().sleep_level == 1
            assert not waiting.done()
            await engine.wake()
            assert len((await waiting).token_ids) == 12

    async def test_close(self) -> None:
        engine = new_engine()
        await engine.start()
        running = asyncio.create_task(engine.generate("Hi", LONG).response())
        await until(lambda: engine.stats().running)
        await engine.sleep()
        await engine.close()
        with pytest.raises(EngineClosed):
            await running
        for call in (engine.update_weights({}), engine.sleep(), engine.wake()):
            with pytest.raises(EngineClosed):
                await call


class TestPaused:
    async def test_answers_go_on_where_they_were(self) -> None:
        async with new_engine(latency=0.0005) as engine:
            expected = (await engine.generate("Hi", LONG)).token_ids
            running = asyncio.create_task(engine.generate("Hi", LONG).response())
            await until(lambda: engine.stats().running)
            await engine.pause()
            assert engine.paused
            steps, late = engine.stats().steps, asyncio.create_task(engine.generate("Ho", ANSWER).response())
            expired = asyncio.create_task(engine.generate("Hu", ANSWER, timeout=0.05).response())
            with pytest.raises(DeadlineExceeded):
                await expired
            assert (engine.stats().steps, engine.stats().seconds_since_progress) == (steps, 0)
            await engine.sleep()
            await engine.wake()
            assert engine.paused
            assert not late.done()
            await engine.resume()
            assert (await running).token_ids == expected
            assert len((await late).token_ids) == 12
            assert not engine.paused
            await settle(engine)

    async def test_open_answers_end_first(self) -> None:
        """Those that wait for a row too; those that come later wait, expire and are abandoned."""
        async with new_engine(latency=0.0005) as engine:
            tasks = [asyncio.create_task(engine.generate("Hi", LONG).response()) for _ in range(4)]
            await until(lambda: (engine.stats().running, engine.stats().waiting) == (2, 2))
            pausing = asyncio.create_task(engine.pause("wait"))
            await asyncio.sleep(0)
            late = [asyncio.create_task(engine.generate("Ho", ANSWER).response()) for _ in range(2)]
            expired = asyncio.create_task(engine.generate("Hu", ANSWER, timeout=0.005).response())
            with pytest.raises(DeadlineExceeded):
                await expired
            late[0].cancel()
            await pausing
            assert [len(task.result().token_ids) for task in tasks] == [200] * 4
            assert (engine.stats().running, engine.stats().waiting, late[1].done()) == (0, 1, False)
            await engine.pause("wait")
            await engine.resume()
            assert len((await late[1]).token_ids) == 12
            await settle(engine)

    async def test_open_answers_are_cut_short(self) -> None:
        async with new_engine(latency=0.0005) as engine:
            generation = engine.generate("Hi", LONG)
            first = await anext(generation)
            waiting = [asyncio.create_task(engine.generate("Hi", LONG).response()) for _ in range(3)]
            await until(lambda: engine.stats().running == 2)
            await engine.pause("abort")
            assert [(await task).finish_reason for task in waiting] == ["abort"] * 3
            rest = [chunk async for chunk in generation]
            assert rest[-1].finish_reason == "abort"
            assert len(first.token_ids) + sum(len(chunk.token_ids) for chunk in rest) < 200
            await engine.resume()
            assert len((await engine.generate("Ho", ANSWER)).token_ids) == 12
            await settle(engine)

    async def test_a_pause_that_is_cancelled_holds_nothing(self) -> None:
        async with new_engine(latency=0.0005) as engine:
            running = asyncio.create_task(engine.generate("Hi", LONG).response())
            await until(lambda: engine.stats().running)
            pausing = asyncio.create_task(engine.pause("wait"))
            await asyncio.sleep(0.002)
            pausing.cancel()
            assert len((await engine.generate("Ho", ANSWER)).token_ids) == 12
            assert len((await running).token_ids) == 200
            assert not engine.paused


async def test_the_prefix_cache_is_dropped_and_running_answers_stay_the_same() -> None:
    async with new_engine(latency=0.0005) as engine:
        prompt = "the same prompt, long enough for some blocks"
        expected = (await engine.generate(prompt, LONG)).token_ids
        running = asyncio.create_task(engine.generate(prompt, LONG).response())
        await until(lambda: engine.stats().running)
        await engine.reset_prefix_cache()
        assert (engine.stats().blocks_cached, engine.stats().preemptions) == (0, 1)
        assert (await running).token_ids == expected
        await engine.reset_prefix_cache()
        assert (await engine.generate(prompt, ANSWER)).cached_token_len == 0


@pytest.mark.parametrize("begun", [True, False])
async def test_close_ends_what_is_under_way(begun: bool) -> None:
    engine = new_engine(latency=0.01)
    await engine.start()
    if not begun:
        engine.executor.pause()
        running = asyncio.create_task(engine.generate("Hi", LONG).response())
        await until(lambda: engine.stats().steps_in_flight)
    changes = [asyncio.create_task(engine.update_weights({})), asyncio.create_task(engine.sleep())]
    await until(lambda: len(engine.executor.commands) >= begun)
    engine.executor.resume()
    await engine.close()
    results = await asyncio.gather(*changes, return_exceptions=True)
    assert all(result is None or isinstance(result, EngineClosed) for result in results)
    assert [result is None for result in results] == [number < len(engine.executor.commands) for number in range(2)]
    if not begun:
        with pytest.raises(EngineClosed):
            await running


@pytest.mark.parametrize(
    ("method", "argument", "param"),
    [
        ("sleep", 0, "level"),
        ("sleep", 3, "level"),
        ("sleep", True, "level"),
        ("sleep", "1", "level"),
        ("sleep", [1], "level"),
        ("sleep", 1.0, "level"),
        ("sleep", None, "level"),
        pytest.param("sleep", 10**5000, "level", id="sleep huge"),
        ("wake", "weights", "tags"),
        ("wake", [["weights"]], "tags"),
        ("wake", ["weights", {}], "tags"),
        ("wake", {"weights": 1}, "tags"),
        ("wake", [None], "tags"),
        ("wake", 1, "tags"),
        pytest.param("wake", [10**5000], "tags", id="wake huge"),
        ("wake", [], "tags"),
        ("wake", ["kv"], "tags"),
        ("pause", "later", "mode"),
        ("pause", ["keep"], "mode"),
        ("pause", None, "mode"),
        ("update_weights", None, "weights"),
        ("update_weights", ["ab"], "weights"),
        ("update_weights", {1: 2}, "weights"),
        ("update_weights", "ab", "weights"),
        ("update_weights", [[["a"], 1]], "weights"),
        ("update_weights", [(["a"], 1)], "weights"),
        pytest.param("update_weights", [10**5000], "weights", id="update_weights huge"),
        ("update_weights", 3, "weights"),
        ("update_weights", [("a", 1), ("a", 2)], "weights"),
    ],
)
async def test_bad_arguments(method: str, argument: Any, param: str) -> None:
    async with new_engine() as engine:
        with pytest.raises(InvalidParameter) as caught:
            await getattr(engine, method)(argument)
        assert caught.value.param == param
        assert not engine.executor.commands


async def test_weights_may_be_pairs() -> None:
    async with new_engine() as engine:
        await engine.update_weights((name, number) for number, name in enumerate("ab"))
        assert engine.executor.commands == [UpdateWeights({"a": 0, "b": 1})]


class TestCancelled:
    async def test_before_it_begins_is_nothing(self) -> None:
        async with new_engine() as engine:
            engine.executor.pause()
            running = asyncio.create_task(engine.generate("Hi", ANSWER).response())
            await until(lambda: engine.stats().steps_in_flight)
            change = asyncio.create_task(engine.sleep())
            await asyncio.sleep(0.01)
            change.cancel()
            await asyncio.wait([change])
            engine.executor.resume()
            assert len((await running).token_ids) == 12
            assert not engine.executor.commands

    async def test_after_that_it_goes_on_to_its_end(self) -> None:
        async with new_engine() as engine:
            change = asyncio.create_task(engine.sleep())
            await until(lambda: engine.executor.commands)
            change.cancel()
            await asyncio.wait([change])
            await engine.update_weights({})
            assert engine.stats().sleep_level == 1
            await engine.wake()
            assert len((await engine.generate("Hi", ANSWER)).token_ids) == 12


def test_the_pipeline_does_the_same() -> None:
    with FakePipeline({"ping": "pong"}) as pipe:
        pipe.update_weights({"a": 1})
        pipe.sleep(2)
        assert pipe.stats().sleep_level == 2
        pipe.wakeup()
        assert pipe("ping").text == "pong"  # type: ignore[union-attr]
        assert pipe.executor.commands == [UpdateWeights({"a": 1}), Sleep(2), Wake(PARTS)]
