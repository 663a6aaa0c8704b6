"""What a step costs at 256 rows, and that waiting requests cost nothing. `bench/scheduler.py` prints the figures."""

from __future__ import annotations

import gc
import time
from collections import OrderedDict
from collections.abc import Iterator

import pytest

from asyncllm.engine.schedule.quality_of_service import QualityOfService, User
from asyncllm.engine.schedule.sequence import RequestPolicy, Sequence
from asyncllm.engine.schedule.waiting_queue import WaitingQueue
from tests.engine.driver import Driver
from tests.engine.policies import policy_of

ROWS = 256
STEPS = 60
BOUND_S = 0.6e-3
"""For schedule() and update() of one step; about four times what an idle core of this class needs."""


def crowd(waiting: int, num_users: int = 0) -> Driver:
    users: list[User | None] = [None]
    quality = None
    if num_users:
        quality = QualityOfService(policy_of({"all": {f"{number}": 100 / num_users for number in range(num_users)}}))
        users = list(quality.users.values())
    driver = Driver(
        num_blocks=ROWS * 40,
        block_size=64,
        num_slots=ROWS,
        max_batch_size=ROWS,
        budget=4096,
        caching=True,
        waiting=WaitingQueue(quality),
    )
    for number in range(ROWS + waiting):
        policy = RequestPolicy(user=users[number % len(users)])
        driver.submit([number % 8, number // 8 % 8, number // 64 % 8], 2000, policy=policy)
    return driver


def fastest_step(driver: Driver) -> float:
    """Seconds for schedule() and update() of a step that decodes all rows, without the device: the best of many."""
    scheduler = driver.scheduler
    while scheduler.num_running < ROWS:
        driver.turn()
    driver.turn()
    best = float("inf")
    gc.disable()
    try:
        for _ in range(STEPS):
            start = time.perf_counter()
            batch = scheduler.schedule()
            scheduled = time.perf_counter()
            assert batch is not None
            assert len(batch.decode) == ROWS
            driver.in_flight.append(batch)
            output = driver.device.step(driver.in_flight.popleft())
            before = time.perf_counter()
            scheduler.update(output)
            best = min(best, scheduled - start + time.perf_counter() - before)
    finally:
        gc.enable()
    return best


@pytest.mark.parametrize("num_users", [0, 1000])
@pytest.mark.parametrize("waiting", [10, 10_000])
def test_a_step_of_256_rows_costs_the_loop_less_than_0_6_ms(waiting: int, num_users: int) -> None:
    assert fastest_step(crowd(waiting, num_users)) < BOUND_S


def test_waiting_requests_cost_nothing() -> None:
    few, many = fastest_step(crowd(10)), fastest_step(crowd(10_000))
    # Looking at each of 10,000 would take a millisecond; colder caches take up to a tenth of that.
    assert many < few + 300e-6, f"{few * 1e6:.0f} us with 10 waiting, {many * 1e6:.0f} us with 10,000"


class CountingOrder(OrderedDict[Sequence, tuple[float, int]]):
    """Stands in for the queue's table and counts the sequences that are looked at."""

    touched = 0

    def __contains__(self, sequence: object) -> bool:
        self.touched += 1
        return super().__contains__(sequence)

    def __iter__(self) -> Iterator[Sequence]:
        for sequence in super().__iter__():
            self.touched += 1
            yield sequence


@pytest.mark.parametrize("waiting", [1, 500])
def test_a_step_looks_only_at_the_head_of_the_queue(waiting: int) -> None:
    driver = Driver(max_batch_size=4, num_slots=4)
    for number in range(4 + waiting):
        driver.submit([number % 8], 50)
    driver.turn()
    queue = driver.scheduler.waiting
    queue._waiting = order = CountingOrder(queue._waiting)
    order.touched = 0
    for _ in range(60):
        driver.turn()
    assert 0 < order.touched <= 100
