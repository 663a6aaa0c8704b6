"""Predictions of how long an answer takes, from the latest ones, and the statistics about them."""

from __future__ import annotations

import asyncio

import pytest

from asyncllm.config import GenerationConfig
from asyncllm.engine.schedule.deadlines import REMEMBERED, Deadlines
from asyncllm.engine.schedule.sequence import Sequence
from asyncllm.errors import DeadlineExceeded
from asyncllm.testing import FakeEngine
from tests.engine.driver import Driver
from tests.engine.waits import settle


def waiting(max_new_tokens: int) -> Sequence:
    return Driver().submit([1, 2, 3], max_new_tokens).sequences[0]


def test_nothing_is_expected_while_nothing_is_known() -> None:
    assert Deadlines().seconds(waiting(100)) == 0.0


def test_the_first_token_and_those_after_it() -> None:
    pace = Deadlines()
    pace.learn(0.5, 2.0, 21, stopped=False)
    assert pace.seconds(waiting(1)) == pytest.approx(0.5)
    assert pace.seconds(waiting(11)) == pytest.approx(1.5)
    assert pace.seconds(waiting(1001)) == pytest.approx(100.5), "nothing says that answers are shorter"


def test_answers_that_stop_by_themselves_tell_how_long_others_are() -> None:
    pace = Deadlines()
    for _ in range(REMEMBERED):
        pace.learn(0.5, 2.0, 21, stopped=True)
    assert pace.seconds(waiting(1001)) == pytest.approx(2.5)
    assert pace.seconds(waiting(11)) == pytest.approx(1.5)
    for _ in range(REMEMBERED // 10):
        pace.learn(0.5, 2.0, 21, stopped=False)
    assert pace.seconds(waiting(1001)) == pytest.approx(100.5), "some were cut short"


def test_it_covers_all_but_a_few_and_forgets() -> None:
    pace = Deadlines()
    for number in range(REMEMBERED):
        pace.learn(9.0 if number < 2 else 0.1, 1.0, 11, stopped=False)
    assert pace.seconds(waiting(1)) == pytest.approx(0.1)
    for _ in range(REMEMBERED):
        pace.learn(7.0, 1.0, 11, stopped=False)
    assert pace.seconds(waiting(1)) == pytest.approx(7.0)


def test_what_a_sequence_has_already_is_not_expected_again() -> None:
    pace = Deadlines()
    pace.learn(0.5, 2.0, 21, stopped=True)
    sequence = waiting(100)
    sequence.token_ids += [1] * 15
    sequence.remaining -= 15
    assert pace.seconds(sequence) == pytest.approx(0.5 + 5 * 0.1)


@pytest.mark.anyio
async def test_the_engine_tells_of_answers_and_not_of_those_who_left() -> None:
    async with FakeEngine("a", delay_per_token=0.002) as engine:
        learned: list[tuple[int, bool]] = []
        pace = engine.running().scheduler.waiting.deadlines
        learn = pace.learn

        def watched(first: float, following: float, tokens: int, *, stopped: bool) -> None:
            assert first > 0
            assert following >= 0
            learned.append((tokens, stopped))
            learn(first, following, tokens, stopped=stopped)

        pace.learn = watched  # type: ignore[method-assign]
        await engine.generate("stops")
        await engine.generate("is cut short", GenerationConfig(max_new_tokens=3, ignore_eos=True))
        endless = GenerationConfig(max_new_tokens=500, ignore_eos=True)
        with pytest.raises(DeadlineExceeded):
            await engine.generate("takes too long", endless, timeout=0.1)
        async with engine.generate("leaves", endless) as leaving:
            await anext(leaving)
        engine.executor.pause()
        with pytest.raises(DeadlineExceeded):
            await engine.generate("has no token", endless, timeout=0.05)
        engine.executor.resume()
        await settle(engine)
        await asyncio.sleep(0)
    assert learned[:2] == [(2, True), (3, False)]
    assert len(learned) == 3
    assert 1 <= learned[2][0] < 500
    assert not learned[2][1]
