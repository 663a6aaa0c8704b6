"""What a step holds: budgets, chunks, order, preemption, shared prompts, and arithmetic on steps in flight."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from asyncllm.engine.integrity import check_integrity
from asyncllm.engine.schedule.sequence import Request, SequenceState
from tests.engine.driver import Driver, chunk_sizes, expected_answer

PROMPT = [1, 2, 3, 4, 5, 6, 7, 0, 1, 2]


def test_prefill_and_decode_share_a_step() -> None:
    driver = Driver(budget=4)
    first = driver.submit([1, 2], 8)
    driver.schedule()
    second = driver.submit(PROMPT, 2)
    batch = driver.schedule()
    assert batch is not None
    assert batch.decode == [first.sequences[0].slot]
    assert [(row.slot, len(row.tokens)) for row in batch.prefill] == [(second.sequences[0].slot, 4)]
    driver.drain()
    assert driver.answers(second) == [expected_answer(PROMPT, 2)]
    driver.check_drained()


def test_a_long_prompt_goes_in_chunks_and_samples_with_the_last() -> None:
    driver = Driver(budget=4)
    request = driver.submit(PROMPT, 1)
    driver.drain()
    rows = [row for batch in driver.batches for row in batch.prefill]
    assert chunk_sizes(rows) == [4, 4, 2]
    assert [row.position for row in rows] == [0, 4, 8]
    assert [row.sample for row in rows] == [False, False, True]
    assert driver.answers(request) == [expected_answer(PROMPT, 1)]


@pytest.mark.parametrize("budget", [1, 3, 7, 10, 11])
def test_the_budget_is_filled_across_prompts_and_never_passed(budget: int) -> None:
    driver = Driver(budget=budget, caching=False)
    for index in range(3):
        driver.submit([index, *PROMPT[1:]], 1)
    driver.drain()
    sizes = [sum(chunk_sizes(batch.prefill)) for batch in driver.batches if batch.prefill]
    assert sizes == [budget] * (30 // budget) + ([30 % budget] if 30 % budget else [])


def test_requests_are_admitted_in_the_order_of_arrival() -> None:
    driver = Driver(max_batch_size=2, num_slots=5)
    requests = [driver.submit([index, 1, 1], 3 + index) for index in range(5)]
    started = []
    while driver.turn():
        for request in requests:
            if request.sequences[0].state is not SequenceState.WAITING and request not in started:
                started.append(request)
        assert driver.scheduler.num_running <= 2
        driver.check()
    assert started == requests


def test_fewer_slots_than_rows_bound_the_batch() -> None:
    driver = Driver(max_batch_size=16, num_slots=2)
    for index in range(4):
        driver.submit([index], 3)
    driver.schedule()
    assert driver.scheduler.num_running == 2
    driver.drain()
    driver.check_drained()


@pytest.mark.parametrize("interval", [1, 2, 4])
def test_prefill_interval_spaces_out_prompt_chunks_while_rows_decode(interval: int) -> None:
    driver = Driver(budget=2, interval=interval)
    driver.submit([1, 2], 40)
    driver.turn(1)
    driver.submit(PROMPT, 1)
    driver.drain(depth=1)
    with_prefill = [index for index, batch in enumerate(driver.batches) if batch.prefill]
    chunks = with_prefill[1:]
    assert len(chunks) == 5
    assert {after - before for before, after in itertools.pairwise(chunks)} == {interval}
    assert chunks[0] <= 1 + interval


def test_a_prompt_does_not_wait_for_the_interval_when_nothing_decodes() -> None:
    driver = Driver(budget=2, interval=100)
    driver.submit(PROMPT, 1)
    driver.drain()
    assert len(driver.batches) == 5


def test_blocks_of_a_whole_prompt_are_held_from_its_first_chunk_on() -> None:
    driver = Driver(budget=1)
    request = driver.submit(PROMPT, 1)
    driver.schedule()
    assert len(request.sequences[0].blocks) == 3
    assert driver.scheduler.blocks.num_held == 3
    driver.drain()


def test_a_prompt_that_finds_no_room_waits_and_keeps_its_place() -> None:
    driver = Driver(num_blocks=5, caching=False)
    big = driver.submit(PROMPT, 6)
    other = driver.submit([7, *PROMPT], 1)
    small = driver.submit([1], 1)
    driver.schedule()
    assert [request.sequences[0].state for request in (big, other, small)] == [
        SequenceState.DECODE,
        SequenceState.WAITING,
        SequenceState.WAITING,
    ]
    driver.drain()
    assert driver.answers(other) == [expected_answer([7, *PROMPT], 1)]
    driver.check_drained()


class TestPreemption:
    def crowd(self, depth: int = 2, caching: bool = True) -> tuple[Driver, list[str]]:
        """Four rows that grow to 7 blocks each, in a pool of 12. Returns the driver and who was preempted."""
        driver = Driver(num_blocks=12, caching=caching, num_slots=4)
        requests = [driver.submit([index, 1, 2], 24) for index in range(4)]
        victims: list[str] = []
        before = {request: SequenceState.WAITING for request in requests}
        while driver.turn(depth):
            driver.check()
            for request in requests:
                state = request.sequences[0].state
                if state is SequenceState.WAITING and before[request] is not SequenceState.WAITING:
                    victims.append(str(request.id))
                before[request] = state
        return driver, victims

    @pytest.mark.parametrize("depth", [1, 2, 3])
    @pytest.mark.parametrize("caching", [True, False])
    def test_preempted_answers_are_those_of_undisturbed_ones(self, depth: int, caching: bool) -> None:
        driver, victims = self.crowd(depth, caching)
        assert victims, "the pool is too large for this test"
        for request in driver.requests:
            assert driver.answers(request) == [expected_answer(request.prompt_ids, 24)]
        driver.check_drained()

    def test_the_newest_goes_first_and_the_oldest_never(self) -> None:
        driver, victims = self.crowd()
        assert victims[0] == "3"
        assert "0" not in victims
        assert driver.scheduler.counts.preemptions == len(victims)

    def test_the_oldest_advances_in_every_step(self) -> None:
        driver = Driver(num_blocks=12, num_slots=4)
        oldest, *_ = (driver.submit([index, 1, 2], 24) for index in range(4))
        driver.turn(1)
        while not oldest.finished:
            known = len(oldest.sequences[0].token_ids)
            driver.turn(1)
            assert len(oldest.sequences[0].token_ids) == known + 1

    def test_a_thrashing_pool_still_finishes_everything(self) -> None:
        driver = Driver(num_blocks=6, block_size=1, num_slots=6, max_batch_size=6)
        requests = [driver.submit([index], 4, seeds=(None, 3)) for index in range(6)]
        driver.drain(limit=400)
        for request in requests:
            assert driver.answers(request) == [expected_answer(request.prompt_ids, 4, seed=seed) for seed in (None, 3)]
        driver.check_drained()

    def test_prompt_logprobs_are_of_the_prompt_once(self) -> None:
        """Also when the prompt is computed again together with what had been generated."""
        driver = Driver(num_blocks=9, num_slots=3, budget=5)
        requests = [driver.submit([index, 1, 2, 3, 4], 16, prompt_logprobs=0) for index in range(3)]
        driver.drain()
        assert driver.scheduler.counts.preemptions > 0
        for request in requests:
            assert [entry[0][0] for entry in request.prompt_logprobs] == request.prompt_ids[1:]

    def test_siblings_come_as_soon_as_the_prompt_has_been_read_again(self) -> None:
        driver = Driver(num_blocks=32)
        request = driver.submit([1, 2, 3], 30, seeds=(None, 1))
        driver.schedule()
        driver.scheduler._preempt(request.sequences[0])
        driver.complete()
        for _ in range(6):
            driver.turn()
        assert request.sequences[1].state is SequenceState.DECODE, "it waits for the end of the first answer"
        driver.drain()
        assert driver.answers(request) == [expected_answer([1, 2, 3], 30, seed=seed) for seed in (None, 1)]


class TestStepsInFlight:
    @pytest.mark.parametrize("depth", [1, 2, 3, 4])
    def test_answers_do_not_depend_on_how_late_steps_are_read(self, depth: int) -> None:
        driver = Driver()
        requests = [driver.submit([index, 1], 9, seeds=(index,), stop_ids=[5]) for index in range(6)]
        driver.drain(depth)
        for index, request in enumerate(requests):
            assert driver.answers(request) == [expected_answer([index, 1], 9, seed=index, stop_ids=[5])]
        driver.check_drained()

    @pytest.mark.parametrize("unread", [0, 1, 2, 3])
    def test_pending_counts_the_unread_tokens(self, unread: int) -> None:
        driver = Driver()
        row = driver.submit([1, 2, 3], 10).sequences[0]
        for _ in range(unread):
            driver.schedule()
        assert (row.pending, row.remaining) == (unread, 10 - unread)
        assert row.num_computed == (2 + unread if unread else 0)
        assert len(row.token_ids) == 3
        for read in range(1, unread + 1):
            driver.complete()
            assert (row.pending, len(row.token_ids)) == (unread - read, 3 + read)
        driver.drain()

    def test_no_step_is_scheduled_past_the_last_token(self) -> None:
        driver = Driver()
        driver.submit([1, 2], 3)
        batches = [driver.schedule() for _ in range(5)]
        assert [batch is not None for batch in batches] == [True, True, True, False, False]
        driver.drain()
        assert driver.device.num_tokens == 2 + 2

    def test_a_stop_costs_one_discarded_token_for_each_step_in_flight(self) -> None:
        stop = expected_answer([1, 2], 3)[2]
        assert stop not in expected_answer([1, 2], 2)
        for depth in (1, 2, 3):
            driver = Driver()
            request = driver.submit([1, 2], 50, stop_ids=[stop])
            driver.drain(depth)
            assert driver.answers(request) == [expected_answer([1, 2], 3)]
            assert len(driver.batches) == 3 + depth - 1
            driver.check_drained()

    def test_a_cancelled_row_is_held_until_its_last_step_is_read(self) -> None:
        driver = Driver(caching=False)
        request = driver.submit(PROMPT, 10)
        driver.schedule()
        driver.schedule()
        driver.cancel(request)
        assert driver.scheduler.num_running == 0
        driver.complete()
        assert driver.scheduler.blocks.num_fenced == 3
        driver.complete()
        assert driver.scheduler.blocks.num_free == 64
        driver.check_drained()

    def test_a_slot_is_not_given_away_before_its_last_step_is_read(self) -> None:
        driver = Driver(num_slots=1)
        first = driver.submit([1], 10)
        driver.schedule()
        driver.cancel(first)
        second = driver.submit([2], 1)
        assert driver.schedule() is None
        driver.complete()
        assert driver.schedule() is not None
        driver.drain()
        assert driver.answers(second) == [expected_answer([2], 1)]


class TestCancel:
    @pytest.mark.parametrize("turns", range(8))
    def test_in_every_phase_and_twice(self, turns: int) -> None:
        driver = Driver(budget=4)
        neighbour = driver.submit([3, 2, 1], 12)
        request = driver.submit(PROMPT, 4, seeds=(1, 2, 3))
        for _ in range(turns):
            driver.turn()
        driver.cancel(request)
        driver.check()
        driver.cancel(request)
        driver.drain()
        assert driver.answers(neighbour) == [expected_answer([3, 2, 1], 12)]
        assert all(row.finish_reason in ("abort", "length") for row in request.sequences)
        driver.check_drained()

    def test_the_first_answer_may_end_before_the_others_have_begun(self) -> None:
        driver = Driver(max_batch_size=1, num_slots=1)
        request = driver.submit([1, 2, 3], 2, seeds=(None, 1, 2))
        driver.drain()
        assert driver.answers(request) == [expected_answer([1, 2, 3], 2, seed=seed) for seed in (None, 1, 2)]
        driver.check_drained()


class TestSharedPrompts:
    @pytest.mark.parametrize("caching", [True, False])
    @pytest.mark.parametrize("prompt_len", [1, 2, 4, 5, 7, 8, 9])
    def test_n_answers_hold_the_prompt_once(self, prompt_len: int, caching: bool) -> None:
        """Shared are the full blocks before the last prompt token, which every answer computes for itself."""
        driver = Driver(caching=caching)
        prompt = PROMPT[:prompt_len]
        request = driver.submit(prompt, 3, seeds=(1, 2, 3, 4))
        driver.turn(1)
        driver.schedule()
        tables = [row.blocks for row in request.sequences]
        shared = (prompt_len - 1) // 4
        assert all(table[:shared] == tables[0][:shared] for table in tables)
        tails = [block for table in tables for block in table[shared:]]
        assert len(set(tails)) == len(tails)
        assert driver.scheduler.blocks.num_held == shared + len(tails)
        driver.drain()
        assert driver.answers(request) == [expected_answer(prompt, 3, seed=seed) for seed in (1, 2, 3, 4)]
        driver.check_drained()

    @pytest.mark.parametrize("prompt_len", range(1, 10))
    def test_a_block_is_copied_exactly_when_prompt_tokens_precede_the_last_in_it(self, prompt_len: int) -> None:
        driver = Driver()
        driver.submit(PROMPT[:prompt_len], 2, seeds=(1, 2, 3))
        driver.drain()
        copies = [copy for batch in driver.batches for copy in batch.copies]
        assert len(copies) == (0 if (prompt_len - 1) % 4 == 0 else 2)

    def test_siblings_compute_one_prompt_token(self) -> None:
        driver = Driver()
        driver.submit(PROMPT, 2, seeds=(1, 2, 3))
        driver.drain()
        assert driver.scheduler.counts.prefill_tokens == len(PROMPT) + 2

    def test_siblings_copy_from_any_that_still_runs(self) -> None:
        """The first answer stops at its first token; without a prefix cache the third shares with the second."""
        stop = expected_answer(PROMPT, 1, seed=1)
        seeds = [1, *(seed for seed in range(2, 80) if stop[0] not in expected_answer(PROMPT, 8, seed=seed))][:3]
        driver = Driver(caching=False, max_batch_size=2)
        other = driver.submit([7], 5)
        request = driver.submit(PROMPT, 8, seeds=seeds, stop_ids=stop)
        driver.drain()
        assert other.finished
        assert driver.scheduler.counts.prefill_tokens == 1 + 2 * len(PROMPT) + 1
        assert driver.answers(request) == [expected_answer(PROMPT, 8, seed=seed, stop_ids=stop) for seed in seeds]

    def test_a_second_request_finds_the_first_ones_blocks(self) -> None:
        driver = Driver()
        driver.submit(PROMPT, 1)
        driver.drain()
        second = driver.submit(PROMPT, 4)
        driver.drain()
        assert second.cached_tokens == 8
        assert driver.answers(second) == [expected_answer(PROMPT, 4)]

    def test_blocks_are_not_found_before_their_step_has_been_read(self) -> None:
        driver = Driver()
        driver.submit(PROMPT, 1)
        driver.schedule()
        second = driver.submit(PROMPT, 1)
        driver.schedule()
        assert second.cached_tokens == 0
        driver.drain()

    def test_a_prompt_whose_logprobs_are_asked_is_computed_whole(self) -> None:
        driver = Driver()
        driver.submit(PROMPT, 1)
        driver.drain()
        scored = driver.submit(PROMPT, 1, prompt_logprobs=0)
        driver.drain()
        assert scored.cached_tokens == 0
        assert len(scored.prompt_logprobs) == len(PROMPT) - 1


@pytest.mark.parametrize("caching", [True, False])
def test_a_thousand_prompts_in_a_small_pool(caching: bool) -> None:
    """Beginnings collide, blocks are evicted all the time, rows are preempted: the answers are the oracle's."""
    random = Random(5)
    driver = Driver(num_blocks=14, max_batch_size=6, num_slots=8, budget=9, caching=caching)
    asked: list[tuple[Request, list[int], int]] = []
    for _ in range(1000):
        prompt = [*random.choice([PROMPT, PROMPT[::-1], PROMPT[:4] * 2])[: random.randint(1, 10)], random.randint(0, 3)]
        max_new_tokens = random.randint(1, 20)
        asked.append((driver.submit(prompt, max_new_tokens), prompt, max_new_tokens))
        for _ in range(random.randint(0, 12)):
            driver.turn(random.randint(1, 3))
    driver.drain()
    for request, prompt, max_new_tokens in asked:
        assert driver.answers(request) == [expected_answer(prompt, max_new_tokens)]
    assert driver.scheduler.counts.preemptions > 10
    assert (driver.scheduler.counts.cached_tokens > 1000) == caching
    driver.check_drained()


def test_everybody_is_served_in_bounded_time() -> None:
    """Preemption and a crowded queue delay a request by the work before it in the queue, and not for ever."""
    driver = Driver(num_blocks=10, max_batch_size=4, num_slots=6, caching=False)
    ended_at: dict[Request, int] = {}
    requests = [driver.submit([index % 8] * (1 + index % 7), 1 + index % 24) for index in range(120)]
    for step in range(10_000):
        if not driver.turn():
            break
        for request in requests:
            if request.finished:
                ended_at.setdefault(request, step)
    work = 0
    for request in requests:
        work += len(request.sequences[0].token_ids)
        assert ended_at[request] <= work + 24, f"request {request.id} waited too long"


def test_a_row_that_fails_ends_its_request_and_no_other() -> None:
    driver = Driver(row_failure=lambda history: "not finite" if history[:2] == [6, 6] and len(history) == 5 else None)
    bad = driver.submit([6, 6, 6], 9, seeds=(1, 2))
    good = driver.submit([1, 2, 3], 9)
    driver.drain()
    assert {row.finish_reason for row in bad.sequences} == {"error"}
    assert any(row.error == "not finite" for row in bad.sequences)
    assert driver.answers(good) == [expected_answer([1, 2, 3], 9)]
    driver.check_drained()


class TestIntegrity:
    """The checks of the checks."""

    def running(self) -> Driver:
        driver = Driver()
        driver.submit([1, 2, 3], 9)
        driver.turn()
        driver.check()
        return driver

    def test_a_lost_slot(self) -> None:
        driver = self.running()
        driver.scheduler.slots._free.pop(0)
        with pytest.raises(AssertionError, match="slots are lost or doubled"):
            check_integrity(driver.scheduler)

    def test_a_wrong_count_of_waiting_sequences(self) -> None:
        driver = self.running()
        driver.scheduler.num_waiting -= 1
        with pytest.raises(AssertionError, match="are counted as waiting"):
            check_integrity(driver.scheduler)

    def test_a_block_that_no_table_holds(self) -> None:
        driver = self.running()
        driver.scheduler._running.copy().popitem()[0].tables[0].blocks.pop()
        with pytest.raises(AssertionError, match="references"):
            check_integrity(driver.scheduler)

    def test_a_row_in_the_wrong_state(self) -> None:
        driver = self.running()
        next(iter(driver.scheduler._running)).state = SequenceState.PREFILL
        with pytest.raises(AssertionError, match="prefilling"):
            check_integrity(driver.scheduler)


def test_no_sequence_is_admitted_to_be_preempted_at_once() -> None:
    driver = Driver(num_blocks=4, caching=False)
    first = driver.submit([1] * 3, 8)
    driver.turn(1)
    second = driver.submit([2] * 12, 2)
    driver.turn(1)
    assert second.sequences[0].state is SequenceState.WAITING, "its three blocks are there, but none for the other row"
    driver.drain()
    assert driver.scheduler.counts.preemptions == 0
    assert driver.answers(first) == [expected_answer(first.prompt_ids, 8)]
    assert driver.answers(second) == [expected_answer(second.prompt_ids, 2)]
