"""Bursts of requests begin a few at a time, in order, and other callbacks run in between."""

from __future__ import annotations

import asyncio

import pytest

from asyncllm.event_loop.request_gate import MAX_PER_ITERATION, RequestGate

pytestmark = pytest.mark.anyio


async def turns_of(request_gate: RequestGate, count: int, leaving: range = range(0)) -> list[int]:
    """In which turn of the event loop each of a crowd has passed; -1: it left while it waited."""
    turn = 0
    passed = [-1] * count

    async def come(number: int) -> None:
        await request_gate.enter()
        passed[number] = turn

    tasks = [asyncio.create_task(come(number)) for number in range(count)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        turn += 1
        if turn == 1:
            for number in leaving:
                tasks[number].cancel()
    return passed


async def test_a_crowd_passes_a_few_a_turn_in_order() -> None:
    turns = await turns_of(RequestGate(4), 18)
    assert turns == sorted(turns)
    assert turns[0] == 0, "the first do not wait"
    assert max(turns.count(turn) for turn in turns) == 4
    assert max(turns) <= 18 // 4 + 2


async def test_a_request_that_leaves_takes_no_place() -> None:
    turns = await turns_of(RequestGate(2), 10, leaving=range(4, 8))
    assert [number for number, turn in enumerate(turns) if turn < 0] == [4, 5, 6, 7]
    assert max(turns) <= 4
    assert turns[8] == turns[9]


async def test_it_is_open_again_and_rests_without_requests() -> None:
    request_gate = RequestGate(2)
    for _ in range(2):
        await turns_of(request_gate, 5)
        for _ in range(3):
            await asyncio.sleep(0)
        assert not request_gate._turn_scheduled, "an idle server does nothing"
        assert await turns_of(request_gate, 2) == [0, 0]


async def test_one_request_after_another_never_waits() -> None:
    request_gate = RequestGate()
    for _ in range(3 * MAX_PER_ITERATION):
        entering = request_gate.enter()
        with pytest.raises(StopIteration):
            entering.send(None)
        await asyncio.sleep(0)
