"""The order of the queue: priority, then arrival; and no request is passed over forever."""

from __future__ import annotations

import random

import pytest

from asyncllm.engine.schedule.sequence import Request, RequestPolicy, Sequence, SequenceState
from asyncllm.engine.schedule.waiting_queue import MARGIN, MAX_PASSED, PATIENCE_S, WaitingQueue
from tests.engine.driver import Driver, expected_answer
from tests.engine.policies import Clock


def sequence(number: int, priority: int = 0, length: int = 3) -> Sequence:
    request = Driver().submit([1] * length, policy=RequestPolicy(priority=priority))
    request.id = number
    return request.sequences[0]


def drained(queue: WaitingQueue) -> list[int]:
    order = []
    while (first := queue.first()) is not None:
        order.append(first.request.id)
        queue.admit(first, 3)
    return order


def test_lower_priorities_come_first_and_equal_ones_as_they_arrived() -> None:
    queue = WaitingQueue()
    for number, priority in enumerate([0, 5, -1, 0, 5, -1]):
        queue.push(sequence(number, priority))
    assert drained(queue) == [2, 5, 0, 3, 1, 4]
    assert (len(queue), queue.num_requests, queue.num_tokens) == (0, 0, 0)


def test_a_sequence_that_left_is_not_next_and_does_not_count() -> None:
    queue = WaitingQueue()
    rows = [sequence(number, length=number + 1) for number in range(4)]
    for row in rows:
        queue.push(row)
    assert (queue.num_requests, queue.num_tokens) == (4, 1 + 2 + 3 + 4)
    for row in (rows[0], rows[2], rows[2]):
        queue.discard(row)
    assert (len(queue), queue.num_requests, queue.num_tokens) == (2, 2, 2 + 4)
    assert drained(queue) == [1, 3]


def test_sequences_that_left_from_the_middle_do_not_pile_up() -> None:
    queue = WaitingQueue()
    queue.push(sequence(0, priority=-1))
    for number in range(1, 2000):
        row = sequence(number)
        queue.push(row)
        queue.discard(row)
    assert len(queue._lanes[None]._heap) < 100
    assert drained(queue) == [0]


def test_a_sequence_that_comes_back_keeps_its_place() -> None:
    queue = WaitingQueue()
    rows = [sequence(number) for number in range(3)]
    for row in rows:
        queue.push(row)
    queue.admit(rows[0], 3)
    queue.push(rows[0])
    assert drained(queue) == [0, 1, 2]


class TestPatience:
    def crowd(self, clock: Clock) -> tuple[WaitingQueue, Sequence]:
        """One sequence of the last priority, and a queue that better ones keep coming to."""
        queue = WaitingQueue(clock=clock)
        patient = sequence(0, priority=9)
        queue.push(patient)
        for number in range(1, 100):
            queue.push(sequence(number))
        return queue, patient

    def passed_before(self, queue: WaitingQueue, patient: Sequence) -> int:
        for passed in range(100):
            first = queue.first()
            assert first is not None
            if first is patient:
                return passed
            queue.admit(first, 3)
        return 100

    def test_priority_holds_while_no_request_has_waited_long(self) -> None:
        clock = Clock()
        queue, patient = self.crowd(clock)
        clock.now += PATIENCE_S - 0.001
        assert self.passed_before(queue, patient) == 99

    def test_the_longest_wait_is_passed_a_bounded_number_of_times(self) -> None:
        clock = Clock()
        queue, patient = self.crowd(clock)
        clock.now += PATIENCE_S
        assert self.passed_before(queue, patient) == MAX_PASSED

    def test_the_bound_holds_for_each_in_turn(self) -> None:
        clock = Clock()
        queue = WaitingQueue(clock=clock)
        for number in range(8):
            queue.push(sequence(number, priority=9))
        for number in range(8, 400):
            queue.push(sequence(number))
        clock.now += PATIENCE_S
        order = drained(queue)
        assert [order.index(number) for number in range(8)] == [(MAX_PASSED + 1) * turn - 1 for turn in range(1, 9)]

    def test_a_sequence_out_of_patience_is_of_the_highest_class_until_it_waits_again(self) -> None:
        clock = Clock()
        queue, patient = self.crowd(clock)
        clock.now += PATIENCE_S
        self.passed_before(queue, patient)
        assert queue.rank(patient) == 9
        queue.admit(patient, 3)
        assert queue.rank(patient) < -(2**62)
        queue.push(patient)
        assert queue.rank(patient) == 9

    def test_in_a_queue_of_equals_it_changes_nothing(self) -> None:
        clock = Clock()
        queue = WaitingQueue(clock=clock)
        for number in range(100):
            queue.push(sequence(number))
        clock.now += 10 * PATIENCE_S
        assert drained(queue) == list(range(100))


class TestDeadlines:
    """An answer takes up to 10 s; the clock begins at 1,000 s."""

    def queue(self, deadlines: dict[int, float | None], priority: int = 0) -> tuple[WaitingQueue, Clock]:
        clock = Clock()
        queue = WaitingQueue(clock=clock)
        queue.deadlines.learn(10.0 / MARGIN, 0.0, 1, stopped=False)
        for number, deadline in deadlines.items():
            request = Driver().submit([1], 1, policy=RequestPolicy(priority, deadline=deadline))
            request.id = number
            queue.push(request.sequences[0])
        return queue, clock

    def test_requests_in_time_go_in_the_order_of_arrival(self) -> None:
        queue, _ = self.queue({0: 1011.0, 1: None, 2: 1500.0, 3: 1012.0})
        assert drained(queue) == [0, 1, 2, 3]

    def test_a_request_that_comes_too_late_goes_last_and_is_tried(self) -> None:
        queue, _ = self.queue({0: 1001.0, 1: 1009.9, 2: None, 3: 1100.0, 4: 1005.0})
        assert drained(queue) == [2, 3, 1, 4, 0]
        assert (len(queue), queue.num_requests) == (0, 0)

    def test_it_is_found_out_when_its_turn_comes(self) -> None:
        queue, clock = self.queue({0: 1015.0, 1: 1030.0})
        first = queue.first()
        assert first is not None
        assert first.request.id == 0
        clock.now += 6
        assert drained(queue) == [1, 0]

    def test_it_may_leave_while_it_lets_others_go(self) -> None:
        queue, _ = self.queue({0: 1001.0, 1: 1002.0, 2: 1003.0})
        late = [sequence for sequence in queue if sequence.request.id in (0, 2)]
        assert queue.first() is late[1]
        for sequence in late:
            queue.discard(sequence)
        assert drained(queue) == [1]

    def test_patience_is_not_for_those_who_come_too_late(self) -> None:
        queue, clock = self.queue({0: 1035.0, **dict.fromkeys(range(1, 100))})
        clock.now += PATIENCE_S
        assert drained(queue) == [*range(1, 100), 0]

    def test_late_ones_do_not_pile_up(self) -> None:
        queue, _ = self.queue(dict.fromkeys(range(2000), 1001.0))
        queue.first()
        for sequence in list(queue)[:-1]:
            queue.discard(sequence)
        lane = queue._lanes[None]
        assert len(lane._heap) + len(lane._late) < 100
        assert drained(queue) == [1999]


def test_any_order_of_calls_agrees_with_a_sorted_list() -> None:
    generator = random.Random(7)
    queue, model = WaitingQueue(clock=Clock()), []
    for number in range(3000):
        if model and generator.random() < 0.45:
            row = queue.first() if generator.random() < 0.5 else generator.choice(model)
            assert row is not None
            queue.discard(row)
            model.remove(row)
        else:
            row = sequence(number, generator.randrange(-2, 3))
            queue.push(row)
            model.append(row)
        expected = min(model, key=lambda row: (row.request.policy.priority, row.request.id)) if model else None
        assert queue.first() is expected
        assert (queue.num_requests, queue.num_tokens) == (len(model), 3 * len(model))


class TestScheduling:
    def started(self, driver: Driver) -> list[Request]:
        """Requests in the order of their first row."""
        order: list[Request] = []
        while driver.turn():
            driver.check()
            for request in driver.requests:
                if request.sequences[0].state is not SequenceState.WAITING and request not in order:
                    order.append(request)
        return order

    def test_rows_go_to_the_lowest_priority_value(self) -> None:
        driver = Driver(max_batch_size=1, num_slots=2)
        requests = [driver.submit([index], 3, policy=RequestPolicy(priority=index % 3)) for index in range(6)]
        assert self.started(driver) == [requests[index] for index in (0, 3, 1, 4, 2, 5)]
        for request in requests:
            assert driver.answers(request) == [expected_answer(request.prompt_ids, 3)]

    def test_siblings_follow_within_their_priority(self) -> None:
        driver = Driver(max_batch_size=1, num_slots=2)
        first = driver.submit([1, 2], 3, seeds=(None, 1, 2), policy=RequestPolicy(priority=1))
        driver.schedule()
        later = driver.submit([3], 3, policy=RequestPolicy(priority=1))
        urgent = driver.submit([4], 3, policy=RequestPolicy(priority=0))
        ends = []
        while driver.turn():
            ends += [request for request in driver.requests if request.finished and request not in ends]
        assert ends == [urgent, first, later]
        driver.check_drained()

    @pytest.mark.parametrize("depth", [1, 2, 3])
    @pytest.mark.parametrize("priorities", [(0, 0, 1, 1), (1, 0, 1, 0), (1, 1, 1, 0), (3, 2, 1, 0)])
    def test_the_last_class_is_preempted_first(self, priorities: tuple[int, ...], depth: int) -> None:
        """Four rows that grow to 7 blocks each, in a pool of 12."""
        driver = Driver(num_blocks=12, num_slots=4)
        requests = []
        for index, priority in enumerate(priorities):
            requests.append(driver.submit([index, 1, 2], 24, policy=RequestPolicy(priority=priority)))
            driver.schedule()  # so that rows are taken in this order
            driver.complete()
        preempted, preempt = [], driver.scheduler._preempt

        def watched(row: Sequence) -> None:
            running = [other.request.policy.priority for other in driver.scheduler._running]
            assert row.request.policy.priority == max(running)
            preempted.append(row.request)
            preempt(row)

        driver.scheduler._preempt = watched  # type: ignore[method-assign]
        while driver.turn(depth):
            driver.check()
        assert preempted, "the pool is too large for this test"
        best = min(requests, key=lambda request: (request.policy.priority, request.id))
        assert best not in preempted
        for request in requests:
            assert driver.answers(request) == [expected_answer(request.prompt_ids, 24)]
        driver.check_drained()

    def test_prompts_are_shared_only_under_equal_salt(self) -> None:
        driver = Driver()
        prompt = [1, 2, 3, 4, 5, 6, 7, 0, 1]
        salts = [None, None, "a", "a", "b", None]
        cached = []
        for salt in salts:
            request = driver.submit(prompt, 2, policy=RequestPolicy(cache_salt=salt))
            driver.drain()
            cached.append(request.cached_tokens)
            assert driver.answers(request) == [expected_answer(prompt, 2)]
        assert cached == [0, 8, 0, 8, 0, 8]


def test_a_prompt_of_several_answers_counts_once() -> None:
    driver = Driver()
    request = driver.submit([1, 2, 3, 4, 5], 4, seeds=(1, 2, 3))
    queue = WaitingQueue()
    for row in request.sequences:
        queue.push(row)
    assert (queue.num_requests, queue.num_tokens) == (1, 5)
    for row in request.sequences:
        queue.discard(row)
    assert (queue.num_requests, queue.num_tokens) == (0, 0)


@pytest.mark.parametrize("low", [1, 3])
def test_a_prompt_that_has_a_row_is_not_passed_over_for_good(low: int) -> None:
    """Prompts of higher priority keep coming, one for each step, and would take all of its tokens."""
    clock = Clock()
    driver = Driver(num_blocks=256, budget=8, waiting=WaitingQueue(clock=clock))
    left = [driver.submit([number] * 40, 1, policy=RequestPolicy(priority=5)) for number in range(low)]
    driver.turn()
    assert all(request.sequences[0].num_computed < 40 for request in left)
    steps = 0
    while not all(request.finished for request in left):
        for _ in range(3):
            driver.submit([7] * 8, 1)
        driver.turn()
        clock.now += 4.0
        steps += 1
        assert steps < 40 * low, [request.sequences[0] for request in left]
        if clock.now < PATIENCE_S:
            assert not left[0].finished, "the priority is kept to for some time"
    driver.drain()
    driver.check_drained()
