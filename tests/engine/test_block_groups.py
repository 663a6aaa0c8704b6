"""Block groups: which blocks a window needs, which of a prefix are cached, how much of the pool windowed rows take."""

from __future__ import annotations

import random

import pytest

from asyncllm.engine.cache.block_groups import BlockGroups, BlockTable
from asyncllm.testing import FakeDevice
from tests.engine.driver import Driver, expected_answer

WINDOWS = [(None,), (2,), (5,), (None, 3), (6, None), (None, None, 4), (2, 7)]


def groups_of(windows: tuple[int | None, ...], block_size: int = 4, chunk: int = 8) -> BlockGroups:
    device = FakeDevice(num_blocks=64, block_size=block_size, num_slots=4, vocab_size=8, windows=windows)
    return BlockGroups(device.limits, chunk)


def needed(window: int | None, position: int, block_size: int) -> set[int]:
    """The blocks of the positions that a token sees, its own among them."""
    first = 0 if window is None else max(0, position - window + 1)
    return {each // block_size for each in range(first, position + 1)}


@pytest.mark.parametrize("windows", WINDOWS)
def test_the_first_block_is_that_of_the_first_position_in_sight(windows: tuple[int | None, ...]) -> None:
    groups = groups_of(windows)
    for group, window in enumerate(windows):
        for position in range(40):
            assert groups.first_needed(group, position) == min(needed(window, position, 4))


@pytest.mark.parametrize("windows", WINDOWS)
def test_a_beginning_is_as_long_as_all_groups_have_what_its_next_token_sees(windows: tuple[int | None, ...]) -> None:
    groups, draw = groups_of(windows), random.Random(repr(windows))
    chain = [bytes([index]) for index in range(9)]
    for _ in range(300):
        has = {
            (group, index)
            for group, window in enumerate(windows)
            for index in range(len(chain))
            if draw.random() < (0.9 if window is None else 0.7)
        }
        known = {groups.key(group, chain[index]) for group, index in has}

        def suffices(end: int, has: set[tuple[int, int]] = has) -> bool:
            return all(
                (group, index) in has
                for group, window in enumerate(windows)
                for index in needed(window, end * 4, 4)
                if index < end
            )

        longest = max(end for end in range(len(chain) + 1) if suffices(end))
        assert groups.longest(chain, 0, known.__contains__) == longest


def test_a_row_holds_the_blocks_that_its_window_reaches_and_no_other() -> None:
    driver = Driver(windows=(5, None), num_blocks=64)
    request = driver.submit(range(8), 40)
    row = request.sequences[0]
    while driver.turn(depth=1) and not request.finished:
        known = len(row.token_ids)
        assert row.tables[0].first == min(needed(5, known - 1, 4))
        assert [table.end for table in row.tables] == [-(-(known - 1) // 4)] * 2
    assert driver.answers(request) == [expected_answer(list(range(8)), 40)]
    driver.check_drained()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_row_alone_waits_for_what_its_window_leaves(depth: int) -> None:
    """The pool is as large as the window: a block is free when the step that saw it last has been read."""
    driver = Driver(windows=(9,), num_blocks=3, block_size=4, budget=4, caching=False)
    request = driver.submit(range(8), 60)
    driver.drain(depth)
    assert driver.answers(request) == [expected_answer(list(range(8)), 60)]
    assert driver.scheduler.counts.preemptions == 0
    driver.check_drained()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_forced_tokens_find_the_blocks_that_their_window_leaves(depth: int) -> None:
    """Of a run that begins while draws of its first tokens are in flight, over the border of a block."""
    for most in range(1, 12):
        driver = Driver(
            num_blocks=5, block_size=2, budget=1, caching=False, windows=(9,), forces=lambda known, n=most: n
        )
        request = driver.submit([0], 30)
        driver.drain(depth)
        assert driver.answers(request) == [expected_answer([0], 30)]
        driver.check_drained()


def test_a_prompt_leaves_what_decoding_rows_are_about_to_need() -> None:
    """It runs alone at first, so that its table grows chunk by chunk; those who come then take blocks one by one."""
    driver = Driver(windows=(13,), num_blocks=7, block_size=4, budget=16, caching=False)
    driver.submit([number % 8 for number in range(43)], 1)
    driver.turn()
    driver.turn()
    writers = [driver.submit([number] * 4, 11) for number in range(2)]
    driver.drain()
    for number, writer in enumerate(writers):
        assert driver.answers(writer) == [expected_answer([number] * 4, 11)]
    assert driver.scheduler.counts.preemptions == 0
    driver.check_drained()


@pytest.mark.parametrize("window", [9, 3])
def test_answers_to_one_prompt_share_what_the_window_has_not_left(window: int) -> None:
    driver = Driver(windows=(window, None), budget=16, caching=False)
    prompt = [number % 8 for number in range(28)]
    request = driver.submit(prompt, 11, seeds=(1, 2, 3))
    driver.drain(depth=1)
    assert driver.answers(request) == [expected_answer(prompt, 11, seed=seed) for seed in (1, 2, 3)]
    driver.check_drained()


def test_a_row_that_was_swapped_takes_what_it_still_sees() -> None:
    driver = Driver(windows=(5, None), num_blocks=20, num_host_blocks=40, caching=False, max_batch_size=3)
    requests = [driver.submit([number] * 6, 40) for number in range(3)]
    while driver.turn():
        for row in driver.scheduler._running:
            lengths = {table.end for table in row.tables}
            assert max(lengths) <= -(-(len(row.token_ids) + row.pending + 1) // 4)
    assert any(batch.swaps.swap_in for batch in driver.batches)
    for number, request in enumerate(requests):
        assert driver.answers(request) == [expected_answer([number] * 6, 40)]
    driver.check_drained()


def test_blocks_of_a_table_are_counted_from_the_sequences_first_token() -> None:
    table = BlockTable(3, [10, 11, 12])
    assert table.end == 6
    assert table.between(4, 6) == [11, 12]
    assert table.between(3, 3) == []
