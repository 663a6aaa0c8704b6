"""Blocks in host memory: what is copied there, in which step, and how it comes back."""

from __future__ import annotations

from typing import Any

import pytest

from asyncllm.engine.cache.block_groups import BlockGroups
from asyncllm.engine.cache.block_manager import BlockManager
from asyncllm.engine.cache.host_blocks import HostBlocks
from asyncllm.engine.cache.prefix_cache import PrefixCache, root_hash
from asyncllm.engine.integrity import check_integrity
from asyncllm.engine.schedule.sequence import Request, RequestPolicy, SequenceState
from asyncllm.engine.schedule.sequence import Sequence as Row
from asyncllm.protocol import Batch, SwapPlan
from asyncllm.testing import FakeDevice
from tests.engine.driver import Driver, expected_answer

PROMPT = [1, 2, 3, 4, 5, 6, 7, 0, 1, 2]


def preempt(driver: Driver, request: Request, index: int = 0) -> Row:
    """As if the pool had run dry just now."""
    row = request.sequences[index]
    driver.scheduler._preempt(row)
    return row


def turn_until_decoding(driver: Driver, request: Request) -> None:
    while request.sequences[0].num_generated == 0:
        driver.turn(1)


def swaps(driver: Driver) -> SwapPlan:
    """All copies so far."""
    return SwapPlan(
        swap_out=[pair for batch in driver.batches for pair in batch.swaps.swap_out],
        swap_in=[pair for batch in driver.batches for pair in batch.swaps.swap_in],
    )


class TestSwapping:
    def crowd(self, num_host_blocks: int, depth: int = 2, caching: bool = True, swapping: bool = True) -> Driver:
        """Four rows that grow to 7 blocks each, in a pool of 12."""
        driver = Driver(num_blocks=12, num_slots=4, num_host_blocks=num_host_blocks, caching=caching, swapping=swapping)
        for index in range(4):
            driver.submit([index, 1, 2], 24)
        while driver.turn(depth):
            driver.check()
        for request in driver.requests:
            assert driver.answers(request) == [expected_answer(request.prompt_ids, 24)]
        driver.check_drained()
        return driver

    @pytest.mark.parametrize("depth", [1, 2, 3, 6])
    @pytest.mark.parametrize("caching", [True, False])
    def test_swapped_rows_go_on_where_they_were(self, depth: int, caching: bool) -> None:
        driver = self.crowd(40, depth, caching)
        counts, host = driver.scheduler.counts, driver.scheduler.host
        assert counts.preemptions > 0
        assert host.num_fallbacks == 0
        # A row that comes back computes its last known token.
        assert counts.prefill_tokens == 4 * 3 + counts.preemptions
        assert counts.prompt_tokens == 4 * 3
        plan = swaps(driver)
        assert (host.num_swapped_out, host.num_swapped_in) == (len(plan.swap_out), len(plan.swap_in))
        assert 0 < host.num_swapped_in <= host.num_swapped_out
        if not caching:
            assert host.num_swapped_in == host.num_swapped_out

    def test_with_too_few_host_blocks_rows_are_computed_again(self) -> None:
        host = self.crowd(1).scheduler.host
        assert host.num_fallbacks > 0

    def test_some_are_swapped_and_some_computed_again(self) -> None:
        driver = self.crowd(5, caching=False)
        assert 0 < driver.scheduler.host.num_fallbacks < driver.scheduler.counts.preemptions

    @pytest.mark.parametrize("depth", [1, 2, 3])
    @pytest.mark.parametrize("length", [5, 6, 7, 8])
    def test_an_older_row_of_a_lower_class_has_no_part_in_the_step_that_copies_it(
        self, depth: int, length: int
    ) -> None:
        """It would be copied ahead of what that step writes."""
        driver = Driver(num_blocks=6, num_slots=2, num_host_blocks=8, caching=False)
        late = driver.submit([0] * length, 14, policy=RequestPolicy(priority=1))
        driver.turn(depth)
        early = driver.submit([1] * 7, 12)
        driver.drain(depth)
        assert driver.scheduler.counts.preemptions > 0
        assert driver.answers(late) == [expected_answer(late.prompt_ids, 14)]
        assert driver.answers(early) == [expected_answer(early.prompt_ids, 12)]
        for batch in driver.batches:
            copied = {block for block, _ in batch.swaps.swap_out}
            assert not copied or len(batch.decode) < 2

    def test_recompute_swaps_nothing(self) -> None:
        driver = self.crowd(40, caching=False, swapping=False)
        assert driver.scheduler.counts.preemptions > 0
        assert not swaps(driver)
        assert driver.scheduler.host.num_fallbacks == 0

    def test_a_row_waits_on_the_host_until_there_is_room(self) -> None:
        driver = Driver(num_blocks=6, num_slots=3, num_host_blocks=8, caching=False)
        first, second = driver.submit(PROMPT[:6], 18), driver.submit(PROMPT[1:7], 12)
        while second.sequences[0].state is not SequenceState.SWAPPED:
            driver.turn(1)
        row = second.sequences[0]
        computed = row.num_computed
        assert len(row.host_blocks) * 4 >= computed > (len(row.host_blocks) - 1) * 4
        assert (driver.scheduler.num_waiting, driver.scheduler.num_running) == (1, 1)
        late = driver.submit([7], 1)
        while row.state is SequenceState.SWAPPED:
            assert late.sequences[0].state is SequenceState.WAITING, "a new row passed one that was swapped out"
            driver.turn(1)
        assert first.finished
        resumed = next(batch for batch in driver.batches if batch.swaps.swap_in)
        assert (resumed.prefill[0].position, len(resumed.prefill[0].tokens)) == (computed, 1)
        driver.drain()
        driver.check_drained()
        assert driver.answers(second) == [expected_answer(PROMPT[1:7], 12)]

    def test_the_oldest_comes_back_first(self) -> None:
        driver = Driver(num_host_blocks=20, caching=False)
        requests = [driver.submit([index, 1, 2], 9) for index in range(4)]
        driver.turn(1)
        for request in (requests[2], requests[3], requests[1]):
            preempt(driver, request)
        driver.max_batch_size = driver.scheduler.admission.max_running = 2
        driver.turn(1)
        assert [row.request for row in driver.scheduler.host.swapped] == requests[2:]
        driver.drain()
        driver.check_drained()

    @pytest.mark.parametrize("unread", [0, 1, 2, 3])
    def test_what_steps_in_flight_write_is_copied_too(self, unread: int) -> None:
        driver = Driver(num_host_blocks=20, caching=False)
        request = driver.submit(PROMPT, 12)
        turn_until_decoding(driver, request)
        for _ in range(unread):
            driver.schedule()
        row = preempt(driver, request)
        assert row.state is SequenceState.SWAPPED
        assert row.num_computed == len(PROMPT) + unread
        assert (driver.schedule() is None) is False
        assert driver.scheduler.num_running == (unread == 0), "its last token is not known yet"
        driver.drain(6)
        assert driver.answers(request) == [expected_answer(PROMPT, 12)]
        assert driver.scheduler.counts.prefill_tokens == len(PROMPT) + 1
        driver.check_drained()

    def test_a_prompt_in_the_midst_of_its_chunks(self) -> None:
        driver = Driver(budget=3, num_host_blocks=20, caching=False)
        request = driver.submit(PROMPT, 4, prompt_logprobs=1)
        driver.schedule()
        driver.schedule()
        row = preempt(driver, request)
        assert (row.state, row.num_computed, len(row.host_blocks)) == (SequenceState.SWAPPED, 6, 2)
        driver.drain()
        assert driver.answers(request) == [expected_answer(PROMPT, 4)]
        assert [entry[0][0] for entry in request.prompt_logprobs] == PROMPT[1:]
        assert driver.scheduler.counts.prefill_tokens == len(PROMPT)
        driver.check_drained()

    def test_what_has_computed_nothing_has_nothing_to_copy(self) -> None:
        driver = Driver(num_host_blocks=20)
        request = driver.submit(PROMPT, 4)
        driver.turn(1)
        driver.cancel(request)
        host = driver.scheduler.host
        other = driver.submit([1], 4).sequences[0]
        assert not host.swap_out(other)
        assert host.num_fallbacks == 0
        driver.drain()

    def test_a_row_that_only_waits_for_its_last_token_is_not_copied(self) -> None:
        driver = Driver(num_host_blocks=20)
        request = driver.submit(PROMPT, 1)
        driver.schedule()
        assert preempt(driver, request).state is SequenceState.WAITING
        driver.drain()
        assert driver.answers(request) == [expected_answer(PROMPT, 1)]
        assert not swaps(driver)
        driver.check_drained()

    def test_logits_of_a_prompt_are_computed_again(self) -> None:
        driver = Driver(budget=4, num_host_blocks=20)
        request = driver.submit(PROMPT, 2)
        request.output_logits = True
        driver.schedule()
        assert preempt(driver, request).state is SequenceState.WAITING
        driver.drain()
        assert sum(len(logits) for logits in request.logits) >= len(PROMPT)
        assert driver.answers(request) == [expected_answer(PROMPT, 2)]

    def test_a_chunk_that_fails_ends_its_swapped_row(self) -> None:
        driver = Driver(budget=4, num_host_blocks=20)
        request = driver.submit(PROMPT, 4)
        batch = driver.schedule()
        assert batch is not None
        row = preempt(driver, request)
        assert driver.schedule() is not None
        assert row.state is SequenceState.SWAPPED, "it came back before it was known to have failed"
        output = driver.device.step(driver.in_flight.popleft())
        output.errors[batch.prefill[0].slot] = "as the test asked"
        driver.scheduler.update(output)
        assert (row.finish_reason, row.error) == ("error", "as the test asked")
        driver.scheduler.update(driver.device.step(driver.in_flight.popleft()))
        driver.ends[request] = 1
        driver._writes.clear()
        driver._reads.clear()
        driver.check_drained()

    def test_a_device_block_is_taken_in_the_step_that_copies_it(self) -> None:
        """The purpose of preempting: the row that found no block gets one at once."""
        driver = Driver(num_blocks=4, num_slots=2, num_host_blocks=4, caching=False)
        driver.submit([1, 2, 3], 12)
        second = driver.submit([4, 5, 6], 9)
        while second.sequences[0].state is not SequenceState.SWAPPED:
            assert driver.turn(1)
        batch = next(batch for batch in driver.batches if batch.swaps)
        taken = {block for *_, blocks in batch.new_blocks for block in blocks}
        assert taken
        assert taken <= {block for block, _ in batch.swaps.swap_out}
        driver.drain()
        driver.check_drained()


class TestEnds:
    @pytest.mark.parametrize("turns", range(9))
    @pytest.mark.parametrize("depth", [1, 2, 4])
    def test_cancelled_in_every_phase_of_a_swap(self, turns: int, depth: int) -> None:
        """Running, on its way down, on the host, on its way up, running again."""
        driver = Driver(num_blocks=8, num_slots=3, num_host_blocks=4)
        neighbour, request = driver.submit([3, 2, 1], 20), driver.submit(PROMPT, 9)
        turn_until_decoding(driver, request)
        for _ in range(depth - 1):
            driver.schedule()
        preempt(driver, request)
        driver.check()
        for _ in range(turns):
            driver.schedule() if len(driver.in_flight) < depth else driver.complete()
            driver.check()
        driver.cancel(request)
        driver.check()
        driver.cancel(request)
        driver.drain(depth)
        assert driver.answers(neighbour) == [expected_answer([3, 2, 1], 20)]
        driver.check_drained()

    def test_an_unread_stop_token_ends_a_swapped_row(self) -> None:
        stop = expected_answer([1, 2], 3)[2]
        driver = Driver(num_host_blocks=20)
        request = driver.submit([1, 2], 12, stop_ids=[stop])
        turn_until_decoding(driver, request)
        driver.schedule()
        driver.schedule()
        assert preempt(driver, request).state is SequenceState.SWAPPED
        driver.drain()
        assert driver.answers(request) == [expected_answer([1, 2], 3)]
        assert not swaps(driver).swap_in
        driver.check_drained()

    def test_host_blocks_are_free_when_the_step_that_copies_to_them_is_read(self) -> None:
        driver = Driver(num_host_blocks=3, caching=False)
        first, second = driver.submit(PROMPT, 12), driver.submit(PROMPT, 12)
        turn_until_decoding(driver, second)
        preempt(driver, second)
        driver.cancel(second)
        assert driver.scheduler.host.blocks.num_available == 0
        assert preempt(driver, first).state is SequenceState.WAITING, "one step copies two blocks to the same place"
        assert driver.scheduler.host.num_fallbacks == 1
        driver.turn(1)
        assert driver.scheduler.host.blocks.num_free == 3
        driver.drain()
        driver.check_drained()

    def test_blocks_that_were_there_already_wait_for_no_step(self) -> None:
        """Nothing is to be copied, so that there need not be another step at all."""
        driver = Driver(num_blocks=4, block_size=1, num_slots=2, num_host_blocks=1)
        request = driver.submit([0], 2, seeds=(None, 1))
        for _ in range(2):
            driver.turn(1)
            driver.scheduler._preempt(next(reversed(driver.scheduler._running)))
        host = driver.scheduler.host
        assert host.swapped
        assert not host.plan
        driver.cancel(request)
        driver.check_drained()

    def test_host_blocks_are_free_when_the_step_that_copies_from_them_is_read(self) -> None:
        driver = Driver(num_host_blocks=3, caching=False)
        request = driver.submit(PROMPT, 12)
        turn_until_decoding(driver, request)
        preempt(driver, request)
        batch = driver.schedule()
        assert batch is not None
        assert [block for _, block in batch.swaps.swap_out] == [block for block, _ in batch.swaps.swap_in]
        assert driver.scheduler.host.blocks.num_available == 0
        driver.complete()
        assert driver.scheduler.host.blocks.num_free == 3
        driver.drain()
        driver.check_drained()


class TestSharing:
    def test_answers_to_one_prompt_share_its_blocks_on_the_host(self) -> None:
        driver = Driver(num_host_blocks=20)
        request = driver.submit(PROMPT, 9, seeds=(1, 2, 3))
        while any(row.num_generated < 2 for row in request.sequences):
            driver.turn(1)
        rows = [preempt(driver, request, index) for index in (2, 1, 0)]
        assert len({tuple(row.host_blocks[:2]) for row in rows}) == 1
        assert len({row.host_blocks[2] for row in rows}) == 3
        assert driver.scheduler.host.num_swapped_out == 2 + 3
        driver.drain()
        assert driver.answers(request) == [expected_answer(PROMPT, 9, seed=seed) for seed in (1, 2, 3)]
        driver.check_drained()

    def test_blocks_that_a_step_in_flight_may_fail_to_write_are_not_shared(self) -> None:
        driver = Driver(num_host_blocks=20)
        driver.submit(PROMPT, 9)
        driver.schedule()
        preempt(driver, driver.requests[0])
        second = driver.submit(PROMPT, 9)
        driver.complete()
        driver.cancel(driver.requests[0])
        driver.drain()
        assert second.cached_tokens == 0
        driver.check_drained()

    def test_what_the_device_still_has_is_not_copied_back(self) -> None:
        driver = Driver(num_host_blocks=20)
        request = driver.submit(PROMPT, 9)
        turn_until_decoding(driver, request)
        preempt(driver, request)
        driver.drain()
        plan = swaps(driver)
        assert (len(plan.swap_out), len(plan.swap_in)) == (3, 1)
        assert driver.answers(request) == [expected_answer(PROMPT, 9)]
        driver.check_drained()

    def test_a_swap_takes_the_room_of_what_is_cached(self) -> None:
        driver = Driver(num_host_blocks=3)
        first = driver.submit(PROMPT, 9)
        turn_until_decoding(driver, first)
        preempt(driver, first)
        driver.drain()
        assert driver.scheduler.host.blocks.num_idle == 2
        second = driver.submit(PROMPT[::-1], 9)
        turn_until_decoding(driver, second)
        assert preempt(driver, second).state is SequenceState.SWAPPED
        assert driver.scheduler.host.blocks.num_held == 3
        driver.drain()
        driver.check_drained()


class TestPrefixTier:
    def evicted(self, num_host_blocks: int = 8, num_blocks: int = 4, **settings: Any) -> Driver:
        """A prompt of 10 tokens has been answered, and its two whole blocks have left the device since."""
        driver = Driver(num_blocks=num_blocks, num_host_blocks=num_host_blocks, **settings)
        driver.submit(PROMPT, 1)
        driver.drain()
        driver.submit([7] * (4 * num_blocks - 2), 1)
        driver.drain()
        cache = driver.scheduler.prefix_cache
        assert cache is not None
        assert cache.match(driver.requests[0].block_hashes) == []
        return driver

    @pytest.mark.parametrize("swapping", [True, False])
    def test_an_evicted_beginning_comes_back_from_the_host(self, swapping: bool) -> None:
        driver = self.evicted(swapping=swapping)
        assert driver.scheduler.host.blocks.num_idle == 2
        before = driver.scheduler.counts.prefill_tokens
        request = driver.submit(PROMPT, 4)
        driver.drain()
        assert driver.answers(request) == [expected_answer(PROMPT, 4)]
        assert request.cached_tokens == 8
        assert driver.scheduler.counts.prefill_tokens - before == 2
        assert driver.scheduler.host.num_swapped_in == 2
        driver.check_drained()

    def test_one_step_copies_a_beginning_once_for_all_who_need_it(self) -> None:
        driver = self.evicted(num_blocks=12)
        driver.submit(PROMPT, 1)
        driver.submit(PROMPT[:9], 1)
        batch = driver.schedule()
        assert batch is not None
        assert (len(batch.prefill), len(batch.swaps.swap_in)) == (2, 2)
        driver.drain()
        assert [request.cached_tokens for request in driver.requests[2:]] == [8, 8]
        assert driver.answers(driver.requests[3]) == [expected_answer(PROMPT[:9], 1)]
        driver.check_drained()

    def test_a_beginning_goes_down_once(self) -> None:
        driver = self.evicted()
        before = driver.scheduler.host.num_swapped_out
        driver.submit(PROMPT, 1)
        driver.drain()
        copied = driver.scheduler.host.num_swapped_out
        assert copied > before, "the other prompt has made room"
        driver.submit([7] * 14, 1)
        driver.drain()
        assert driver.scheduler.host.num_swapped_out == copied
        driver.check_drained()

    @pytest.mark.parametrize(("least", "cached"), [(8, 8), (9, 0)])
    def test_short_beginnings_are_computed_again(self, least: int, cached: int) -> None:
        driver = self.evicted(min_copied_tokens=least)
        request = driver.submit(PROMPT, 1)
        driver.drain()
        assert request.cached_tokens == cached
        assert driver.scheduler.host.num_swapped_in == cached // 4

    def test_the_host_forgets_what_was_used_least_recently(self) -> None:
        driver = self.evicted(num_host_blocks=2)
        assert driver.scheduler.host.blocks.num_idle == 2
        driver.submit([5] * 14, 1)
        driver.drain()
        request = driver.submit(PROMPT, 1)
        driver.drain()
        assert request.cached_tokens == 0, "two blocks of the second prompt went down since"
        driver.check_drained()

    def test_cached_blocks_that_a_swap_shares_make_no_room_for_its_others(self) -> None:
        driver = self.evicted(num_host_blocks=2)
        request = driver.submit(PROMPT, 4)
        turn_until_decoding(driver, request)
        assert request.cached_tokens == 8
        assert preempt(driver, request).state is SequenceState.WAITING
        assert driver.scheduler.host.num_fallbacks == 1
        driver.drain()
        driver.check_drained()

    def test_without_a_prefix_cache_nothing_is_kept(self) -> None:
        driver = Driver(num_blocks=4, num_host_blocks=8, caching=False)
        for prompt in (PROMPT, [7] * 14, PROMPT):
            driver.submit(prompt, 1)
            driver.drain()
        assert not swaps(driver)
        assert driver.scheduler.host.blocks.num_free == 8

    def test_what_asks_for_its_prompts_logprobs_is_computed_whole(self) -> None:
        driver = self.evicted()
        request = driver.submit(PROMPT, 1, prompt_logprobs=1)
        driver.drain()
        assert request.cached_tokens == 0
        assert [entry[0][0] for entry in request.prompt_logprobs] == PROMPT[1:]


def test_a_full_host_lets_cached_blocks_go() -> None:
    limits = FakeDevice(num_blocks=2, num_host_blocks=1).limits
    device = BlockManager(2, PrefixCache())
    host = HostBlocks(limits, BlockGroups(limits, 8), device, swapping=True)
    assert device.prefix_cache is not None
    blocks = device.allocate(2)
    for block in blocks:
        device.prefix_cache.commit(root_hash(bytes([block])), block)
    device.retire(blocks, 0, 0)
    device.allocate(2)
    assert host.plan.swap_out == [(blocks[1], 0)], "the second one finds the only place taken by the first"
    host.take_plan(0)
    host.step_read(0)
    assert host.blocks.num_idle == 1
    host.check_integrity()


def test_integrity_is_checked() -> None:
    driver = Driver(num_host_blocks=20)
    request = driver.submit(PROMPT, 9)
    turn_until_decoding(driver, request)
    row = preempt(driver, request)
    check_integrity(driver.scheduler, driver.requests)
    lost = row.host_tables[0].blocks.pop()
    with pytest.raises(AssertionError, match="references"):
        check_integrity(driver.scheduler)
    row.host_tables[0].blocks.append(lost)
    row.num_computed += 9
    with pytest.raises(AssertionError, match="has lost host blocks"):
        check_integrity(driver.scheduler)
    row.num_computed -= 9
    row.state = SequenceState.WAITING
    with pytest.raises(AssertionError, match="kept as such"):
        check_integrity(driver.scheduler)
    row.state = SequenceState.SWAPPED
    driver.drain()


def test_a_batch_says_whether_it_swaps() -> None:
    assert not Batch(step=0, starts=[], new_blocks=[], copies=[], decode=[], prefill=[]).swaps
    assert SwapPlan(swap_in=[(0, 1)])
