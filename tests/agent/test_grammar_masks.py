"""Masks that are filled in threads: the same as without, whoever gets to them, and no thread is left."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncllm.agent.sampling.grammar_masks import MAX_THREADS, SHARE, GrammarMasks
from asyncllm.protocol import Progress

VOCAB = 70
ROWS = 5 * SHARE + 3
PATIENCE = 30.0


class Counting:
    """An answer that may go on with its own number, and says who asked."""

    error: str | None = None
    ended = False

    def __init__(self, number: int, before: Callable[[int], None] = lambda number: None) -> None:
        self.number = number
        self.threads: list[str] = []
        self._before = before

    def consume(self, token: int) -> None:
        self.number = token

    def fill(self, words: NDArray[np.int32]) -> None:
        self._before(self.number)
        self.threads.append(threading.current_thread().name)
        words[:] = -self.number, self.number, self.number + 7


def rows(before: Callable[[int], None] = lambda number: None, first: int = 100) -> dict[int, Counting]:
    return {slot: Counting(first + slot, before) for slot in range(ROWS)}


def given(answers: dict[int, Counting]) -> dict[int, Progress]:
    return dict(answers)


def check(words: NDArray[np.int32], numbers: list[int]) -> None:
    assert words.tolist() == [[-number, number, number + 7] for number in numbers]


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_the_masks_are_those_of_the_slots_in_the_order_asked_for(num_threads: int) -> None:
    masks, answers = GrammarMasks(VOCAB, num_threads), rows()
    masks.begin(given(answers))
    slots = list(reversed(range(0, ROWS, 2)))
    check(masks.take(slots, given(answers)), [100 + slot for slot in slots])
    assert all(len(answer.threads) <= 1 for answer in answers.values())

    # Some have gone on, and the masks that no one took are not theirs any more.
    for slot in range(ROWS):
        answers[slot].consume(500 + slot)
    masks.begin(given(answers))
    check(masks.take(list(range(ROWS)), given(answers)), [500 + slot for slot in range(ROWS)])


def test_threads_fill_while_the_owner_does_something_else() -> None:
    filled = threading.Semaphore(0)
    masks, answers = GrammarMasks(VOCAB, 2), rows(lambda number: filled.release())
    masks.begin(given(answers))
    for _ in range(ROWS):
        assert filled.acquire(timeout=PATIENCE)
    check(masks.take(list(range(ROWS)), given(answers)), [100 + slot for slot in range(ROWS)])
    names = {name for answer in answers.values() for name in answer.threads}
    assert all(name.startswith("asyncllm-masks") for name in names)


def test_the_owner_does_not_wait_for_what_no_thread_has_come_to() -> None:
    others_done = threading.Event()
    own = threading.current_thread().name

    def before(number: int) -> None:
        if threading.current_thread().name != own:
            assert others_done.wait(PATIENCE)
        elif number == 100 + SHARE:
            others_done.set()  # the last that the owner fills: it comes from the other end

    masks, answers = GrammarMasks(VOCAB, 1), rows(before)
    ready = threading.Event()
    answers[0] = Counting(0, lambda number: ready.set())
    masks.begin(given(answers))
    assert ready.wait(PATIENCE)
    check(masks.take(list(range(1, ROWS)), given(answers)), [100 + slot for slot in range(1, ROWS)])
    assert others_done.is_set()
    assert [answers[slot].threads for slot in range(SHARE, ROWS)] == [[own]] * (ROWS - SHARE)


def test_few_rows_need_no_thread_and_many_threads_are_never_made() -> None:
    masks, answers = GrammarMasks(VOCAB, 1), rows()
    few = {slot: answers[slot] for slot in range(SHARE)}
    masks.begin(given(few))
    check(masks.take(list(few), given(few)), [100 + slot for slot in few])
    assert {name for answer in few.values() for name in answer.threads} == {threading.current_thread().name}
    many = GrammarMasks(VOCAB)
    for _ in range(5):
        many.begin(given(answers))
        many.finish()
    assert sum(thread.name.startswith("asyncllm-masks") for thread in threading.enumerate()) <= MAX_THREADS


def test_an_owner_that_takes_a_slot_over_gets_its_own_mask() -> None:
    masks, answers = GrammarMasks(VOCAB, 1), rows()
    masks.begin(given(answers))
    masks.forget(4)
    answers[4] = Counting(900)
    check(masks.take([3, 4], given(answers)), [103, 900])


@pytest.mark.parametrize("where", [0, ROWS - 1])
def test_a_fill_that_raises_is_reported_once(where: int) -> None:
    def before(number: int) -> None:
        if number == 100 + where:
            raise ValueError("a broken grammar")

    masks, answers = GrammarMasks(VOCAB, 2), rows(before)
    masks.begin(given(answers))
    with pytest.raises(ValueError, match="a broken grammar"):
        masks.take(list(range(ROWS)), given(answers))
    answers[where] = Counting(900)
    check(masks.take([where, 5], given(answers)), [900, 105])


def test_the_threads_end_with_their_owner() -> None:
    masks = GrammarMasks(VOCAB, 3)
    masks.begin(given(rows()))
    masks.finish()
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("asyncllm-masks")]
    assert threads
    del masks
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


@pytest.mark.anyio
async def test_an_agent_that_launches_in_the_loop_gets_them_too() -> None:
    """Nothing that would block the loop for longer than to fill the masks there."""
    begun = threading.Event()
    go_on = threading.Event()
    own = threading.current_thread().name

    def before(number: int) -> None:
        if threading.current_thread().name != own:
            begun.set()
            assert go_on.wait(PATIENCE)

    masks, answers = GrammarMasks(VOCAB, 1), rows(before)
    masks.begin(given(answers))
    assert begun.wait(PATIENCE)
    threading.Timer(0.05, go_on.set).start()
    check(masks.take(list(range(ROWS)), given(answers)), [100 + slot for slot in range(ROWS)])
