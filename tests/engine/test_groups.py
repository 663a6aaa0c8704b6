"""Groups among running requests: which rows are preempted for which, and whose prompt is computed first."""

from __future__ import annotations

from typing import Any

import pytest

from asyncllm.engine.schedule.quality_of_service import QualityOfService
from asyncllm.engine.schedule.sequence import Request, RequestPolicy, SequenceState
from asyncllm.engine.schedule.waiting_queue import MAX_PASSED, PATIENCE_S, WaitingQueue
from tests.engine.driver import Driver, expected_answer
from tests.engine.policies import GROUPS, Clock, policy_of


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def quality(clock: Clock) -> QualityOfService:
    return QualityOfService(policy_of(GROUPS), clock)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_last_group_gives_way_first_and_for_one_before_it_alone(
    quality: QualityOfService, clock: Clock, depth: int
) -> None:
    driver = Driver(num_slots=4, max_batch_size=3, waiting=WaitingQueue(quality, clock))
    zoe, ann, bob, boss = (quality.users[each] for each in ("zoe", "ann", "bob", "boss"))
    first = [
        driver.submit([number], 30, policy=RequestPolicy(user=user)) for number, user in enumerate((ann, zoe, zoe))
    ]
    driver.turn(depth)
    equal = driver.submit([3], 30, policy=RequestPolicy(user=zoe))
    driver.turn(depth)
    assert driver.scheduler.counts.preemptions == 0
    for number, user in enumerate((bob, boss, boss, boss)):
        driver.submit([4 + number], 4, policy=RequestPolicy(user=user))
    for _ in range(depth):
        driver.turn(depth)
        driver.check()
    running = [row.request.policy.user for row in driver.scheduler._running]
    assert running == [boss] * 3
    assert driver.scheduler.counts.preemptions == 3, "ann's row and both of zoe's, and none for bob"
    driver.drain(depth)
    driver.check_drained()
    for request in (*first, equal):
        assert driver.answers(request) == [expected_answer(request.prompt_ids, 30)]


@pytest.mark.parametrize("host_blocks", [0, 16])
def test_it_takes_blocks_too_as_many_as_it_needs_and_at_once(
    quality: QualityOfService, clock: Clock, host_blocks: int
) -> None:
    driver = Driver(
        num_blocks=16, num_slots=8, num_host_blocks=host_blocks, caching=False, waiting=WaitingQueue(quality, clock)
    )
    for number in range(5):
        driver.submit([number] * 8, 20, policy=RequestPolicy(user=quality.users["zoe"]))
    driver.turn(1)
    assert driver.scheduler.num_running == 5
    mine = driver.submit([1] * 40, 1, policy=RequestPolicy(user=quality.users["boss"]))
    driver.turn(1)
    driver.turn(1)
    assert mine.sequences[0].state is not SequenceState.WAITING
    assert driver.scheduler.counts.preemptions == 3, "two may keep what they have"
    driver.drain()
    driver.check_drained()


@pytest.mark.parametrize("num_slots", [4, 8])
@pytest.mark.parametrize("prompt", [1, 40])
def test_what_steps_in_flight_hold_is_waited_for(
    quality: QualityOfService, clock: Clock, num_slots: int, prompt: int
) -> None:
    """Slot and blocks of a preempted sequence come back when those steps have been read: no other need be preempted."""
    driver = Driver(
        num_blocks=16, num_slots=num_slots, max_batch_size=4, caching=False, waiting=WaitingQueue(quality, clock)
    )
    for number in range(4):
        driver.submit([number] * 8, 20, policy=RequestPolicy(user=quality.users["zoe"]))
    for _ in range(2):
        driver.schedule()
    mine = driver.submit([1] * prompt, 1, policy=RequestPolicy(user=quality.users["boss"]))
    needed = 1 if prompt == 1 else 3
    while not mine.finished:
        driver.schedule()
        assert driver.scheduler.counts.preemptions <= needed
        driver.complete()
    driver.drain()
    driver.check_drained()


def test_a_sequence_out_of_patience_keeps_its_row(quality: QualityOfService, clock: Clock) -> None:
    driver = Driver(num_slots=2, max_batch_size=1, waiting=WaitingQueue(quality, clock))
    patient = driver.submit([1], 20, policy=RequestPolicy(user=quality.users["zoe"]))
    driver.scheduler.waiting._passed = MAX_PASSED
    driver.submit([2], 4, policy=RequestPolicy(user=quality.users["boss"]))
    clock.now += PATIENCE_S
    while not patient.finished:
        driver.turn()
    assert driver.scheduler.counts.preemptions == 0
    driver.drain()


def test_a_request_that_comes_too_late_takes_no_row(quality: QualityOfService, clock: Clock) -> None:
    driver = Driver(num_slots=2, max_batch_size=1, waiting=WaitingQueue(quality, clock))
    driver.scheduler.waiting.deadlines.learn(10.0, 0.0, 1, stopped=False)
    driver.submit([1], 20, policy=RequestPolicy(user=quality.users["zoe"]))
    driver.turn()
    boss = quality.users["boss"]
    driver.submit([2], 4, policy=RequestPolicy(user=boss, deadline=clock.now + 1))
    for _ in range(5):
        driver.turn()
    assert driver.scheduler.counts.preemptions == 0
    driver.submit([3], 4, policy=RequestPolicy(user=boss, deadline=clock.now + 100))
    driver.turn()
    assert driver.scheduler.counts.preemptions == 1
    driver.drain()


def test_without_groups_no_request_takes_a_row() -> None:
    driver = Driver(num_slots=2, max_batch_size=1)
    driver.submit([1], 9, policy=RequestPolicy(priority=5))
    driver.turn()
    driver.submit([2], 1, policy=RequestPolicy(priority=-5))
    driver.drain()
    assert driver.scheduler.counts.preemptions == 0


@pytest.mark.parametrize("policy", [RequestPolicy(priority=-1), None])
def test_a_higher_class_has_its_prompt_computed_before_a_long_one(
    quality: QualityOfService, clock: Clock, policy: RequestPolicy | None
) -> None:
    queue = WaitingQueue(quality, clock) if policy is None else WaitingQueue()
    driver = Driver(budget=8, caching=False, waiting=queue)
    long = driver.submit(
        [1] * 80, 2, policy=RequestPolicy(user=quality.users["ann"]) if policy is None else RequestPolicy()
    )
    driver.turn(1)
    mine = [
        driver.submit([number] * 5, 2, policy=policy or RequestPolicy(user=quality.users["boss"]))
        for number in range(2)
    ]
    driver.turn(1)
    assert [len(row.tokens) for row in driver.batches[-1].prefill] == [5, 3]
    driver.turn(1)
    assert [len(row.tokens) for row in driver.batches[-1].prefill] == [2, 6]
    driver.drain()
    for request in mine:
        assert driver.answers(request) == [expected_answer(request.prompt_ids, 2)]
    assert driver.answers(long) == [expected_answer(long.prompt_ids, 2)]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_group_is_preempted_for_one_after_it(quality: QualityOfService, clock: Clock, depth: int) -> None:
    driver = Driver(num_blocks=12, num_slots=4, waiting=WaitingQueue(quality, clock))
    users = [quality.users[user_id] for user_id in ("zoe", "boss", "bob", "zoe")]
    requests = []
    for index, user in enumerate(users):
        requests.append(driver.submit([index, 1, 2], 24, policy=RequestPolicy(user=user)))
        driver.schedule()  # so that rows are taken in this order
        driver.complete()
    victims: list[int] = []
    preempt = driver.scheduler._preempt

    def watched(row: Any) -> None:
        victims.append(row.request.policy.user.group)
        assert victims[-1] == max(other.request.policy.user.group for other in driver.scheduler._running)
        preempt(row)

    driver.scheduler._preempt = watched  # type: ignore[method-assign]
    ends: list[Request] = []
    while driver.turn(depth):
        driver.check()
        ends += [request for request in requests if request.finished and request not in ends]
    assert victims
    assert ends[0] is requests[1]
    driver.check_drained()
